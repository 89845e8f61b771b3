"""The shape of an engine: slots, their capacity, and what they may hold together."""

import dataclasses
from typing import Literal

from bass_jax.config import BATCH_BUCKETS, batch_bucket, capacity_bucket
from bass_jax.runtime.checks import check_choice, check_integer, check_kind


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How many requests run at once, and how large they may grow.

    Attributes:
        num_slots: most requests that run or are being read at once.
        capacity: most tokens of a request, prompt and answer; rounded up to a power of two.
        token_budget: most tokens that are reserved for the requests in slots; None means every slot's capacity. A
            request reserves a whole slot, or with pages those that its prompt and its limit can fill; it waits until
            there is room, and no later one overtakes it.
        max_waiting: most requests that wait for a slot; one more is refused.
        chunk: prompt tokens that one pass reads.
        chunks_per_step: such passes between two steps while rows are running.
        batching: ``"continuous"``: a row's slot takes the next request when it finishes; ``"static"``: what waits, up
            to the slots, is run to completion before anything else begins (Su et al. 2023).
        buckets: batch sizes that have executables, ascending, the last at least `num_slots`; None means all.
        page_size: tokens per page of caches in pages, which hold `token_budget` tokens in all; on a GPU a multiple of
            64 is read by the attention kernels. None means dense caches, with `capacity` tokens per row.
    """

    num_slots: int = 16
    capacity: int = 1024
    token_budget: int | None = None
    max_waiting: int = 1024
    chunk: int = 256
    chunks_per_step: int = 1
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
        object.__setattr__(self, "buckets", tuple(buckets))
        if any(batch_bucket(size) != size for size in self.sizes) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"buckets={self.buckets}: expected ascending ones of {BATCH_BUCKETS}, or multiples of 64")
        if not self.sizes or self.sizes[-1] < self.num_slots:
            raise ValueError(f"buckets={self.buckets}: expected the last to hold num_slots={self.num_slots}")
        if self.token_budget is None:
            object.__setattr__(self, "token_budget", self.num_slots * self.capacity)

    @property
    def sizes(self) -> tuple[int, ...]:
        """`buckets`, once they are settled."""
        return self.buckets or ()

    @property
    def num_pages(self) -> int:
        """Pages of each cache; 0 for dense ones."""
        return 0 if self.page_size is None else self.budget // self.page_size

    @property
    def budget(self) -> int:
        """`token_budget`, once it is settled; whole pages."""
        budget = self.token_budget or 0
        return budget if self.page_size is None else budget // self.page_size * self.page_size

    def reservation(self, num_tokens: int) -> int:
        """Tokens of memory that a request of at most `num_tokens` holds while it is in a slot."""
        if self.page_size is None:
            return self.capacity
        return -(-num_tokens // self.page_size) * self.page_size

    def check(self, num_prompt_tokens: int, max_new_tokens: int, context: int) -> None:
        """Refuses a request that could never run.

        Args:
            num_prompt_tokens: of the request.
            max_new_tokens: its limit.
            context: of the target.

        Raises:
            ValueError: saying which limit it exceeds.
        """
        check_integer("max_new_tokens", max_new_tokens, 1)
        total = num_prompt_tokens + max_new_tokens
        what = f"prompt of {num_prompt_tokens} tokens with max_new_tokens={max_new_tokens} may grow to {total}"
        if total > context:
            raise ValueError(f"{what}: the target's context is {context}")
        if total > self.capacity:
            raise ValueError(f"{what}: expected at most capacity={self.capacity}")
        if self.reservation(total) > self.budget:
            raise ValueError(
                f"{what} and reserves {self.reservation(total)}: expected at most token_budget={self.budget}"
            )
