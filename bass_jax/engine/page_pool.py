"""Assigns the pages of paged caches to requests, on the host."""

from typing import NamedTuple

import numpy as np

from bass_jax.engine.request import RequestHandle


class PageUse(NamedTuple):
    """The use of the pages at one moment."""

    num_pages: int
    num_reserved: int  # pages of requests
    num_tokens: int  # tokens in them

    def fragmentation(self, page_size: int) -> float:
        """Returns the share of reserved cache slots without a token; 0 if nothing is reserved."""
        return 1 - self.num_tokens / (self.num_reserved * page_size) if self.num_reserved else 0.0


class PagePool:
    """Assigns pages to requests.

    A request receives all pages that it can need when it starts, and keeps them until it ends. The scheduler's token
    budget guarantees that there are enough.
    """

    def __init__(self, num_pages: int, page_size: int, pages_per_row: int):
        """Makes a pool of free pages.

        Args:
            num_pages: P.
            page_size: cache slots per page.
            pages_per_row: M, the width of a page table.
        """
        self.num_pages, self.page_size, self._pages_per_row = num_pages, page_size, pages_per_row
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: dict[RequestHandle, list[int]] = {}

    def table(self, handle: RequestHandle) -> np.ndarray:
        """Assigns pages to a request; returns its page table ``[1, M]`` int32, padded with P."""
        self.release(handle)
        num = -(-handle.request.limit // self.page_size)
        assert num <= len(self._free), "the scheduler admits only requests that fit"
        held = self._held[handle] = [self._free.pop() for _ in range(num)]
        return np.array([held + [self.num_pages] * (self._pages_per_row - num)], np.int32)

    def release(self, handle: RequestHandle) -> None:
        """Frees the pages of a request."""
        self._free += self._held.pop(handle, [])

    def use(self) -> PageUse:
        """Returns the current use of the pages."""
        held = sum(map(len, self._held.values()))
        tokens = sum(len(handle.request.prompt) + handle.num_tokens for handle in self._held)
        return PageUse(self.num_pages, held, tokens)
