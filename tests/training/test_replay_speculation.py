"""Drafting along answers that are there already, against speculation with the target."""

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
    return roll_out(
        target, prompts, temperatures=[0.0] * 3, key=jax.random.key(0), max_new_tokens=LIMIT, stop_ids=(), top=4,
        keep_hidden_states=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["hidden", "combined", "combined with hidden"])
def test_it_counts_what_speculation_with_the_target_does(target, rollouts, kind):
    """Pass by pass: drafts, accepted drafts and tokens; hidden states of a rollout are kept in 16 bits."""
    network = tiny.model_drafter(tiny.perturbed(target, 0.1)) if kind == "combined" else tiny.hidden_drafter(target)
    drafter = network if kind == "hidden" else tiny.ensemble_drafter(network)
    found = speculate_on(drafter, rollouts, 4, batch=2)
    pair = bass.Pair(target, drafter)
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4, "greedy"), max_new_tokens=LIMIT)
    for row, rollout in zip(run.tokens, rollouts, strict=True):
        np.testing.assert_array_equal(row, rollout.response)
    assert found.num_tokens == 3 * LIMIT == run.summary.num_emitted
    assert found.num_passes == sum(int(info.is_active.sum()) for info in run.infos)
    assert (found.num_drafted, found.num_accepted) == (run.summary.num_drafted, run.summary.num_accepted)
    assert found.block_efficiency == pytest.approx(run.summary.block_efficiency)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Knowing(RepeatDrafter):
    """Drafts the answer, as long as it was handed the target's hidden states up to the last token but one, and no
    more.
    """

    answer: jax.Array  # [C]
    truth: jax.Array  # [C, D], NaN where there is none
    reads_hidden_states: bool = dataclasses.field(default=True, metadata={"static": True})

    def init(self, tokens, lengths, hidden_states):
        return hidden_states

    def observe(self, state, hidden_states, positions):
        return state.at[jnp.arange(len(positions))[:, None], positions].set(hidden_states, mode="drop")

    def propose(self, state, context, draft_len, *, is_sampled):
        is_true = jnp.isclose(state[0, : len(self.truth)], self.truth, rtol=2**-8, atol=1e-3).all(axis=-1)
        last, slots = context.lengths[0] - 1, jnp.arange(len(self.truth))
        is_handed = jnp.where(slots < last, is_true, True).all() & ~is_true[last]
        tokens = jax.lax.dynamic_slice_in_dim(self.answer, last + 1, draft_len)[None]
        return Proposal(tokens, jnp.where(is_handed, context.num_wanted, 0), None), state

    def commit(self, state, lengths):
        return state


def test_after_full_acceptance_every_feature_but_the_last_is_known(target, rollouts):
    """A pass hands over what it made of its last draft too, and nothing of an answer that is there comes early."""
    rollout = rollouts[0]
    sequence = np.concatenate([rollout.prompt, rollout.response])
    answer = jnp.asarray(np.pad(sequence, (0, 64 - len(sequence))), jnp.int32)
    truth = np.full((64, target.config.width), np.nan, np.float32)
    truth[: len(rollout.hidden_states)] = rollout.hidden_states
    drafter = Knowing(answer, jnp.asarray(truth))
    found = speculate_on(drafter, [rollout], 4, batch=1)
    assert (found.num_tokens, found.num_passes) == (LIMIT, -(-LIMIT // 5))
    assert found.num_drafted == found.num_accepted == LIMIT - found.num_passes
    run = bass.generate(
        bass.Pair(target, drafter), tiny.PROMPTS[:1], bass.SpecConfig(4, "greedy"), max_new_tokens=LIMIT
    )
    assert (run.summary.num_drafted, run.summary.num_accepted) == (found.num_drafted, found.num_accepted)


def test_rollouts_keep_the_targets_features(target, rollouts):
    for rollout in rollouts:
        sequence = np.concatenate([rollout.prompt, rollout.response[:-1]])
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(sequence)] = sequence
        positions = np.where(np.arange(64) < len(sequence), np.arange(64), 64)[None]
        _, _, fresh, _ = jax.jit(bass.Model.hidden_states)(target, *map(jax.numpy.asarray, (tokens, positions)),
                                                target.init_cache(1, 64))  # fmt: skip
        assert rollout.hidden_states.shape == (len(sequence), target.config.width)
        np.testing.assert_allclose(rollout.hidden_states, fresh[0, : len(sequence)], rtol=2**-9, atol=1e-3)


def test_what_cannot_be_measured_is_refused(target, rollouts):
    with pytest.raises(ValueError, match="at least one"):
        speculate_on(tiny.retrieval_drafter(), [], 4)
    with pytest.raises(ValueError, match="greedy"):
        speculate_on(tiny.retrieval_drafter(), [rollouts[0]._replace(temperature=1.0)], 4)
    with pytest.raises(ValueError, match="reads the target's hidden states"):
        speculate_on(tiny.hidden_drafter(target), [rollouts[0]._replace(hidden_states=None)], 4)
