"""The drafter's protocol: three pure functions over a state of its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from bass_jax.sampling.logits_processors import LogitsProcessors
from bass_jax.sampling.params import SamplingArrays
from bass_jax.typing import Array, check_array


class DraftContext(NamedTuple):
    """What a drafter may see of a step."""

    tokens: Array  # [B, C] int32, committed tokens; what lies past a row's length means nothing
    lengths: Array  # [B] int32, committed tokens of each row, at least 1
    num_wanted: Array  # [B] int32, drafts that a row can use, 0 to G; 0 for finished rows
    sampling_arrays: SamplingArrays  # per row; a drafter that samples draws from its own distribution so warped
    keys: Array  # [B, G] key, draft i is drawn with the Gumbel noise of keys[:, i]; consumed
    processors: (
        LogitsProcessors  # what is done to logits before the distribution; a drafter that has logits does it to its own
    )
    min_confidence: Array | None = None  # [B] float32, stop before the first draft that is less sure; None: never


class Proposal(NamedTuple):
    """Drafts of one step."""

    tokens: Array  # [B, G] int32
    num_drafted: Array  # [B] int32, at most num_wanted
    probs: Array | None  # [B, G, V] float32, the very distribution each draft was drawn from; None: deterministic
    confidence: Array | None = None  # [B, G] float32, of the most probable token at each draft; None: not known


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; a frozen pytree, so that it passes through `jax.jit` as an argument.

    Whatever it proposes, a lossless rule keeps the target's distribution, provided that ``probs`` is the distribution
    that the drafts were drawn from, or None if they do not depend on ``context.keys``; and that ``num_drafted`` depends
    on no draft that it leaves out (stopping after a draft is sound, and so is stopping at a distribution that is too
    flat; dropping a draft for what it turned out to be is not).

    To draw draft i is ``draw(distribution, gumbel(context.keys[:, i], V))`` from `bass_jax.sampling`: rules of shared
    noise then meet the drafter's choice with their own as often as can be.
    """

    def init(self, tokens: Array, lengths: Array) -> Any:
        """Reads the prompts.

        Args:
            tokens: ``[B, C]`` int32, right-padded; C is the capacity that the rows may grow to.
            lengths: ``[B]`` int32.

        Returns:
            The drafter's state: a pytree of arrays with B first in every one, or None.
        """
        ...

    def propose(self, state: Any, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, Any]:
        """Drafts up to `draft_len` (static, at least 1) tokens per row.

        Args:
            state: from `init` or the last `commit`.
            context: the rows as they stand.
            draft_len: G.
            is_sampled: static; the rule reads the draft's distribution. If False, propose the most probable tokens
                and return ``probs=None``.
        """
        ...

    # A drafter may also have `propose_many(state, context, draft_len, num_candidates, *, is_sampled)`, for
    # `SpecConfig.num_candidates` above 1: a proposal with M after B in every field. First tokens of a row's chains
    # differ; `probs` of a first draft is the distribution that it was drawn from given the chains before its own.

    # And `read(state, tokens, positions)`, for an engine that reads prompts in pieces between steps: takes the next
    # tokens of each row, ``[B, T]``, at ``positions``, those at or past the capacity being padding; the state is that
    # of `init` with lengths of 1. Without it an engine calls `init` once the whole prompt is at hand.

    def commit(self, state: Any, lengths: Array) -> Any:
        """Takes note that each row's first ``lengths[b]`` tokens are now committed; the rest is void."""
        ...

    # A drafter may read the target's final hidden states. It then has a true `reads_hidden_states`; its `init` takes
    # ``hidden states`` ``[B, C, D]`` behind the lengths, of all committed tokens but the last; and after every pass of
    # the target, drafts or none, `observe(state, hidden states, positions)` hands it those of the pass, ``[B, T, D]``
    # at positions ``[B, T]``, before `commit` says how many of them stand. A position of C or more means nothing. In a
    # combination such a drafter is asked behind drafts too, its own and others', whose hidden states nobody knows yet.


def check_proposal(drafter: Drafter, proposal: Any, shape: Sequence[int], vocab_size: int) -> None:
    """Checks the types and shapes of what `drafter` proposed.

    Args:
        drafter: for the message.
        proposal: what it returned.
        shape: ``[B, G]``, or ``[B, M, G]`` of several chains.
        vocab_size: V of the target.

    Raises:
        ValueError: naming drafter and field.
    """
    name = type(drafter).__name__
    if not isinstance(proposal, Proposal):
        raise ValueError(f"{name}.propose returned {type(proposal).__name__}: expected (Proposal, state)")
    check_array(proposal.tokens, f"{name}.propose: tokens", shape, jnp.integer)
    check_array(proposal.num_drafted, f"{name}.propose: num_drafted", shape[:-1], jnp.integer)
    if proposal.probs is not None:
        check_array(proposal.probs, f"{name}.propose: probs", (*shape, vocab_size), jnp.floating)
    if proposal.confidence is not None:
        check_array(proposal.confidence, f"{name}.propose: confidence", shape, jnp.floating)


def reads_hidden_states(drafter: Drafter) -> bool:
    """Whether the step hands `drafter` the target's final hidden states."""
    return getattr(drafter, "reads_hidden_states", False)
