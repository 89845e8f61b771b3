"""A tokenizer without files: token i is the i-th letter, or bytes that a test gives."""

import codecs
import dataclasses
import string

import numpy as np


@dataclasses.dataclass(frozen=True)
class Letters:
    """A tokenizer of single letters; `chunks` are the bytes of each token if they are not letters.

    It is hashable by content, as the tokenizer of a pair has to be.
    """

    size: int
    chunks: tuple[bytes, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def encode_batch(self, texts):
        return [np.array([string.ascii_lowercase.index(letter) for letter in text], np.int32) for text in texts]

    def bytes_of(self, token: int) -> bytes:
        return self.chunks[token] if self.chunks else string.ascii_lowercase[token].encode()

    def incremental_decoder(self):
        return _Decoder(self)


class _Decoder:
    def __init__(self, letters: Letters):
        self._letters = letters
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids) -> str:
        return self._utf8.decode(b"".join(self._letters.bytes_of(int(token)) for token in ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
