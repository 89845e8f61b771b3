"""Decodes the tokens of a row incrementally."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_ids(ids: Sequence[int] | np.ndarray) -> list[int]:
    """Returns `ids` as Python integers.

    Raises:
        ValueError: if one is negative.
    """
    plain = np.asarray(ids, np.int64).reshape(-1).tolist()
    if plain and min(plain) < 0:
        raise ValueError(f"ids: token id {min(plain)} is negative")
    return plain


class IncrementalDecoder:
    """Decodes a stream of tokens without splitting characters.

    The bytes of one character may be in several tokens; they are held back until the character is complete. The texts
    of all `push` calls and of `flush`, joined, equal `Tokenizer.decode` of all ids. The exception is a tokenizer with
    byte fallback, if a run of byte tokens becomes invalid after a part of it was returned.
    """

    def __init__(self, backend: Any, skip_special: bool = True):
        """Starts without tokens.

        Args:
            backend: a ``tokenizers.Tokenizer``.
            skip_special: see `Tokenizer.decode`.
        """
        from tokenizers.decoders import DecodeStream

        self._backend, self._skip_special = backend, skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._num_returned = 0  # characters

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        """Adds tokens and returns the text that they complete.

        Raises:
            ValueError: if an id is negative.
        """
        text = "".join(map(self._step, check_ids(ids)))
        self._num_returned += len(text)
        return text

    def flush(self) -> str:
        """Returns the text that was held back, with U+FFFD for an incomplete character."""
        rest = self._backend.decode(self._ids, skip_special_tokens=self._skip_special)[self._num_returned :]
        self._num_returned += len(rest)
        return rest

    def _step(self, id: int) -> str:
        self._ids.append(id)
        try:
            return self._stream.step(self._backend, id) or ""
        except Exception:  # the library raises Exception itself for byte tokens that are not UTF-8
            return ""
