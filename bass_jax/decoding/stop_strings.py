"""Incremental text of rows, cut at stop strings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bass_jax.runtime.checks import check_texts


class StopStrings:
    """Decodes the tokens of rows one by one, and finds stop strings, also inside the accepted drafts of a step.

    Attributes:
        is_hit: ``[rows]`` bool, whether the row has reached a stop string.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], num_rows: int):
        """Starts with empty texts.

        Args:
            tokenizer: a `bass_jax.checkpoint.Tokenizer`; None for rows without text.
            strings: a row ends with the token that completes one of these.
            num_rows: number of rows.

        Raises:
            ValueError: if there are strings without a tokenizer, or an empty string.
        """
        strings = check_texts("stop_strings", strings)
        if strings and tokenizer is None:
            raise ValueError("stop_strings: expected none, because the pair has no tokenizer")
        if "" in strings:
            raise ValueError("stop_strings: expected no empty string")
        self._strings = strings
        self._decoders = [] if tokenizer is None else [tokenizer.incremental_decoder() for _ in range(num_rows)]
        self._held = [""] * num_rows
        self._parts: list[list[str]] = [[] for _ in range(num_rows)]
        self.is_hit = np.zeros(num_rows, bool)

    @property
    def has_strings(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._strings)

    @property
    def texts(self) -> list[str]:
        """The texts of all rows so far, without their stop strings."""
        return [self.text(row) for row in range(len(self._parts))]

    def text(self, row: int) -> str:
        """Returns the text of one row so far, without its stop string."""
        return "".join(self._parts[row])

    def push(self, row: int, tokens: np.ndarray, is_finished: bool) -> tuple[int, str]:
        """Adds the next tokens of a row.

        Args:
            row: its index.
            tokens: ``[num]`` int32.
            is_finished: whether these are the row's last tokens.

        Returns:
            The number of tokens up to the end of a stop string, or all, and the new text. Text that could be the
            beginning of a stop string is withheld.
        """
        if not self._decoders:
            return len(tokens), ""
        decoder = self._decoders[row]
        if not self._strings:
            return len(tokens), self._emit(row, decoder.push(tokens) + (decoder.flush() if is_finished else ""))
        for i in range(len(tokens)):
            self._held[row] += decoder.push(tokens[i : i + 1])
            starts = [start for string in self._strings if (start := self._held[row].find(string)) >= 0]
            if starts:
                self.is_hit[row] = True
                return i + 1, self._emit(row, self._held[row][: min(starts)])
        if is_finished:
            text = self._held[row] + decoder.flush()
            return len(tokens), self._emit(row, text)
        certain = len(self._held[row]) - self._num_open(self._held[row])
        text, self._held[row] = self._held[row][:certain], self._held[row][certain:]
        return len(tokens), self._emit(row, text)

    def _emit(self, row: int, text: str) -> str:
        self._parts[row].append(text)
        return text

    def _num_open(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max(len(string) for string in self._strings) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                return size
        return 0
