"""The sampled tokens of the whole decoder follow the target's distribution.

`verify_lossless` compares the joint distribution of the first four tokens over a vocabulary of five with samples of
the compiled step. One batch has prompts of different lengths, every sampling parameter, and draft lengths that change
between steps and rows.
"""

import jax
import jax.numpy as jnp
import pytest

import bass_jax as bass
from bass_jax.acceptance import registered_rules
from bass_jax.drafters import NgramDrafter, SuffixDrafter
from bass_jax.sampling.keys import Role
from bass_jax.testing.lossless import SETTINGS, tiny_target, verify_lossless
from tests import faults, tiny
from tests.marks import mostly_slow

pytestmark = pytest.mark.optimized

VOCAB = 5
THRESHOLD = 1e-3 / 128
"""p-values are uniform if the decoder is exact. This is a Bonferroni correction for about 128 cases."""

CAUGHT = 1e-9
"""A p-value that is not a coincidence, for planted faults."""

FEWER = {"num_samples": 60_000, "settings": SETTINGS[:4]}
"""For planted faults, without the sampling parameters that have nothing to do with them."""

QUICK_SAMPLES = 40_000
"""With so many samples, each planted fault of this file has a p-value below `CAUGHT`."""

RULES = sorted(
    (name, 1 if rule.accept_candidates is None else 2)
    for name, rule in registered_rules().items()
    if rule.lossless and rule.noise != "none"
)
"""The names of the lossless sampling rules, with the number of candidates that each gets here."""

DRAFT = tiny.perturbed(tiny_target(), 0.15)
DRAFTERS = {
    "eagle": tiny.eagle_drafter(tiny_target(), VOCAB, scale=4.0),
    "eagle3": tiny.eagle3_drafter(tiny_target(), VOCAB, scale=4.0),
    "p-eagle": tiny.eagle3_drafter(tiny_target(), VOCAB, scale=4.0, mask=2),
    "mtp": tiny.mtp_drafter(tiny_target(), VOCAB, scale=4.0),
    "dflash": tiny.dflash_drafter(tiny_target(), VOCAB, scale=4.0, block_size=9),
    "ensemble": tiny.ensemble_drafter(tiny.model_drafter(DRAFT, VOCAB), VOCAB),
    "ensemble with eagle": tiny.ensemble_drafter(tiny.eagle_drafter(tiny_target(), VOCAB, scale=4.0), VOCAB),
    "model": tiny.model_drafter(DRAFT, VOCAB),
    "other vocabulary": tiny.other_vocabulary(VOCAB),
    "ngram": NgramDrafter(),
    "suffix": SuffixDrafter(),
    "suffix with finished text": tiny.shared_suffix(VOCAB),
    "retrieval": tiny.retrieval_drafter(VOCAB),
    "table": tiny.table_drafter(VOCAB),
}
LENGTHS = (1, 2, 5, 8)
"""Draft lengths that are combined with rules and drafters."""

MULTI_DRAFT_DRAFTERS = ("model", "ngram", "table")
PADDED = {size: tiny.model_drafter(tiny.padded_vocabulary(DRAFT, size), VOCAB) for size in (3, 9)}
REJECT_ALL = "bass_jax.acceptance.template:REJECT_ALL"


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """A row has room for a prompt and ten tokens, not for 64: suffix decoding compares all pairs of positions."""
    monkeypatch.setattr("bass_jax.config.MIN_CAPACITY", 16)


@pytest.mark.parametrize(
    "rule, num_candidates, drafter, draft_len",
    mostly_slow(
        [
            ("token", 1, "model", 3),
            ("token", 1, "other vocabulary", 3),
            ("block", 1, "table", 3),
            ("shared_noise", 1, "ngram", 5),
            ("multi_draft", 2, "table", 2),
            ("multi_draft", 2, "table", 3),
        ],
        lambda case: case == ("token", 1, "model", 3),
    ),
)
def test_every_rule_keeps_the_targets_distribution(rule, num_candidates, drafter, draft_len):
    report = verify_lossless(
        DRAFTERS[drafter], rule, draft_len=draft_len, num_candidates=num_candidates, num_samples=QUICK_SAMPLES
    )
    assert report.p_value > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "ngram", "table"])
@pytest.mark.parametrize("rule, num_candidates", RULES)
def test_every_rule_keeps_the_targets_distribution_with_more_samples(rule, num_candidates, drafter):
    assert verify_lossless(DRAFTERS[drafter], rule, draft_len=3, num_candidates=num_candidates).p_value > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, num_candidates, drafter, draft_len",
    [
        ("token", 1, "ensemble", 3),
        ("token", 1, "eagle", 3),
        ("token", 1, "eagle3", 3),
        ("token", 1, "p-eagle", 3),
        ("block", 1, "p-eagle", 2),
        ("token", 1, "mtp", 3),
        ("token", 1, "dflash", 3),
        ("block", 1, "dflash", 2),
        ("token", 1, "ensemble with eagle", 3),
        ("token", 1, "retrieval", 3),
        ("token", 1, "suffix", 3),
        ("token", 1, "suffix with finished text", 3),
        ("block", 1, "ensemble", 2),
        ("token", 1, "model", 0),
        ("token", 1, "model", 1),
        ("token", 1, "model", 5),
        ("token", 1, "ngram", 5),
        ("multi_draft", 3, "table", 2),
        (REJECT_ALL, 1, "table", 3),
    ],
)
def test_other_drafters_and_draft_lengths_keep_it_with_more_samples(rule, num_candidates, drafter, draft_len):
    report = verify_lossless(DRAFTERS[drafter], rule, draft_len=draft_len, num_candidates=num_candidates)
    assert report.p_value > THRESHOLD


def combinations() -> list[tuple[str, int, str, int]]:
    """Returns every rule with every drafter, so that each of both meets every draft length.

    The length of a case limits the drafts of its rows, which get all numbers of drafts up to it. Without drafts nothing
    depends on the rule and the drafter together, so each meets the length 0 with one of the others.
    """
    rules = sorted([*RULES, ("multi_draft", 1), ("multi_draft", 4)], key=lambda rule: rule[1])
    cases = [(*rule, "model", 0) for rule in rules]
    cases += [("token", 1, drafter, 0) for drafter in sorted(DRAFTERS) if drafter != "model"]
    for r, (rule, num_candidates) in enumerate(rules):
        for d, drafter in enumerate(sorted(DRAFTERS) if num_candidates == 1 else MULTI_DRAFT_DRAFTERS):
            lengths = [LENGTHS[(r + d) % len(LENGTHS)]]
            if num_candidates > 1:  # Few drafters, so that one length each does not cover all.
                lengths.append(LENGTHS[(r + d + 2) % len(LENGTHS)])
            cases += [(rule, num_candidates, drafter, length) for length in lengths]
    return cases


def test_the_combinations_contain_every_pair():
    cases = combinations()
    rules = {*RULES, ("multi_draft", 1), ("multi_draft", 4)}
    singles = {rule for rule in rules if rule[1] == 1}
    pairs = {(*rule, drafter) for rule in singles for drafter in DRAFTERS}
    pairs |= {(*rule, drafter) for rule in rules for drafter in MULTI_DRAFT_DRAFTERS}
    assert {case[:3] for case in cases if case[3] > 0} == pairs
    assert {(*case[:2], case[3]) for case in cases} == {(*rule, length) for rule in rules for length in (0, *LENGTHS)}
    assert {case[2:] for case in cases} == {(drafter, length) for drafter in DRAFTERS for length in (0, *LENGTHS)}


@pytest.mark.slow
@pytest.mark.parametrize("rule, num_candidates, drafter, draft_len", combinations())
def test_all_combinations_keep_the_targets_distribution(rule, num_candidates, drafter, draft_len):
    report = verify_lossless(
        DRAFTERS[drafter], rule, draft_len=draft_len, num_candidates=num_candidates, num_samples=QUICK_SAMPLES
    )
    assert report.p_value > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("rule, num_candidates", [("token", 1), ("multi_draft", 2)])
def test_stop_tokens_and_minimum_lengths_keep_it(rule, num_candidates):
    """Stop tokens occur inside accepted runs, and are banned until a row has emitted enough tokens."""
    settings = ({"temperature": 1.0}, *({"temperature": 1.0, "min_new_tokens": num} for num in (1, 2, 4)))
    report = verify_lossless(
        DRAFTERS["model"],
        rule,
        num_candidates=num_candidates,
        settings=settings,
        stop_tokens=(3, 1),
        num_samples=QUICK_SAMPLES if rule == "token" else 120_000,
    )
    assert report.p_value > THRESHOLD


def no_repeat(logits, tokens, position):
    """A user's processor: no token twice in a row, and odd tokens are less probable at odd positions."""
    logits = jnp.where(jnp.arange(VOCAB) == tokens[position - 1], -jnp.inf, logits)
    return logits - 1.5 * (jnp.arange(VOCAB) % 2) * (position % 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, num_candidates",
    [("token", 1), ("block", 1), ("multi_draft", 2)],
)
def test_a_users_processor_keeps_it(rule, num_candidates):
    report = verify_lossless(
        DRAFTERS["model"],
        rule,
        num_candidates=num_candidates,
        logits_processors=(no_repeat,),
        num_samples=QUICK_SAMPLES if rule == "token" else 120_000,
    )
    assert report.p_value > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("size", PADDED)
def test_a_draft_model_with_another_vocabulary_size_keeps_it(size):
    """The distributions of both models and their noise must cover the same tokens."""
    assert verify_lossless(PADDED[size], "token", draft_len=3, **FEWER).p_value > THRESHOLD


@pytest.mark.slow
def test_regular_decoding_keeps_the_targets_distribution():
    assert verify_lossless(DRAFTERS["ngram"], draft_len=0, step=bass.decode_step).p_value > THRESHOLD


@pytest.mark.slow
def test_regular_and_speculative_steps_in_turns_keep_it():
    """Both kinds of steps share the random streams and the caches."""
    report = verify_lossless(DRAFTERS["model"], step=_regular_or_speculative_step, num_samples=QUICK_SAMPLES)
    assert report.p_value > THRESHOLD


def _regular_or_speculative_step(pair, state, spec):
    is_odd = state.num_steps[0] % 2 == 1
    steps = (bass.decode_step, bass.speculate_step)
    return jax.lax.cond(is_odd, *(lambda step=step: step(pair, state, spec)[0] for step in steps)), None


# Negative controls: the same test finds every planted fault.


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["RESIDUAL_FROM_UNIFORM", "FIRST_TOKEN_UNCHECKED", "OFF_BY_ONE"])
def test_a_faulty_rule_is_found(fault):
    assert verify_lossless(DRAFTERS["table"], f"tests.faults:{fault}", **FEWER).p_value < CAUGHT


@pytest.mark.slow
def test_a_drafter_that_returns_another_distribution_is_found():
    drafter = faults.WrongProbsDrafter(DRAFTERS["table"].table)
    assert verify_lossless(drafter, **FEWER).p_value < CAUGHT


@pytest.mark.parametrize("role", mostly_slow([Role.ACCEPT, Role.RESIDUAL], lambda role: role == Role.ACCEPT))
def test_a_random_stream_shared_with_the_draft_is_found(monkeypatch, role):
    """The drafter gets the keys of another role, as if its own role had been forgotten."""
    monkeypatch.setattr("bass_jax.decoding.step._draft_keys", faults.shared_stream(role))
    assert verify_lossless(DRAFTERS["table"], draft_len=1, step=_fresh_step(), **FEWER).p_value < CAUGHT


@pytest.mark.slow
def test_penalties_that_ignore_the_drafts_are_found(monkeypatch):
    monkeypatch.setattr("bass_jax.sampling.logits_processors._penalize", faults.frozen_penalties)
    assert verify_lossless(DRAFTERS["table"], num_samples=60_000, step=_fresh_step()).p_value < CAUGHT


@pytest.mark.slow
def test_candidates_with_the_distribution_of_sampling_with_replacement_are_found():
    drafter = faults.WithReplacementDrafter(DRAFTERS["table"].table)
    assert verify_lossless(drafter, "multi_draft", num_candidates=2, **FEWER).p_value < CAUGHT


def _fresh_step():
    """Returns another function object, so that the correct step's compiled code is not used."""
    return lambda *arguments: bass.speculate_step(*arguments)
