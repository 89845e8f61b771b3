"""Faults that other decoders had: negative controls for the test of the decoder's distribution."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.acceptance import TOKEN, AcceptanceRule
from bass_jax.sampling import sample_tokens
from bass_jax.sampling.keys import Role, draw_keys, gumbel
from bass_jax.sampling.logits_processors import _penalize
from tests.tiny import TableDrafter

PENALIZE = _penalize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrongProbsDrafter(TableDrafter):
    """Samples from its table, but returns the distributions of a higher temperature."""

    def propose(self, state, context, draft_len, *, is_sampled):
        proposal, state = super().propose(state, context, draft_len, is_sampled=is_sampled)
        probs = jnp.sqrt(proposal.probs)
        return proposal._replace(probs=probs / probs.sum(-1, keepdims=True)), state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithReplacementDrafter(TableDrafter):
    """Samples first tokens without replacement, but returns the first candidate's distribution for all of them."""

    def propose_many(self, state, context, draft_len, num_candidates, *, is_sampled):
        proposal, state = super().propose_many(state, context, draft_len, num_candidates, is_sampled=is_sampled)
        first = jnp.broadcast_to(proposal.probs[:, :1, 0], proposal.probs[:, :, 0].shape)
        return proposal._replace(probs=proposal.probs.at[:, :, 0].set(first)), state


def frozen_penalties(logits, penalties, tokens, prompt_lengths, lengths):
    """Applies the penalties of the step's first position to every position."""
    positions = [
        PENALIZE(logits[:, t : t + 1], penalties, tokens, prompt_lengths, lengths) for t in range(logits.shape[1])
    ]
    return jnp.concatenate(positions, axis=1)


def shared_stream(role: Role):
    """Returns a function of draft keys that are the keys of `role`."""

    def draft_keys(state, rule, num_drafts):
        return jnp.tile(draw_keys(state.keys, state.num_steps, role)[:, None], (1, num_drafts))

    return draft_keys


def _residual_from_uniform(draft_tokens, num_drafted, draft_probs, target, keys):
    result = TOKEN.accept(draft_tokens, num_drafted, draft_probs, target, keys)
    uniform = sample_tokens(jnp.ones_like(target.probs[:, 0]), gumbel(keys.residual, target.probs.shape[-1]))
    is_rejected = result.num_accepted < num_drafted
    return result._replace(next_token=jnp.where(is_rejected, uniform, result.next_token))


def _first_token_unchecked(draft_tokens, num_drafted, draft_probs, target, keys):
    is_drafted = (num_drafted > 0)[:, None]
    first = jax.nn.one_hot(draft_tokens[:, 0], target.probs.shape[-1])
    probs = target.probs.at[:, 0].set(jnp.where(is_drafted, first, target.probs[:, 0]))
    return TOKEN.accept(draft_tokens, num_drafted, draft_probs, target._replace(probs=probs), keys)


def _off_by_one(draft_tokens, num_drafted, draft_probs, target, keys):
    result = TOKEN.accept(draft_tokens, num_drafted, draft_probs, target, keys)
    probs = target.probs[jnp.arange(len(num_drafted)), jnp.maximum(num_drafted - 1, 0)]
    stale = sample_tokens(probs, gumbel(keys.residual, probs.shape[-1]))
    is_full = (result.num_accepted == num_drafted) & (num_drafted > 0)
    return result._replace(next_token=jnp.where(is_full, stale, result.next_token))


def _faulty(name: str, accept) -> AcceptanceRule:
    return dataclasses.replace(TOKEN, name=name, accept=accept)


RESIDUAL_FROM_UNIFORM = _faulty("residual_from_uniform", _residual_from_uniform)
FIRST_TOKEN_UNCHECKED = _faulty("first_token_unchecked", _first_token_unchecked)
OFF_BY_ONE = _faulty("off_by_one", _off_by_one)
"""Samples the bonus token from the distribution of the last draft's position."""
