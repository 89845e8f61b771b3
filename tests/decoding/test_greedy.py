"""Greedy speculation equals greedy decoding token for token, for all drafters, rules and draft lengths."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.acceptance import registered_rules
from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.drafters import NgramDrafter, SuffixDrafter
from bass_jax.drafters.template import RepeatDrafter
from tests import tiny
from tests.marks import mostly_slow

LIMITS = (40, 37, 40)
RULES = sorted(name for name, rule in registered_rules().items() if rule.lossless)
QUALITIES = ("perfect", "often accepted", "rarely accepted")
OTHER_DRAFTERS = (
    "reduced vocabulary",
    "shared embedding",
    "other vocabulary",
    "eagle",
    "eagle3",
    "p-eagle",
    "mtp",
    "dflash",
    "ngram",
    "suffix",
    "suffix with finished text",
    "retrieval",
    "ensemble",
    "ensemble with eagle",
    "table",
    "repeat",
)
QUICK_LENGTHS = (0, 5, 6)
"""Draft lengths of two buckets, and one below the largest of its bucket."""

STEP = jax.jit(bass.speculate_step)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "perfect": tiny.model_drafter(target),
        "often accepted": tiny.model_drafter(tiny.perturbed(target, 0.1)),
        "rarely accepted": tiny.model_drafter(tiny.model(2)),
        "reduced vocabulary": tiny.model_drafter(tiny.reduced_vocabulary((1, 3, 4, 5, 9))),
        "shared embedding": tiny.model_drafter(tiny.shared_embedding(target)),
        "other vocabulary": tiny.other_vocabulary(),
        "eagle": tiny.eagle_drafter(target),
        "eagle3": tiny.eagle3_drafter(target),
        "p-eagle": tiny.eagle3_drafter(target, mask=4),
        "mtp": tiny.mtp_drafter(target),
        "dflash": tiny.dflash_drafter(target),
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "suffix with finished text": tiny.shared_suffix(),
        "retrieval": tiny.retrieval_drafter(),
        "ensemble": tiny.ensemble_drafter(tiny.model_drafter(tiny.perturbed(target, 0.1))),
        "ensemble with eagle": tiny.ensemble_drafter(tiny.eagle_drafter(target)),
        "table": tiny.table_drafter(),
        "repeat": RepeatDrafter(),
    }


@pytest.fixture(scope="module")
def regular(target, drafters):
    """The tokens of regular decoding."""
    pair = bass.Pair(target, drafters["ngram"])
    return bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=LIMITS).tokens


def speculate(target, drafter, draft_len):
    spec = bass.SpecConfig(draft_len, "greedy")
    return bass.generate(bass.Pair(target, drafter), tiny.PROMPTS, spec, max_new_tokens=LIMITS)


def test_regular_decoding_takes_the_most_probable_token(target, regular):
    """Compares with one pass over each finished text, without the loop and its caches."""
    for prompt, output in zip(tiny.PROMPTS, regular, strict=True):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + len(output)] = [*prompt, *output]
        positions = jnp.arange(64, dtype=jnp.int32)[None]
        logits, *_ = jax.jit(bass.models.Model.forward)(target, tokens, positions, target.init_cache(1, 64))
        expected = np.argmax(logits[0], axis=-1)[len(prompt) - 1 : len(prompt) + len(output) - 1]
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("draft_len", mostly_slow(range(33), lambda draft_len: draft_len in QUICK_LENGTHS))
@pytest.mark.parametrize("quality", QUALITIES)
def test_every_draft_length(target, drafters, regular, quality, draft_len):
    run = speculate(target, drafters[quality], draft_len)
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular]
    assert max(info.num_drafted.max() for info in run.infos) == min(draft_len, max(LIMITS) - 1)


QUICK = {
    ("other vocabulary", 3),
    ("eagle", 3),
    ("eagle3", 3),
    ("p-eagle", 3),
    ("mtp", 3),
    ("dflash", 4),
    ("ngram", 1),
    ("ngram", 2),
    ("suffix", 4),
    ("retrieval", 12),
    ("ensemble", 4),
    ("table", 8),
    ("repeat", 16),
    ("repeat", 24),
    ("repeat", 31),
}
"""Every drafter but the variants; with the quick draft lengths of the test above, every bucket."""

VARIANTS = {"reduced vocabulary", "shared embedding", "suffix with finished text", "ensemble with eagle"}
"""Drafters of the same classes as others."""


@pytest.mark.parametrize(
    "drafter, draft_len",
    mostly_slow(
        [
            *sorted(QUICK),
            *((variant, 3) for variant in sorted(VARIANTS)),
            *(case for case in itertools.product(OTHER_DRAFTERS, (1, 5)) if case not in QUICK),
        ],
        lambda case: case in QUICK,
    ),
)
def test_every_drafter(target, drafters, regular, drafter, draft_len):
    run = speculate(target, drafters[drafter], draft_len)
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular]


def test_the_quick_cases_contain_every_drafter_and_bucket():
    lengths = {length for _, length in QUICK} | set(QUICK_LENGTHS)
    assert {bass.SpecConfig(length).bucket for length in lengths} == set(DRAFT_LEN_BUCKETS)
    assert {drafter for drafter, _ in QUICK} == set(OTHER_DRAFTERS) - VARIANTS


QUICK_RULES = {("block", "table"), ("multi_draft", "ngram"), ("shared_noise", "ngram"), ("token", "often accepted")}


@pytest.mark.parametrize(
    "rule, drafter, draft_len",
    mostly_slow(
        [
            (rule, *drafter)
            for rule in RULES
            if rule != "greedy"
            for drafter in (("often accepted", 0), ("often accepted", 4), ("ngram", 1), ("table", 4))
        ],
        lambda case: case[:2] in QUICK_RULES and case[2] > 0,
    ),
)
def test_every_lossless_rule_at_temperature_0(target, drafters, regular, rule, drafter, draft_len):
    """At temperature 0 both distributions are one-hot, without a quotient of softmaxes."""
    pair, spec = bass.Pair(target, drafters[drafter]), bass.SpecConfig(draft_len, rule)
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS)
    while not state.done.all():
        state, _ = STEP(pair, state, spec)
    for row, expected in enumerate(regular):
        np.testing.assert_array_equal(bass.output_tokens(state, row), expected)


def test_draft_lengths_can_change_between_steps_and_rows(target, drafters, regular):
    pair, spec = bass.Pair(target, drafters["often accepted"]), bass.SpecConfig(4)  # compiled for another test
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS)
    random = np.random.default_rng(0)
    while not state.done.all():
        wanted = jnp.asarray(random.integers(0, 5, state.lengths.shape), jnp.int32)
        state, info = STEP(pair, state._replace(draft_lens=wanted), spec)
        assert (info.num_drafted <= wanted).all()
    for row, expected in enumerate(regular):
        np.testing.assert_array_equal(bass.output_tokens(state, row), expected)


SAMPLED = bass.SamplingParams(temperature=(0.0, 0.7, 0.0))
GREEDY = bass.SpecConfig(2, "greedy")


def test_the_greedy_rule_is_refused_for_sampled_rows(target, drafters):
    """Otherwise sampled rows would be decoded greedily, although the rule is marked as lossless."""
    pair = bass.Pair(target, drafters["rarely accepted"])
    message = "temperature=.*: expected 0, because acceptance='greedy' is greedy"
    for step in ("speculate", "decode"):
        with pytest.raises(ValueError, match=message):
            bass.generate(pair, tiny.PROMPTS, GREEDY, sampling=SAMPLED, step=step)
    with pytest.raises(ValueError, match=message):
        next(bass.stream(pair, tiny.PROMPTS, GREEDY, sampling=SAMPLED))
    with pytest.raises(ValueError, match=message):
        bass.prefill(pair, tiny.PROMPTS, GREEDY, sampling=SAMPLED)
    with pytest.raises(ValueError, match=message):
        bass.verify_lossless(drafters["rarely accepted"], "greedy", target=tiny.model(1, vocab_size=5))
    engine = bass.Engine(pair, GREEDY, config=bass.EngineConfig(num_slots=1, capacity=64), warm_up=False)
    with pytest.raises(ValueError, match=message):
        engine.submit([1], max_new_tokens=8, sampling=bass.SamplingParams(temperature=0.7))


@pytest.mark.parametrize("step", [bass.speculate_step, bass.decode_step])
def test_a_greedy_step_ends_sampled_rows(target, drafters, step):
    """The step can get another rule than the one that the state was made for."""
    pair = bass.Pair(target, drafters["ngram"])
    state = bass.prefill(pair, tiny.PROMPTS, bass.SpecConfig(2), sampling=SAMPLED, max_new_tokens=8)
    after, info = jax.jit(step)(pair, state, GREEDY)
    reasons = [bass.FinishReason(int(finish)) for finish in after.finish[:3]]
    assert reasons == [bass.FinishReason.RUNNING, bass.FinishReason.NOT_GREEDY, bass.FinishReason.RUNNING]
    num_emitted = np.asarray(info.num_emitted)
    assert num_emitted[1] == 0
    assert (num_emitted[[0, 2]] > 0).all()
    np.testing.assert_array_equal(after.tokens[1], state.tokens[1])
