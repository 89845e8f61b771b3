"""Greedy speculation is greedy decoding, token for token, whatever drafts and however much.

What breaking it means: text that depends on the draft; the row after a rejection, a roll-back or a full acceptance
read something that was never committed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.acceptance import registered_rules
from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.drafters import NgramDrafter
from bass_jax.drafters.template import RepeatDrafter
from tests import tiny

LIMITS = (40, 37, 40)
RULES = sorted(name for name, rule in registered_rules().items() if rule.lossless)
BETWEEN = (5, 7, 13, 25, 31)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "perfect": tiny.model_drafter(target),
        "often right": tiny.model_drafter(tiny.perturbed(target, 0.1)),
        "bad": tiny.model_drafter(tiny.model(2)),
        "trimmed vocabulary": tiny.model_drafter(tiny.reduced_vocabulary((1, 3, 4, 5, 9))),
        "shared embedding": tiny.model_drafter(tiny.shared_embedding(target)),
        "hidden": tiny.eagle_drafter(target),
        "ngram": NgramDrafter(),
        "store": tiny.retrieval_drafter(),
        "combined": tiny.ensemble_drafter(tiny.model_drafter(tiny.perturbed(target, 0.1))),
        "combined with hidden": tiny.ensemble_drafter(tiny.eagle_drafter(target)),
        "table": tiny.table_drafter(),
        "repeat": RepeatDrafter(),
    }


@pytest.fixture(scope="module")
def regular(target, drafters):
    """What regular decoding says."""
    pair = bass.Pair(target, drafters["ngram"])
    return bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=LIMITS).tokens


def speculate(target, drafter, spec):
    return bass.generate(bass.Pair(target, drafter), tiny.PROMPTS, spec, max_new_tokens=LIMITS)


def test_regular_decoding_takes_the_most_probable_token(target, regular):
    """One pass over each finished text, without the loop and its caches, finds every token at the maximum."""
    for prompt, output in zip(tiny.PROMPTS, regular, strict=True):
        text = jnp.asarray([[*prompt, *output]], jnp.int32)
        positions = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        logits, _ = jax.jit(bass.Model.forward)(target, text, positions, target.init_cache(1, 64))
        expected = jnp.argmax(logits[0, len(prompt) - 1 : -1], axis=-1)
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("draft_len", sorted({*DRAFT_LEN_BUCKETS, *BETWEEN}))
@pytest.mark.parametrize("quality", ["perfect", "often right", "bad"])
def test_every_draft_length(target, drafters, regular, quality, draft_len):
    run = speculate(target, drafters[quality], bass.SpecConfig(draft_len, "greedy"))
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular]
    assert max(info.num_drafted.max() for info in run.infos) == min(draft_len, max(LIMITS) - 1)


@pytest.mark.parametrize("draft_len", [1, 5])
@pytest.mark.parametrize(
    "drafter",
    [
        "trimmed vocabulary", "shared embedding", "hidden", "ngram", "store", "combined", "combined with hidden",
        "table", "repeat",
    ],
)  # fmt: skip
def test_every_drafter(target, drafters, regular, drafter, draft_len):
    run = speculate(target, drafters[drafter], bass.SpecConfig(draft_len, "greedy"))
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular]


@pytest.mark.parametrize("drafter, draft_len", [("often right", 0), ("often right", 5), ("ngram", 1), ("table", 4)])
@pytest.mark.parametrize("rule", [name for name in RULES if name != "greedy"])
def test_every_lossless_rule_at_temperature_0(target, drafters, regular, drafter, rule, draft_len):
    """Temperature 0 is a one-hot distribution on both sides, not a ratio of softmaxes."""
    pair = bass.Pair(target, drafters[drafter])
    spec = bass.SpecConfig(draft_len, rule)
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS)
    step = jax.jit(bass.speculate_step)
    while not state.done.all():
        state, _ = step(pair, state, spec)
    for row, expected in enumerate(regular):
        np.testing.assert_array_equal(bass.output_tokens(state, row), expected)


def test_draft_lengths_may_change_between_steps_and_rows(target, drafters, regular):
    pair, spec = bass.Pair(target, drafters["often right"]), bass.SpecConfig(4, "greedy")
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS)
    step = jax.jit(bass.speculate_step)
    random = np.random.default_rng(0)
    while not state.done.all():
        wanted = jnp.asarray(random.integers(0, 5, state.lengths.shape), jnp.int32)
        state, info = step(pair, state._replace(draft_lens=wanted), spec)
        assert (info.num_drafted <= wanted).all()
    for row, expected in enumerate(regular):
        np.testing.assert_array_equal(bass.output_tokens(state, row), expected)


SAMPLED = bass.SamplingParams(temperature=(0.0, 0.7, 0.0))
GREEDY = bass.SpecConfig(2, "greedy")


def test_the_greedy_rule_is_refused_for_sampled_rows(target, drafters):
    """It decoded them greedily, and called that lossless."""
    pair = bass.Pair(target, drafters["bad"])
    message = "temperature=.*: expected 0, because acceptance='greedy' is greedy"
    for step in ("speculate", "decode"):
        with pytest.raises(ValueError, match=message):
            bass.generate(pair, tiny.PROMPTS, GREEDY, sampling=SAMPLED, step=step)
    with pytest.raises(ValueError, match=message):
        next(bass.stream(pair, tiny.PROMPTS, GREEDY, sampling=SAMPLED))
    with pytest.raises(ValueError, match=message):
        bass.prefill(pair, tiny.PROMPTS, GREEDY, sampling=SAMPLED)
    with pytest.raises(ValueError, match=message):
        bass.verify_lossless(drafters["bad"], "greedy", target=tiny.model(1, vocab_size=5))
    engine = bass.Engine(pair, GREEDY, config=bass.EngineConfig(num_slots=1, capacity=64), warm_up=False)
    with pytest.raises(ValueError, match=message):
        engine.submit([1], max_new_tokens=8, sampling=bass.SamplingParams(temperature=0.7))


@pytest.mark.parametrize("step", [bass.speculate_step, bass.decode_step])
def test_a_step_ends_sampled_rows_that_it_would_decode_greedily(target, drafters, step):
    """What a state was made for, and with which rule it is stepped, are two arguments."""
    pair = bass.Pair(target, drafters["bad"])
    state = bass.prefill(pair, tiny.PROMPTS, bass.SpecConfig(2), sampling=SAMPLED, max_new_tokens=8)
    after, info = jax.jit(step)(pair, state, GREEDY)
    reasons = [bass.FinishReason(int(finish)) for finish in after.finish[:3]]
    assert reasons == [bass.FinishReason.RUNNING, bass.FinishReason.NOT_GREEDY, bass.FinishReason.RUNNING]
    assert info.num_emitted[1] == 0
    assert (info.num_emitted[jnp.array([0, 2])] > 0).all()
    np.testing.assert_array_equal(after.tokens[1], state.tokens[1])
