"""Which pages are free, and which belong to whom; on the host."""

from typing import NamedTuple

import numpy as np

from bass_jax.engine.request import RequestHandle


class PageUse(NamedTuple):
    """How well the pages are used at one moment."""

    num_pages: int
    num_reserved: int  # pages that belong to requests
    num_tokens: int  # tokens in them

    def fragmentation(self, page_size: int) -> float:
        """Share of the reserved slots that holds no token (yet); 0 with nothing reserved."""
        return 1 - self.num_tokens / (self.num_reserved * page_size) if self.num_reserved else 0.0


class PagePool:
    """Hands out pages; any page is as good as any other, so free ones are never scattered.

    What a request may need it is given at once, and keeps until it ends: the scheduler's budget is in pages, so there
    always are enough.
    """

    def __init__(self, num_pages: int, page_size: int, pages_per_row: int):
        """Starts with all pages free.

        Args:
            num_pages: P.
            page_size: slots of a page.
            pages_per_row: M, the width of a table.
        """
        self.num_pages, self.page_size, self._pages_per_row = num_pages, page_size, pages_per_row
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: dict[RequestHandle, list[int]] = {}

    def table(self, handle: RequestHandle) -> np.ndarray:
        """Gives a request its pages: ``[1, M]`` int32, P where it has none."""
        self.release(handle)
        num = -(-handle.request.limit // self.page_size)
        assert num <= len(self._free), "the scheduler admits no more than there are pages"
        held = self._held[handle] = [self._free.pop() for _ in range(num)]
        return np.array([held + [self.num_pages] * (self._pages_per_row - num)], np.int32)

    def release(self, handle: RequestHandle) -> None:
        """Takes the pages of a request back, if it has any."""
        self._free += self._held.pop(handle, [])

    def use(self) -> PageUse:
        """How they are used now."""
        held = sum(map(len, self._held.values()))
        tokens = sum(len(handle.request.prompt) + handle.num_tokens for handle in self._held)
        return PageUse(self.num_pages, held, tokens)
