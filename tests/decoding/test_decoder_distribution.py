"""The whole sampled decoder follows the target's distribution.

`verify_lossless` enumerates the joint distribution of the first four tokens over a vocabulary of five and compares it
with 200,000 continuations of the compiled step, over ragged prompts, every sampling control and draft lengths that
change between steps and rows, in one batch. What breaking any of this means: users who turn speculation on get text
from another distribution, and no accuracy test of theirs tells them.
"""

import jax
import jax.numpy as jnp
import pytest

import bass_jax as bass
from bass_jax.acceptance import registered_rules
from bass_jax.drafters import NgramDrafter
from bass_jax.sampling.keys import Role
from bass_jax.testing.lossless import SETTINGS, tiny_target, verify_lossless
from tests import faults, tiny
from tests.marks import mostly_slow

VOCAB = 5
THRESHOLD = 1e-3 / 128
"""p-values are uniform where the decoder is exact; Bonferroni over the cases of this file and some to come."""

pytestmark = pytest.mark.optimized
CAUGHT = 1e-9
"""Where a fault is planted the p-value is not small by accident."""

FEWER = {"num_samples": 60_000, "settings": SETTINGS[:4]}
"""Samples that show a planted fault, without the controls that have nothing to do with it."""

RULES = sorted(
    (name, 1 if rule.accept_candidates is None else 2)
    for name, rule in registered_rules().items()
    if rule.lossless and rule.noise != "none"
)
"""With the number of chains that they evaluate here."""

DRAFTERS = {
    "combined": tiny.ensemble_drafter(tiny.model_drafter(tiny.perturbed(tiny_target(), 0.15), VOCAB), VOCAB),
    "combined with hidden": tiny.ensemble_drafter(tiny.eagle_drafter(tiny_target(), VOCAB, scale=4.0), VOCAB),
    "hidden": tiny.eagle_drafter(tiny_target(), VOCAB, scale=4.0),
    "model": tiny.model_drafter(tiny.perturbed(tiny_target(), 0.15), VOCAB),
    "ngram": NgramDrafter(),
    "store": tiny.retrieval_drafter(VOCAB),
    "table": tiny.table_drafter(VOCAB),
}
ALL = [(*rule, drafter) for rule in RULES for drafter in ("model", "ngram", "table")]
QUICK = {(*rule, "table") for rule in RULES} | {
    ("token", 1, "model"),
    ("block", 1, "model"),
    ("shared_noise", 1, "ngram"),
}
"""Every rule, and every drafter under some."""

WITH_CANDIDATES = ("model", "ngram", "table")
"""Drafters that propose several chains."""

PADDED = {size: tiny.model_drafter(tiny.padded_vocabulary(tiny.perturbed(tiny_target(), 0.15), size), VOCAB) for size in (3, 9)}
REJECT_ALL = "bass_jax.acceptance.template:REJECT_ALL"
STEPS = (bass.decode_step, bass.speculate_step)


@pytest.mark.parametrize("rule, num_candidates, drafter", mostly_slow(ALL, lambda case: case in QUICK))
def test_every_lossless_rule_keeps_the_targets_distribution(rule, num_candidates, drafter):
    assert verify_lossless(DRAFTERS[drafter], rule, draft_len=3, num_candidates=num_candidates).p_value > THRESHOLD


@pytest.mark.parametrize(
    "rule, num_candidates, drafter, draft_len",
    mostly_slow(
        [
            ("token", 1, "combined", 3), ("token", 1, "hidden", 3), ("token", 1, "combined with hidden", 3),
            ("token", 1, "store", 3), ("block", 1, "combined", 2), ("token", 1, "model", 0), ("token", 1, "model", 1),
            ("token", 1, "model", 5), ("token", 1, "ngram", 5), ("multi_draft", 3, "table", 2),
            (REJECT_ALL, 1, "table", 3),
        ],
        lambda case: case[2:] in (("model", 0), ("ngram", 5)) or (case[3] == 3 and case[2] != "store"),
    ),
)  # fmt: skip
def test_other_lengths_and_rules_keep_it_too(rule, num_candidates, drafter, draft_len):
    report = verify_lossless(DRAFTERS[drafter], rule, draft_len=draft_len, num_candidates=num_candidates)
    assert report.p_value > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("draft_len", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@pytest.mark.parametrize("rule, num_candidates", [*RULES, ("multi_draft", 1), ("multi_draft", 4)])
def test_every_lossless_rule_everywhere(rule, num_candidates, drafter, draft_len):
    if num_candidates > 1 and drafter not in WITH_CANDIDATES:
        pytest.skip("proposes one chain")
    report = verify_lossless(DRAFTERS[drafter], rule, draft_len=draft_len, num_candidates=num_candidates)
    assert report.p_value > THRESHOLD


@pytest.mark.parametrize(
    "rule, num_candidates", mostly_slow([("token", 1), ("multi_draft", 2)], lambda case: case[1] == 1)
)
def test_rows_that_end_and_may_not_end_yet_keep_it(rule, num_candidates):
    """Stop tokens inside a window, banned until a row has emitted enough."""
    settings = ({"temperature": 1.0}, *({"temperature": 1.0, "min_new_tokens": num} for num in (1, 2, 4)))
    report = verify_lossless(
        DRAFTERS["model"],
        rule,
        num_candidates=num_candidates,
        settings=settings,
        stop_tokens=(3, 1),
        num_samples=120_000,
    )
    assert report.p_value > THRESHOLD


def no_repeat(logits, tokens, position):
    """A user's own: never the same token twice in a row, and odd tokens are less likely at odd positions."""
    logits = jnp.where(jnp.arange(VOCAB) == tokens[position - 1], -jnp.inf, logits)
    return logits - 1.5 * (jnp.arange(VOCAB) % 2) * (position % 2)


@pytest.mark.parametrize(
    "rule, num_candidates",
    mostly_slow([("token", 1), ("block", 1), ("multi_draft", 2)], lambda case: case[0] == "token"),
)
def test_a_users_processor_keeps_it(rule, num_candidates):
    report = verify_lossless(
        DRAFTERS["model"], rule, num_candidates=num_candidates, logits_processors=(no_repeat,), num_samples=120_000
    )
    assert report.p_value > THRESHOLD


@pytest.mark.parametrize("size", mostly_slow(PADDED, lambda size: size == 3))
def test_a_draft_with_another_vocabulary_keeps_the_targets_distribution(size):
    """Broken by a distribution that counts what the target lacks, or by a noise vector of the draft's width."""
    assert verify_lossless(PADDED[size], "token", draft_len=3, **FEWER).p_value > THRESHOLD


def test_regular_decoding_keeps_the_targets_distribution():
    assert verify_lossless(DRAFTERS["ngram"], draft_len=0, step=bass.decode_step).p_value > THRESHOLD


def test_a_step_of_each_kind_in_turn_keeps_the_targets_distribution():
    """Regular and speculative steps mixed: their noise and their caches must not get into each other's way."""
    assert verify_lossless(DRAFTERS["model"], step=_either_step).p_value > THRESHOLD


def _either_step(pair, state, spec):
    is_odd = state.num_steps[0] % 2 == 1
    regular, speculative = (lambda step=step: step(pair, state, spec)[0] for step in STEPS)
    return jax.lax.cond(is_odd, regular, speculative), None


# Negative controls: the same statistic finds every fault that is planted.


@pytest.mark.parametrize("fault", ["RESIDUAL_FROM_UNIFORM", "FIRST_TOKEN_UNCHECKED", "OFF_BY_ONE"])
def test_a_faulty_rule_is_caught(fault):
    assert verify_lossless(DRAFTERS["table"], f"tests.faults:{fault}", **FEWER).p_value < CAUGHT


def test_a_drafter_that_returns_another_law_is_caught():
    drafter = faults.WrongLawDrafter(DRAFTERS["table"].table)
    assert verify_lossless(drafter, **FEWER).p_value < CAUGHT


@pytest.mark.parametrize("role", [Role.ACCEPT, Role.RESIDUAL])
def test_a_stream_shared_with_the_draft_is_caught(monkeypatch, role):
    """The drafter is handed the keys of another role, as when a role is forgotten."""
    monkeypatch.setattr("bass_jax.decoding.step._draft_keys", faults.shared_stream(role))

    def fresh_step(*arguments):  # another function: the executable of the sound one is not met
        return bass.speculate_step(*arguments)

    assert verify_lossless(DRAFTERS["table"], draft_len=1, step=fresh_step, **FEWER).p_value < CAUGHT


def test_penalties_that_stand_still_over_the_window_are_caught(monkeypatch):
    monkeypatch.setattr("bass_jax.sampling.logits_processors._penalize", faults.frozen_penalties)

    def fresh_step(*arguments):
        return bass.speculate_step(*arguments)

    assert verify_lossless(DRAFTERS["table"], num_samples=60_000, step=fresh_step).p_value < CAUGHT


def test_chains_that_say_they_were_drawn_with_replacement_are_caught():
    drafter = faults.ForgetfulCandidatesDrafter(DRAFTERS["table"].table)
    assert verify_lossless(drafter, "multi_draft", num_candidates=2, **FEWER).p_value < CAUGHT
