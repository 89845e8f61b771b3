"""Finds prompts that share a run of words with an evaluation prompt."""

import re
from collections.abc import Iterable

_WORD = re.compile(r"[a-z0-9_]+")


class OverlapCheck:
    """The runs of `num_words` words of the held-out texts.

    A shorter held-out text is one run: a text overlaps if it contains the whole.
    """

    def __init__(self, texts: Iterable[str], num_words: int):
        """Collects the runs.

        Args:
            texts: held-out prompts, without a template.
            num_words: length of a run.
        """
        self._runs: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            words = _words(text)
            if length := min(num_words, len(words)):
                self._runs.setdefault(length, set()).update(_runs(words, length))

    def find(self, text: str) -> str | None:
        """Returns the first run of words that `text` shares with a held-out text, or None."""
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
