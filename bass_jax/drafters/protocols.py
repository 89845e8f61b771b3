"""The protocols of drafters, and what a drafter receives and returns."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp

from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.runtime.checks import check_pytree
from bass_jax.runtime.debug import debug_check
from bass_jax.sampling.logits_processors import LogitsProcessors
from bass_jax.sampling.params import SamplingArrays
from bass_jax.typing import Array, check_array


class DraftContext(NamedTuple):
    """The inputs of one drafting round."""

    tokens: Array  # [B, C] int32, committed tokens; entries at or past a row's length are arbitrary
    lengths: Array  # [B] int32, number of committed tokens, at least 1
    num_wanted: Array  # [B] int32, drafts that a row can use, 0 to G; 0 for finished rows
    sampling_arrays: SamplingArrays  # per row; a drafter that samples applies them to its own distribution
    keys: Array  # [B, G] key, draft i is sampled with the Gumbel noise of keys[:, i]; consumed
    processors: LogitsProcessors  # a drafter that has logits applies them to its own
    min_confidence: Array | None = None  # [B] float32, a row stops before the first draft below it; None: never


class Proposal(NamedTuple):
    """The drafts of one step."""

    tokens: Array  # [B, G] int32
    num_drafted: Array  # [B] int32, at most num_wanted
    probs: Array | None  # [B, G, V] float32, the distribution each draft was sampled from; None: deterministic
    confidence: Array | None = None  # [B, G] float32, probability of the most probable token; None: unknown


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. A drafter is a frozen pytree, so that it can be an argument of a jitted function.

    A lossless rule keeps the target's distribution for every drafter that meets two conditions:

    * ``probs`` is the distribution that the drafts were sampled from. It is None if and only if the drafts do not
      depend on ``context.keys``.
    * ``num_drafted`` does not depend on a draft that it leaves out. A row may stop after a draft, or because the next
      distribution is too flat. It must not drop a draft because of the token that was sampled.

    Sample draft i with ``sample_tokens(probs, gumbel(context.keys[:, i], V))`` from `bass_jax.sampling` and its module
    ``keys``. The
    shared-noise rule uses the same Gumbel noise, so this gives it the highest acceptance.
    """

    def init(self, tokens: Array, lengths: Array) -> Any:
        """Reads the prompts.

        Args:
            tokens: ``[B, C]`` int32, padded on the right; C is the capacity of the token buffer.
            lengths: ``[B]`` int32.

        Returns:
            The drafter's state: None, or a pytree of arrays whose first axis is B.
        """
        ...

    def propose(self, state: Any, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, Any]:
        """Drafts up to `draft_len` tokens per row.

        Args:
            state: from `init` or the last `commit`.
            context: the committed tokens and the options of each row.
            draft_len: G, static, at least 1.
            is_sampled: static; whether drafts are sampled, which every rule but the greedy one wants. If False, propose
                the most probable tokens and return ``probs=None``.
        """
        ...

    def commit(self, state: Any, lengths: Array) -> Any:
        """Returns the state after the first ``lengths[b]`` tokens of each row were committed and the rest rejected."""
        ...


@runtime_checkable
class HiddenStateDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target.

    An `EnsembleDrafter` has these methods too; its `reads_hidden_states` is False if none of its parts reads them.
    One that also has the methods of `ChunkedDrafter` reads prompts in chunks, and `read` gets the hidden states of the
    chunk as a fourth argument, ``[B, T, E]``.
    """

    @property
    def reads_hidden_states(self) -> bool:
        """Whether `init` and `observe` have to be called with hidden states."""
        ...

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Which hidden states it reads, as in `Model.forward`, together E = ``len(hidden_layers) * D`` values.

        ``()`` is the final hidden state, as the head reads it, of E = D values.
        """
        ...

    def init(self, tokens: Array, lengths: Array, hidden: Array | None = None) -> Any:
        """Reads the prompts.

        Args:
            tokens: ``[B, C]`` int32, padded on the right.
            lengths: ``[B]`` int32.
            hidden: ``[B, C, E]``, the target's hidden states at all committed tokens except the last.
        """
        ...

    def observe(self, state: Any, hidden: Array, positions: Array) -> Any:
        """Stores the hidden states of a target pass. Called after every pass and before `commit`.

        Args:
            state: of the drafter.
            hidden: ``[B, T, E]``, the target's hidden states.
            positions: ``[B, T]`` int32, their positions; entries at or past the capacity C are padding.
        """
        ...


@runtime_checkable
class MultiDraftDrafter(Drafter, Protocol):
    """A drafter that can propose several candidate drafts per row (``SpecConfig.num_candidates`` above 1)."""

    def propose_many(
        self, state: Any, context: DraftContext, draft_len: int, num_candidates: int, *, is_sampled: bool
    ) -> tuple[Proposal, Any]:
        """Drafts M candidates per row; every field of the proposal has an axis of size M after B.

        The first tokens of a row's candidates differ. ``probs[:, m, 0]`` is the distribution that the first token of
        candidate m was sampled from, given the candidates before m.
        """
        ...


@runtime_checkable
class ChunkedDrafter(Drafter, Protocol):
    """A drafter whose prompts can be read in chunks. For other drafters `init` is called with whole prompts."""

    def start(self, num_rows: int, capacity: int) -> Any:
        """Returns the state of rows that have read nothing; C is the capacity of the token buffer."""
        ...

    def read(self, state: Any, tokens: Array, positions: Array) -> Any:
        """Reads the next tokens of each row's prompt.

        Args:
            state: from `start` or the last `read`.
            tokens: ``[B, T]`` int32.
            positions: ``[B, T]`` int32; entries at or past the capacity C are padding. With pages, the first ones can
                lie behind 0: the cache then contains the tokens before them, which were read for another request.
        """
        ...


@runtime_checkable
class TargetCacheDrafter(Drafter, Protocol):
    """A drafter that reads and extends the target's cache instead of keeping one of its own.

    The cache holds all committed tokens but the last of each row. The drafter may write at later positions only: the
    target's pass of the same step writes those again. Paged and INT8 caches and caches on a mesh are passed on as they
    are.
    """

    def borrow(self, state: Any, cache: Any, lengths: Array) -> Any:
        """Returns the state for `propose`, with what it needs of the target's cache.

        Args:
            state: from `init` or the last `commit`.
            cache: the target's.
            lengths: ``[B]`` int32, committed tokens.
        """
        ...

    def give_back(self, state: Any, cache: Any) -> tuple[Any, Any]:
        """Returns the state without the borrowed arrays, and the target's cache.

        Args:
            state: from `propose`.
            cache: the one that was given to `borrow`.
        """
        ...


@runtime_checkable
class FinishedTextDrafter(Drafter, Protocol):
    """A drafter that can search the text of finished requests.

    The text is a part of the drafter and not of its state, because it belongs to no row. The loops add a row's text
    when its request ends, and run the next step with the new drafter.
    """

    @property
    def finished_text(self) -> Any:
        """A pytree of arrays without an axis of rows; one without arrays if nothing is to be kept."""
        ...

    def remember(self, tokens: Array, length: Array) -> Any:
        """Returns `finished_text` with the text ``tokens[:length]``; `tokens` is ``[C]`` int32."""
        ...

    def with_finished_text(self, finished_text: Any) -> Drafter:
        """Returns the drafter with another `finished_text` of the same shapes."""
        ...


def check_drafter_object(name: str, drafter: Any) -> None:
    """Checks that a user's object is a drafter and a pytree.

    Raises:
        ValueError: naming `name`, the missing method, or how to register a pytree.
    """
    methods = ("init", "propose", "commit")
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        missing = [method for method in methods if not hasattr(drafter, method)]
        kind = f"the class {drafter.__name__}" if isinstance(drafter, type) else type(drafter).__name__
        found = f"{kind} without {' and '.join(missing)}" if missing else kind
        raise ValueError(f"{name} is {found}: expected an object with init, propose and commit")
    check_pytree(name, drafter)


def check_proposal(drafter: Drafter, proposal: Any, shape: Sequence[int], vocab_size: int) -> None:
    """Checks the types and shapes of what `drafter` returned.

    Args:
        drafter: named in the error message.
        proposal: the object that it returned.
        shape: ``[B, G]``, or ``[B, M, G]`` for several candidates.
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


def check_proposal_values(drafter: Drafter, proposal: Proposal, num_wanted: Array, vocab_size: int) -> None:
    """Checks the values of a proposal in the mode `bass_jax.debug_checks`; see there.

    Args:
        drafter: named in the error message.
        proposal: the fields have an axis of size M after B if there are several candidates.
        num_wanted: ``[B]`` int32, or ``[B, 1]`` for several candidates.
        vocab_size: V of the target.
    """
    name = f"{type(drafter).__name__}.propose"
    tokens, num_drafted, probs, _ = proposal
    is_draft = jnp.arange(tokens.shape[-1]) < num_drafted[..., None]

    def counts():
        worst = jnp.argmax(jnp.maximum(num_drafted - num_wanted, -num_drafted))
        wanted = jnp.broadcast_to(num_wanted, num_drafted.shape).reshape(-1)[worst]
        message = f"{name}: num_drafted has the value {{value}}: expected 0 to num_wanted, here {{wanted}}"
        is_valid = (num_drafted >= 0) & (num_drafted <= num_wanted)
        return is_valid, message, {"value": num_drafted.reshape(-1)[worst], "wanted": wanted}

    def ids():
        is_token = (tokens >= 0) & (tokens < vocab_size)
        wrong = tokens.reshape(-1)[jnp.argmax(is_draft & ~is_token)]
        message = f"{name}: tokens has the value {{token}}: expected 0 to {vocab_size - 1}"
        return ~is_draft | is_token, message, {"token": wrong}

    def totals(probs: Array):
        sums = probs.sum(axis=-1)
        error = jnp.where(is_draft, jnp.abs(sums - 1), 0.0)
        message = f"{name}: probs has the sum {{total}}: expected distributions that sum to 1"
        return error < 1e-3, message, {"total": sums.reshape(-1)[jnp.argmax(error)]}

    def chosen(probs: Array):
        of_token = jnp.take_along_axis(probs, jnp.clip(tokens, 0, vocab_size - 1)[..., None], axis=-1)[..., 0]
        return ~is_draft | (of_token > 0), f"{name}: expected drafts with a probability above 0 in probs", {}

    debug_check(counts)
    debug_check(ids)
    if probs is not None:
        debug_check(lambda: totals(probs))
        debug_check(lambda: chosen(probs))


def reads_hidden_states(drafter: Drafter) -> TypeGuard[HiddenStateDrafter]:
    """Returns whether `drafter` has to be given hidden states of the target."""
    return getattr(drafter, "reads_hidden_states", False)


def reads_chunks(drafter: Drafter) -> TypeGuard[ChunkedDrafter]:
    """Returns whether `drafter` reads prompts in chunks; of an `EnsembleDrafter` this depends on its parts."""
    return isinstance(drafter, ChunkedDrafter) and getattr(drafter, "reads_chunks", True)


def hidden_layers_of(drafter: Drafter) -> tuple[int, ...]:
    """Returns which hidden states of the target `drafter` reads; () also for one that reads none."""
    return getattr(drafter, "hidden_layers", ()) if reads_hidden_states(drafter) else ()


def borrows_cache(drafter: Drafter) -> TypeGuard[TargetCacheDrafter]:
    """Returns whether `drafter` has to be given the target's cache; of an `EnsembleDrafter` this depends on its parts.

    `propose` of such a drafter takes the state that `borrow` returns.
    """
    return isinstance(drafter, TargetCacheDrafter) and getattr(drafter, "borrows_cache", True)


def keeps_finished_text(drafter: Drafter) -> TypeGuard[FinishedTextDrafter]:
    """Returns whether the text of finished requests has to be given to `drafter`."""
    return isinstance(drafter, FinishedTextDrafter) and bool(jax.tree.leaves(drafter.finished_text))


def remember_rows(drafter: FinishedTextDrafter, tokens: Array, lengths: Array, is_finished: Array) -> Any:
    """Returns the `finished_text` of `drafter` with the texts of the rows that have just finished.

    Args:
        drafter: one that keeps finished text.
        tokens: ``[B, C]`` int32.
        lengths: ``[B]`` int32.
        is_finished: ``[B]`` bool, the rows to add.
    """
    rows = jnp.flatnonzero(is_finished, size=tokens.shape[0], fill_value=0)

    def add(index, text):
        own: Any = drafter.with_finished_text(text)
        return own.remember(tokens[rows[index]], lengths[rows[index]])

    return jax.lax.fori_loop(0, is_finished.sum(), add, drafter.finished_text)


def max_draft_len_of(drafter: Drafter) -> int:
    """Returns the largest number of drafts of a step: the `max_draft_len` of a drafter that has one."""
    return getattr(drafter, "max_draft_len", DRAFT_LEN_BUCKETS[-1])
