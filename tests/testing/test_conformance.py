"""The conformance tests pass for the parts of this package, and each of their checks finds a broken part."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bass_jax.acceptance import TOKEN, AcceptanceResult, AcceptanceRule
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.policies import Plan
from bass_jax.policies.template import OneMore
from bass_jax.sampling import sample_tokens
from bass_jax.sampling.keys import gumbel
from bass_jax.testing import check_drafter, check_policy, check_rule
from tests import tiny
from tests.tiny import VOCAB


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BrokenDrafter(RepeatDrafter):
    """Changes the proposal with a function of the proposal and the context."""

    change: Any = dataclasses.field(default=None, metadata={"static": True})

    def propose(self, state, context, draft_len, *, is_sampled):
        proposal, state = super().propose(state, context, draft_len, is_sampled=is_sampled)
        return self.change(proposal, context), state


def shifted(proposal, amount):
    return proposal._replace(tokens=(proposal.tokens + amount) % VOCAB)


def sampled_with_other_probs(proposal, context):
    """Samples from a uniform distribution, but returns another one."""
    shape = (*proposal.tokens.shape, VOCAB)
    rows = [sample_tokens(jnp.ones(shape[::2]), gumbel(context.keys[:, i], VOCAB)) for i in range(shape[1])]
    probs = jax.nn.softmax(jnp.broadcast_to(jnp.arange(VOCAB) / 4, shape))
    return proposal._replace(tokens=jnp.stack(rows, axis=1), probs=probs)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p, c: p._replace(num_drafted=c.num_wanted + 1), "expected num_drafted from 0 to num_wanted"),
        (lambda p, c: p._replace(tokens=p.tokens + VOCAB), "expected drafts from 0 to 10"),
        (lambda p, c: shifted(p, c.tokens[:, -1:]), "do not depend on tokens at or past a row's"),
        (lambda p, c: shifted(p, c.lengths[0]), "do not depend on the other rows"),
        (lambda p, c: shifted(p, c.keys[:, :1] == c.keys[0, 0]), "do not depend on the other"),
        (lambda p, c: p._replace(probs=jnp.full((*p.tokens.shape, VOCAB), 0.5)), "expected probs that sum to 1"),
        (lambda p, c: p._replace(probs=jnp.zeros((*p.tokens.shape, VOCAB)).at[..., 0].set(1.0)), "probability above 0"),
        (sampled_with_other_probs, "expected probs=None with is_sampled=False"),
    ],
)
def test_a_broken_drafter_is_found(change, message):
    check_drafter(RepeatDrafter(), VOCAB)
    with pytest.raises(AssertionError, match=f"^BrokenDrafter.propose: .*{message}"):
        check_drafter(BrokenDrafter(change), VOCAB)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledDrafter(RepeatDrafter):
    """Samples uniformly; `probs` is another distribution if it is given, and None for a missing one."""

    probs: Any = dataclasses.field(default=None, metadata={"static": True})

    def propose(self, state, context, draft_len, *, is_sampled):
        proposal, state = super().propose(state, context, draft_len, is_sampled=is_sampled)
        if is_sampled:
            proposal = sampled_with_other_probs(proposal, context)
            proposal = proposal._replace(probs=None if self.probs is None else self.probs(proposal.probs))
        return proposal, state


def test_drafts_that_do_not_follow_their_distribution_are_found():
    check_drafter(SampledDrafter(lambda probs: jnp.full_like(probs, 1 / VOCAB)), VOCAB)
    with pytest.raises(AssertionError, match="expected drafts that follow probs"):
        check_drafter(SampledDrafter(lambda probs: probs), VOCAB)
    with pytest.raises(AssertionError, match="expected drafts that do not depend on the keys"):
        check_drafter(SampledDrafter(), VOCAB)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaleDrafter:
    """A draft model whose rollback keeps rejected drafts in its cache."""

    inner: Any

    def init(self, tokens, lengths):
        return self.inner.init(tokens, lengths)

    def propose(self, state, context, draft_len, *, is_sampled):
        return self.inner.propose(state, context, draft_len, is_sampled=is_sampled)

    def commit(self, state, lengths):
        return state._replace(num_cached=jnp.where(state.num_cached > lengths - 1, lengths - 1, state.num_cached) + 1)


def test_a_rollback_that_keeps_rejected_drafts_is_found():
    drafter = tiny.model_drafter(tiny.model(1))
    with pytest.raises(AssertionError, match=r"StaleDrafter\.commit: expected the same drafts after a rejection"):
        check_drafter(StaleDrafter(drafter), VOCAB)


def changed(rule: AcceptanceRule, change) -> AcceptanceRule:
    return dataclasses.replace(rule, name="mine", accept=lambda *arguments: change(rule.accept(*arguments), *arguments))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r, *a: r._replace(num_accepted=r.num_accepted + 1), "expected 0 to num_drafted accepted drafts"),
        (lambda r, *a: r._replace(next_token=r.next_token + 5), "expected a next token inside the vocabulary"),
        (lambda r, drafts, *a: r._replace(next_token=drafts[:, -1]), "does not depend on drafts past num_drafted"),
        (lambda r, *a: r._replace(next_token=jnp.roll(r.next_token, 1)), "does not depend on the other rows"),
        (
            lambda r, drafts, num, *a: AcceptanceResult(num, jnp.argmax(a[1].probs[:, 0], axis=-1).astype(jnp.int32)),
            "expected first tokens that follow the target's distribution",
        ),
    ],
)
def test_a_broken_rule_is_found(change, message):
    with pytest.raises(AssertionError, match=f"^acceptance='mine': .*{message}"):
        check_rule(changed(TOKEN, change))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BrokenPolicy(OneMore):
    """Changes the state and the plan with a function."""

    change: Any = dataclasses.field(default=None, metadata={"static": True})

    def update(self, state, stats):
        return self.change(*super().update(state, stats), stats)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state, plan, stats: (None, plan), "update: expected a state with the structure"),
        (lambda state, plan, stats: (state, Plan(plan.draft_lens + 40)), "update: expected draft lengths from"),
        (
            lambda state, plan, stats: (state, Plan(plan.draft_lens * isinstance(stats.lengths, jax.core.Tracer))),
            "update: expected the same plan with and without jax.jit|update: expected draft lengths from",
        ),
    ],
)
def test_a_broken_policy_is_found(change, message):
    check_policy(OneMore())
    with pytest.raises(AssertionError, match=f"^BrokenPolicy.{message}"):
        check_policy(BrokenPolicy(change=change))
