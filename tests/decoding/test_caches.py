"""At any point both caches equal a fresh prefill of the committed tokens, and good drafts are accepted.

What breaking it means: a hole in the draft's cache leaves the output right and lets acceptance collapse in silence;
one in the target's cache makes the output wrong from then on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from tests import tiny

SPEC = bass.SpecConfig(4)
STEP = jax.jit(bass.speculate_step, static_argnames="spec")
DECODE = jax.jit(bass.decode_step, static_argnames="spec")
WARM = bass.SamplingParams(temperature=1.0)

TOLERANCE = 1e-4
"""Passes of one token and of many add up the same products in another order: about eps * sqrt(width) * |value|,
with values up to 30 here."""


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def often_right(target):
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))


def start(pair, num_new=60, sampling=WARM):
    return bass.prefill(pair, tiny.PROMPTS, SPEC, sampling=sampling, max_new_tokens=num_new)


def assert_is_prefix(model, cache, state, num_cached):
    """The first `num_cached` slots hold what one fresh pass over the committed tokens writes."""
    positions = jnp.arange(cache.capacity, dtype=jnp.int32)
    positions = jnp.where(positions < state.lengths[:, None], positions, cache.capacity)
    empty = model.init_cache(len(state.lengths), cache.capacity)
    _, fresh = jax.jit(bass.Model.forward)(model, state.tokens, positions, empty)
    # On the host: a slice of another length would be compiled on a device.
    for kept, expected in zip(*map(jax.tree.leaves, jax.device_get((cache, fresh))), strict=True):
        for row in np.flatnonzero(state.prompt_lengths < state.limits):
            num = int(num_cached[row])
            np.testing.assert_allclose(kept[row, :, :num], expected[row, :, :num], atol=TOLERANCE, rtol=TOLERANCE)


def assert_caches_are_true(pair, state):
    assert_is_prefix(pair.target, state.target_cache, state, state.lengths - 1)
    drafted = state.drafter
    assert (drafted.num_cached <= state.lengths - 1).all()
    assert_is_prefix(pair.drafter.model, drafted.cache, state, drafted.num_cached)


def advance(pair, state, plan):
    """Takes one step per entry: a draft length (bucket 4), or "decode"."""
    infos = []
    for entry in plan:
        if entry == "decode":
            state, info = DECODE(pair, state, SPEC)
        else:
            state, info = STEP(pair, state._replace(draft_lens=jnp.full_like(state.lengths, entry)), SPEC)
        infos.append(info)
    return state, infos


PLANS = {
    "prefill": [],
    "full length": [4] * 5,
    "no drafts": [0] * 12,
    "after no drafts": [4, *[0] * 12, 4],
    "regular": ["decode"] * 4,
    "after regular": [4, *["decode"] * 12, 4],
    "mixed": [3, "decode", 0, 4, 1, "decode", 2, 0, 0, 4],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("quality", ["perfect", "often right"])
def test_caches_equal_a_fresh_prefill(target, often_right, plan, quality):
    pair = bass.Pair(target, tiny.model_drafter(target)) if quality == "perfect" else often_right
    state, _ = advance(pair, start(pair), PLANS[plan])
    assert_caches_are_true(pair, state)


def test_caches_are_true_at_the_end(often_right):
    """Rows that finished early are not written any more."""
    state = bass.prefill(often_right, tiny.PROMPTS, SPEC, sampling=WARM, max_new_tokens=[3, 30, 12])
    state, _ = bass.generate_on_device(often_right, state, SPEC, max_steps=30)
    assert state.done.all()
    assert_caches_are_true(often_right, state)


@pytest.mark.parametrize("plan", [name for name in PLANS if "after" in name or name in ("full length", "mixed")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_draft_of_a_perfect_drafter_is_accepted(target, plan, temperature):
    """The acceptance floor: a draft cache with one wrong slot proposes something else within a few steps."""
    pair = bass.Pair(target, tiny.model_drafter(target))
    state = start(pair, sampling=bass.SamplingParams(temperature=temperature))
    _, infos = advance(pair, state, PLANS[plan])
    drafted = np.stack([info.num_drafted for info in infos])
    assert drafted.sum() > 0
    np.testing.assert_array_equal(np.stack([info.num_accepted for info in infos]), drafted)


def test_a_row_reads_at_most_two_tokens_to_begin_drafting(often_right):
    """After a speculative step at most the last draft and the bonus token are missing from the draft's cache."""
    state = start(often_right)
    for _ in range(6):
        state, info = STEP(often_right, state, SPEC)
        behind = state.lengths - state.drafter.num_cached
        np.testing.assert_array_equal(behind[info.is_active], 1 + (info.num_accepted == 4)[info.is_active])


def test_a_hidden_state_draft_keeps_true_features_and_a_true_cache(target):
    """What it read behind its own drafts was predicted: it has to be read again with what the target made of them."""
    drafter = tiny.eagle_drafter(target)
    pair = bass.Pair(target, drafter)
    state, infos = advance(pair, start(pair), PLANS["mixed"])
    assert sum(int(info.num_accepted.sum()) for info in infos) > 0
    assert_is_prefix(target, state.target_cache, state, state.lengths - 1)
    assert_knows_the_truth(target, drafter.model, state.drafter, state)


def assert_knows_the_truth(target, model, kept, state, num_behind=4):
    """Features are those of one fresh pass of the target, and the cache is that of one pass of the draft over them."""
    positions = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    positions = jnp.where(positions < state.lengths[:, None], positions, len(positions))
    hidden_states, _ = jax.jit(bass.Model.hidden_states)(target, state.tokens, positions, empty_cache(target, state))
    before = jnp.pad(hidden_states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    _, cache = jax.jit(bass.Model.hidden_states)(model, state.tokens, positions, empty_cache(model, state), before)
    kept, hidden_states, cache = jax.device_get((kept, hidden_states, cache))
    for row in range(3):
        num, num_cached = int(state.lengths[row]) - 1, int(kept.num_cached[row])
        assert kept.num_known[row] == num
        assert num - num_behind <= num_cached <= num
        np.testing.assert_allclose(kept.hidden[row, :num], hidden_states[row, :num], atol=TOLERANCE, rtol=TOLERANCE)
        for found, expected in zip(jax.tree.leaves(kept.cache), jax.tree.leaves(cache), strict=True):
            found, expected = found[row, :, :num_cached], expected[row, :, :num_cached]
            np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def empty_cache(model, state):
    return model.init_cache(*state.tokens.shape)
