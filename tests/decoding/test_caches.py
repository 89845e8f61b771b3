"""At any time both caches equal a fresh prefill of the committed tokens.

A hole in the draft model's cache reduces acceptance without changing the output. A hole in the target's cache makes
all later tokens wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from tests import tiny

SPEC = bass.SpecConfig(4)
STEP = jax.jit(bass.speculate_step)
DECODE = jax.jit(bass.decode_step)
FORWARD = jax.jit(bass.models.Model.forward)
HIDDEN_STATES = jax.jit(bass.models.Model.hidden_states)
SAMPLED = bass.SamplingParams(temperature=1.0)

TOLERANCE = 1e-4
"""Passes over one token and over several add the same products in a different order.

The error is about eps * sqrt(width) * |value|, with values up to 30.
"""


@pytest.fixture(scope="module")
def target():
    return tiny.model(1, num_layers=2)


@pytest.fixture(scope="module")
def often_accepted(target):
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))


def start(pair, sampling=SAMPLED):
    return bass.prefill(pair, tiny.PROMPTS, SPEC, sampling=sampling, max_new_tokens=50)


def committed_positions(state):
    positions = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    return jnp.where(positions < state.lengths[:, None], positions, len(positions))


def assert_is_prefix(model, cache, state, num_cached):
    """Asserts that the first `num_cached` slots hold what one pass over the committed tokens writes."""
    empty = model.init_cache(len(state.lengths), cache.capacity)
    fresh = FORWARD(model, state.tokens, committed_positions(state), empty).cache
    # Compares on the host, because every slice of another length would be compiled.
    for kept, expected in zip(*map(jax.tree.leaves, jax.device_get((cache, fresh))), strict=True):
        for row in np.flatnonzero(state.prompt_lengths < state.limits):
            num = int(num_cached[row])
            np.testing.assert_allclose(kept[row, :, :num], expected[row, :, :num], atol=TOLERANCE, rtol=TOLERANCE)


def assert_caches_are_correct(pair, state):
    assert_is_prefix(pair.target, state.target_cache, state, state.lengths - 1)
    drafter_state = state.drafter_state
    assert (drafter_state.num_cached <= state.lengths - 1).all()
    assert_is_prefix(pair.drafter.model, drafter_state.cache, state, drafter_state.num_cached)


def advance(pair, state, plan):
    """Takes one step per entry of the plan: a draft length, or "decode"."""
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
@pytest.mark.parametrize("quality", ["perfect", "often accepted"])
def test_caches_equal_a_fresh_prefill(target, often_accepted, plan, quality):
    pair = bass.Pair(target, tiny.model_drafter(target)) if quality == "perfect" else often_accepted
    state, _ = advance(pair, start(pair), PLANS[plan])
    assert_caches_are_correct(pair, state)


@pytest.mark.slow
def test_caches_are_correct_after_all_rows_have_finished(often_accepted):
    """Rows that finish early are not written any more."""
    state = bass.prefill(often_accepted, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=[3, 30, 12])
    state, _ = bass.decoding.generate_on_device(often_accepted, state, SPEC, max_steps=30)
    assert state.done.all()
    assert_caches_are_correct(often_accepted, state)


@pytest.mark.parametrize("plan", [name for name in PLANS if "after" in name or name in ("full length", "mixed")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_drafts_of_a_perfect_drafter_are_accepted(target, plan, temperature):
    """With one wrong slot in its cache, the draft model would propose another token within a few steps."""
    pair = bass.Pair(target, tiny.model_drafter(target))
    state = start(pair, sampling=bass.SamplingParams(temperature=temperature))
    _, infos = advance(pair, state, PLANS[plan])
    drafted = np.stack([info.num_drafted for info in infos])
    assert drafted.sum() > 0
    np.testing.assert_array_equal(np.stack([info.num_accepted for info in infos]), drafted)


def test_the_draft_model_is_at_most_two_tokens_behind(often_accepted):
    """After a speculative step, only the last draft and the bonus token can be missing in the draft model's cache."""
    state = start(often_accepted)
    for _ in range(6):
        state, info = STEP(often_accepted, state, SPEC)
        num_behind = state.lengths - state.drafter_state.num_cached
        np.testing.assert_array_equal(num_behind[info.is_active], 1 + (info.num_accepted == 4)[info.is_active])


def test_an_eagle_draft_keeps_the_targets_hidden_states_and_a_correct_cache(target):
    """Hidden states at drafted positions are predictions. The target's replace them after verification."""
    drafter = tiny.eagle_drafter(target)
    pair = bass.Pair(target, drafter)
    state, infos = advance(pair, start(pair), PLANS["mixed"])
    assert sum(int(info.num_accepted.sum()) for info in infos) > 0
    assert_is_prefix(target, state.target_cache, state, state.lengths - 1)
    assert_eagle_state_is_correct(target, drafter.model, state.drafter_state, state)


def assert_eagle_state_is_correct(target, model, drafter_state, state, num_behind=4):
    """Compares with one pass of the target, and one pass of the draft model over the target's hidden states."""
    positions = committed_positions(state)
    hidden_states = HIDDEN_STATES(target, state.tokens, positions, empty_cache(target, state)).hidden
    before = jnp.pad(hidden_states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    cache = HIDDEN_STATES(model, state.tokens, positions, empty_cache(model, state), before).cache
    kept, hidden_states, cache = jax.device_get((drafter_state, hidden_states, cache))
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
