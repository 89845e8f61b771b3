"""Keeps evaluation prompts out of a corpus, by shared runs of words."""

import re
from collections.abc import Iterable

_WORD = re.compile(r"[a-z0-9_]+")


class OverlapCheck:
    """Knows the runs of `num_words` words of the held-out texts.

    A held-out text with fewer words counts as one run: a text overlaps when it contains that whole.
    """

    def __init__(self, texts: Iterable[str], num_words: int):
        """Collects the runs.

        Args:
            texts: held-out prompts, before any template.
            num_words: length of a run.
        """
        self._num_words = num_words
        self._runs: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            words = _words(text)
            length = min(num_words, len(words))
            if length:
                self._runs.setdefault(length, set()).update(_runs(words, length))

    def find(self, text: str) -> str | None:
        """Returns the first shared run of words, or None."""
        words = _words(text)
        for length, runs in self._runs.items():
            for run in _runs(words, length):
                if run in runs:
                    return " ".join(run)
        return None


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: list[str], length: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[start : len(words) - length + 1 + start] for start in range(length)))
