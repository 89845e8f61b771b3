"""Text of a row whose tokens come a few at a time, never splitting a character."""

import codecs
from collections.abc import Mapping, Sequence
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
    """Turns tokens into text as they arrive.

    A character of several bytes may be spread over several tokens, so the last bytes are held back until
    the character is whole. Everything pushed out, then flushed, is exactly `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Any, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._bytes = tokenizer.bytes_of_ids
        # Replacement of bad bytes follows the same rule here and in the tokenizer: one U+FFFD for each
        # maximal part of a character (Unicode 15, section 3.9).
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._text = ""

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        """Takes the next tokens and returns the text that they complete.

        Raises:
            ValueError: if an id is negative.
        """
        kept = [id for id in check_ids(ids) if id not in self._skipped]
        if self._bytes is not None:
            return self._utf8.decode(b"".join(self._bytes.get(id, b"") for id in kept))
        self._ids += kept
        return self._advance(is_last=False)

    def flush(self) -> str:
        """Ends the row: returns what was held back, an unfinished character as U+FFFD."""
        if self._bytes is not None:
            return self._utf8.decode(b"", final=True)
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        # Tokenizers that are not byte-level: decode the row anew and hold back a tail that may change.
        text = self._tokenizer.decode(self._ids, skip_special=False)
        if not is_last:
            text = text.rstrip("\ufffd")
        if not text.startswith(self._text):
            return ""
        new, self._text = text[len(self._text) :], text
        return new


def byte_table(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """Returns the bytes of every token of a byte-level vocabulary.

    A token whose characters do not all stand for bytes (an added one) stands for its own UTF-8.
    """
    bytes_of = _byte_alphabet()
    table = {}
    for token, id in vocabulary.items():
        try:
            table[id] = bytes(bytes_of[character] for character in token)
        except KeyError:
            table[id] = token.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's: printable bytes stand for themselves, the others for characters from U+0100 on.
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
