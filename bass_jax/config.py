"""The configuration of speculation, and the buckets of draft length, batch size and capacity."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bass_jax.runtime.checks import check_choice, check_flag, check_integer, check_kind, shown

DRAFT_LEN_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Draft lengths for which a step is compiled."""

DEFAULT_DRAFT_LEN = 4
"""The draft length of a step if neither the configuration nor a policy chooses one."""

BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Batch sizes for which a step is compiled; larger sizes are multiples of the last.

With 24 and 48, the mean latency of a busy engine of 64 slots is up to 1.18x lower (draft length 1, simulated A100).
"""

MAX_CANDIDATES = 8
"""The largest number of candidate drafts per row."""

MAX_SAMPLES = 4096
"""The largest number of samples per prompt."""

MAX_LOGPROBS = 100
"""The largest number of alternatives that are reported per token."""

MIN_CAPACITY = 64
"""The smallest prompt or cache capacity in tokens; larger ones are powers of two."""


def draft_len_bucket(draft_len: int) -> int:
    """Returns the smallest bucket that holds `draft_len` drafts.

    Raises:
        ValueError: if `draft_len` is negative or above the largest bucket.
    """
    draft_len = check_integer("draft_len", draft_len, 0, DRAFT_LEN_BUCKETS[-1])
    return next(bucket for bucket in DRAFT_LEN_BUCKETS if bucket >= draft_len)


def batch_bucket(batch: int) -> int:
    """Returns the smallest batch bucket that holds `batch` rows.

    Raises:
        ValueError: if `batch` is not positive.
    """
    batch = check_integer("batch", batch, 1)
    largest = BATCH_BUCKETS[-1]
    if batch > largest:
        return -(-batch // largest) * largest
    return next(bucket for bucket in BATCH_BUCKETS if bucket >= batch)


def capacity_bucket(num_tokens: int) -> int:
    """Returns the smallest power of two, at least `MIN_CAPACITY`, that holds `num_tokens`."""
    return max(MIN_CAPACITY, 1 << max(0, num_tokens - 1).bit_length())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """The static configuration of a speculative step. Changing it compiles another step.

    Attributes:
        draft_len: draft tokens per step, 0 to 32. A length between two buckets runs in the larger one, whose
            remaining positions are not drafted. None lets `bass_jax.generate` and `bass_jax.Engine` choose the length
            while decoding (policy ``"auto"``); a step on its own then uses `DEFAULT_DRAFT_LEN`.
        acceptance: an `bass_jax.acceptance.AcceptanceRule` or its name: a registered one, or ``"module:name"`` of your
            own, with arguments or without.
        acceptance_kernel: ``"pallas"`` runs the greedy and the token rule as one fused kernel on a GPU and gives the
            same tokens; ``"xla"`` does not use the kernel.
        record_drafts: add a `bass_jax.decoding.state.DraftRecord` to the step's info. The distributions, which the
            fused kernel avoids, are then computed.
        num_candidates: M, candidate drafts per row, which the target scores in one pass. More than 1 needs a drafter
            that can propose them and a rule that can accept them (``"multi_draft"``, ``"greedy"``).
        logits_processors: functions ``(logits [V], tokens [C], position) -> logits [V]``, or their ``"module:name"``.
            They are applied in this order to target and draft; see
            `bass_jax.sampling.logits_processors.LogitsProcessor`.
        num_logprobs: 0 to 100. Also report the log-probability of every emitted token under the distribution that it
            was sampled from, and this many most probable tokens of this and of the raw distribution. None reports only
            the raw log-probability of the emitted tokens.
    """

    draft_len: int | None = None
    acceptance: Any = "token"  # a name or an `AcceptanceRule`, which is in a higher package
    acceptance_kernel: str = "pallas"
    record_drafts: bool = False
    num_candidates: int = 1
    logits_processors: Sequence[Callable | str] = ()
    num_logprobs: int | None = None

    def __post_init__(self):
        if self.draft_len is not None:
            draft_len_bucket(self.draft_len)
        if not isinstance(self.acceptance, str) and not hasattr(self.acceptance, "accept"):
            raise ValueError(f"acceptance={shown(self.acceptance)}: expected an AcceptanceRule or the name of a rule")
        check_flag("record_drafts", self.record_drafts)
        check_integer("num_candidates", self.num_candidates, 1, MAX_CANDIDATES)
        if self.num_logprobs is not None:
            check_integer("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        if self.record_drafts and self.num_candidates > 1:
            raise ValueError("record_drafts=True: expected num_candidates=1, because only single drafts are recorded")
        check_kind("logits_processors", self.logits_processors, tuple | list, "a sequence of processors")
        for processor in self.logits_processors:
            if not isinstance(processor, str | Callable):
                raise ValueError(f"logits_processors: {shown(processor)}: expected a function or 'module:name'")
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        check_choice("acceptance_kernel", self.acceptance_kernel, ("pallas", "xla"))

    @property
    def num_drafts(self) -> int:
        """`draft_len`, or `DEFAULT_DRAFT_LEN` if it is None."""
        return DEFAULT_DRAFT_LEN if self.draft_len is None else self.draft_len

    @property
    def bucket(self) -> int:
        """The smallest bucket that holds `num_drafts`."""
        return draft_len_bucket(self.num_drafts)
