"""The sizes and limits of an engine."""

import dataclasses
from typing import Literal

from bass_jax.config import BATCH_BUCKETS, batch_bucket, capacity_bucket
from bass_jax.runtime.checks import check_choice, check_integer, check_kind


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The sizes and limits of an engine.

    Attributes:
        num_slots: the largest number of requests that run or are being read at the same time.
        capacity: the largest number of tokens of a request, prompt and output; rounded up to a power of two.
        token_budget: the largest number of tokens that are reserved for requests in slots; None is `num_slots` times
            `capacity`. A request reserves `capacity` tokens; with pages, only the pages that it can fill. It waits
            until its reservation fits.
        max_waiting: the largest number of requests in the queue; further requests are refused.
        chunk: prompt tokens per prefill pass. At most 64 tokens at the end of a prompt take a shorter pass.
        chunks_per_step: the largest number of prefill passes between two steps while rows are running.
        batching: with ``"continuous"`` a waiting request takes the slot of a finished one. With ``"static"`` a batch
            runs until all of its requests have finished (Su et al. 2023).
        buckets: batch sizes that are compiled, ascending, the last at least `num_slots`; None is all.
        page_size: tokens per page of paged caches, which hold `token_budget` tokens in total. The attention kernels
            for GPUs need a multiple of 64. None uses dense caches with `capacity` tokens per row.
    """

    num_slots: int = 16
    capacity: int = 1024
    token_budget: int | None = None
    max_waiting: int = 1024
    chunk: int = 256
    chunks_per_step: int = 4
    batching: Literal["continuous", "static"] = "continuous"
    buckets: tuple[int, ...] | None = None
    page_size: int | None = None

    def __post_init__(self):
        for name in ("num_slots", "capacity", "token_budget", "max_waiting", "chunk", "chunks_per_step", "page_size"):
            if getattr(self, name) is not None or name not in ("token_budget", "page_size"):
                object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        check_choice("batching", self.batching, ("continuous", "static"))
        check_kind("buckets", self.buckets, tuple | list | None, "batch sizes or None")
        object.__setattr__(self, "capacity", capacity_bucket(self.capacity))
        object.__setattr__(self, "chunk", min(self.chunk, self.capacity))
        if self.page_size is not None and self.capacity % self.page_size:
            raise ValueError(f"page_size={self.page_size}: expected a divisor of capacity={self.capacity}")
        largest = batch_bucket(self.num_slots)
        buckets = (
            [*(size for size in BATCH_BUCKETS if size < largest), largest] if self.buckets is None else self.buckets
        )
        object.__setattr__(self, "buckets", tuple(check_integer("buckets", size, 1) for size in buckets))
        if any(batch_bucket(size) != size for size in self.sizes) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"buckets={self.buckets}: expected ascending ones of {BATCH_BUCKETS}, or multiples of 64")
        if not self.sizes or self.sizes[-1] < self.num_slots:
            raise ValueError(f"buckets={self.buckets}: expected the last to hold num_slots={self.num_slots}")
        if self.token_budget is None:
            object.__setattr__(self, "token_budget", self.num_slots * self.capacity)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that are compiled."""
        return self.buckets or ()

    @property
    def num_pages(self) -> int:
        """The number of pages of each cache; 0 for dense caches."""
        return 0 if self.page_size is None else self.budget // self.page_size

    @property
    def budget(self) -> int:
        """The token budget, rounded down to whole pages."""
        budget = self.token_budget or 0
        return budget if self.page_size is None else budget // self.page_size * self.page_size

    def reservation(self, num_tokens: int) -> int:
        """Returns how many tokens a request of at most `num_tokens` reserves."""
        if self.page_size is None:
            return self.capacity
        return -(-num_tokens // self.page_size) * self.page_size

    def check(self, num_prompt_tokens: int, max_new_tokens: int, context: int | None) -> None:
        """Checks that a request can run.

        Args:
            num_prompt_tokens: length of the prompt.
            max_new_tokens: limit of the output.
            context: of the target; None if it has no limit.

        Raises:
            ValueError: naming the limit that it exceeds.
        """
        check_integer("max_new_tokens", max_new_tokens, 1)
        total = num_prompt_tokens + max_new_tokens
        what = f"prompt of {num_prompt_tokens} tokens with max_new_tokens={max_new_tokens} may grow to {total}"
        if context is not None and total > context:
            raise ValueError(f"{what}: the target's context is {context}")
        if total > self.capacity:
            raise ValueError(f"{what}: expected at most capacity={self.capacity}")
        if self.reservation(total) > self.budget:
            raise ValueError(
                f"{what} and reserves {self.reservation(total)}: expected at most token_budget={self.budget}"
            )
