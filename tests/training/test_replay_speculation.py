"""Speculation along given answers against speculation with the target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import Proposal
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.training.replay_speculation import speculate_on
from bass_jax.training.rollout import roll_out
from tests import tiny

LIMIT = 24


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def rollouts(target):
    prompts = [np.array(prompt, np.int32) for prompt in tiny.PROMPTS]
    options = {"max_new_tokens": LIMIT, "stop_ids": (), "top": 4, "keep_hidden": True}
    return roll_out(target, prompts, temperatures=[0.0] * 3, key=jax.random.key(0), **options)


def generate(target, drafter, prompts):
    spec = bass.SpecConfig(4, "greedy")
    return bass.generate(bass.Pair(target, drafter), prompts, spec, max_new_tokens=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "ensemble", "ensemble_eagle"])
def test_counts_equal_speculation_with_the_target(target, rollouts, kind):
    """Passes, drafts, accepted drafts and tokens; the hidden states of a rollout are stored in 16 bits."""
    network = tiny.model_drafter(tiny.perturbed(target, 0.1)) if kind == "ensemble" else tiny.eagle_drafter(target)
    drafter = network if kind == "eagle" else tiny.ensemble_drafter(network)
    found = speculate_on(drafter, rollouts, 4, batch=2)
    output = generate(target, drafter, tiny.PROMPTS)
    for row, rollout in zip(output.tokens, rollouts, strict=True):
        np.testing.assert_array_equal(row, rollout.response)
    assert found.num_tokens == 3 * LIMIT == output.metrics.num_emitted
    assert found.num_passes == sum(int(info.is_active.sum()) for info in output.infos)
    assert (found.num_drafted, found.num_accepted) == (output.metrics.num_drafted, output.metrics.num_accepted)
    assert found.tokens_per_pass == pytest.approx(output.metrics.tokens_per_pass)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CheckingDrafter(RepeatDrafter):
    """Drafts the answer if it has the target's hidden states up to the last token but one, and no others."""

    answer: jax.Array  # [C]
    truth: jax.Array  # [C, D], NaN for positions without a hidden state
    reads_hidden_states: bool = dataclasses.field(default=True, metadata={"static": True})

    def init(self, tokens, lengths, hidden):
        return hidden

    def observe(self, state, hidden, positions):
        return state.at[jnp.arange(len(positions))[:, None], positions].set(hidden, mode="drop")

    def propose(self, state, context, draft_len, *, is_sampled):
        is_true = jnp.isclose(state[0, : len(self.truth)], self.truth, rtol=2**-8, atol=1e-3).all(axis=-1)
        last, slots = context.lengths[0] - 1, jnp.arange(len(self.truth))
        is_complete = jnp.where(slots < last, is_true, True).all() & ~is_true[last]
        tokens = jax.lax.dynamic_slice_in_dim(self.answer, last + 1, draft_len)[None]
        return Proposal(tokens, jnp.where(is_complete, context.num_wanted, 0), None), state

    def commit(self, state, lengths):
        return state


def test_all_hidden_states_but_the_last_are_known_after_full_acceptance(target, rollouts):
    """A pass gives the hidden state at its last draft too, and no state of the answer is given early."""
    rollout = rollouts[0]
    sequence = np.concatenate([rollout.prompt, rollout.response])
    answer = jnp.asarray(np.pad(sequence, (0, 64 - len(sequence))), jnp.int32)
    truth = np.full((64, target.config.width), np.nan, np.float32)
    truth[: len(rollout.hidden)] = rollout.hidden
    drafter = CheckingDrafter(answer, jnp.asarray(truth))
    found = speculate_on(drafter, [rollout], 4, batch=1)
    assert (found.num_tokens, found.num_passes) == (LIMIT, -(-LIMIT // 5))
    assert found.num_drafted == found.num_accepted == LIMIT - found.num_passes
    output = generate(target, drafter, tiny.PROMPTS[:1])
    assert (output.metrics.num_drafted, output.metrics.num_accepted) == (found.num_drafted, found.num_accepted)


@jax.jit
def fresh_hidden_states(model, tokens, positions):
    return model.hidden_states(tokens, positions, model.init_cache(*tokens.shape)).hidden


def test_rollouts_keep_the_targets_hidden_states(target, rollouts):
    for rollout in rollouts:
        num = len(rollout.inputs)
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, :num] = rollout.inputs
        positions = np.where(np.arange(64) < num, np.arange(64), 64)[None]
        fresh = fresh_hidden_states(target, tokens, positions)
        assert rollout.hidden.shape == (num, target.config.width)
        np.testing.assert_allclose(rollout.hidden, fresh[0, :num], rtol=2**-9, atol=1e-3)


def test_other_rollouts_are_refused(target, rollouts):
    with pytest.raises(ValueError, match="at least one"):
        speculate_on(tiny.retrieval_drafter(), [], 4)
    with pytest.raises(ValueError, match="greedy"):
        speculate_on(tiny.retrieval_drafter(), [rollouts[0]._replace(temperature=1.0)], 4)
    with pytest.raises(ValueError, match="reads the target's hidden states"):
        speculate_on(tiny.eagle_drafter(target), [rollouts[0]._replace(hidden=None)], 4)
