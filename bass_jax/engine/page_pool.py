"""Assigns the pages of paged caches to requests, on the host."""

import hashlib
from typing import NamedTuple

import numpy as np

from bass_jax.engine.request import Request, RequestHandle


class PageUse(NamedTuple):
    """The use of the pages at one moment."""

    num_pages: int
    num_reserved: int  # pages of requests; a shared page counts once
    num_tokens: int  # tokens in them
    num_kept: int  # pages of requests that have ended, kept for later requests with the same beginning

    def fragmentation(self, page_size: int) -> float:
        """Returns the share of reserved cache slots without a token; 0 if nothing is reserved."""
        return 1 - self.num_tokens / (self.num_reserved * page_size) if self.num_reserved else 0.0


class PagePool:
    """Assigns pages to requests, and shares those of equal prompt beginnings.

    A request receives all pages that it can need when it starts, and keeps them until it ends. The scheduler's token
    budget guarantees that there are enough.

    Full pages of a prompt are found by a hash of all tokens up to their end and of the request's prefix group. They are
    never written again, because a row writes behind its prompt, so requests can share them without a copy. When the
    last of their requests ends, they are kept until other requests need the room, those used least recently first.

    Source: prefix caching by hashes of pages is that of vLLM (automatic prefix caching).
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
        self._num_users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._kept: dict[int, None] = {}  # pages without a user, in the order in which they are given up

    def num_shared(self, handle: RequestHandle) -> int:
        """Returns how many tokens at the beginning of a prompt are in pages already. At least one token is left."""
        return len(self._shared(handle)) * self.page_size

    def table(self, handle: RequestHandle) -> np.ndarray:
        """Assigns pages to a request; returns its page table ``[1, M]`` int32, padded with P."""
        self.release(handle)
        held = self._held[handle] = self._shared(handle)
        for page in held:
            self._kept.pop(page, None)
            self._num_users[page] += 1
        num = -(-handle.request.limit // self.page_size)
        while len(held) < num:
            held.append(self._take())
        return np.array([held + [self.num_pages] * (self._pages_per_row - num)], np.int32)

    def publish(self, handle: RequestHandle) -> None:
        """Lets later requests share the full pages of a prompt that was read."""
        for key, page in zip(_hashes(handle.request, self.page_size), self._held[handle], strict=False):
            if key not in self._page_of:
                self._page_of[key], self._hash_of[page] = page, key

    def release(self, handle: RequestHandle) -> None:
        """Gives up the pages of a request."""
        # The last page is given up first, because it is useless without those before it.
        for page in reversed(self._held.pop(handle, [])):
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                if page in self._hash_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Shares no page of an earlier prompt from now on: the weights have changed."""
        self._page_of.clear()
        self._hash_of.clear()
        self._free += self._kept
        self._kept.clear()

    def use(self) -> PageUse:
        """Returns the current use of the pages."""
        num_shared = sum(num - 1 for num in self._num_users if num > 1) * self.page_size
        tokens = sum(len(handle.request.prompt) + handle.num_tokens for handle in self._held)
        num_reserved = sum(num > 0 for num in self._num_users)
        return PageUse(self.num_pages, num_reserved, tokens - num_shared, len(self._kept))

    def _shared(self, handle: RequestHandle) -> list[int]:
        pages: list[int] = []
        for key in _hashes(handle.request, self.page_size):
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def _take(self) -> int:
        assert self._free or self._kept, "the scheduler admits only requests that fit"
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._kept))
            del self._kept[page], self._page_of[self._hash_of.pop(page)]
        self._num_users[page] += 1
        return page


def _hashes(request: Request, page_size: int) -> list[bytes]:
    """Returns a hash per full page of the prompt that leaves at least one token to read.

    The last token of a prompt is not read, so the last but one is the first that may be left.
    """
    found, key = [], request.prefix_group.encode()
    for start in range(0, (len(request.prompt) - 2) // page_size * page_size, page_size):
        key = hashlib.sha256(key + b"\0" + request.prompt[start : start + page_size].tobytes()).digest()
        found.append(key)
    return found
