"""What a training reads of its corpora: rows in memory, split into trained and held out."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from bass_jax.checkpoint import Tokenizer
from bass_jax.training.corpus import Corpus
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.overlap import OverlapCheck
from bass_jax.training.prompts import held_out_texts
from bass_jax.training.rollout import Rollout
from bass_jax.training.write_corpus import open_corpus

_SPLITS = 10_000
_MAX_OVERLAP = 0.05
_SHARDS = 1_000_000
"""Of one corpus, at most: those of the next are numbered from here on."""


class CorpusRows:
    """The rows of corpora, shard by shard, read once.

    A row is held out by its prompt alone, so that all answers to one prompt fall on one side, and a corpus
    that grows keeps its split.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        held_out_share: float,
        max_response: int,
        find_overlap: Callable[[Rollout], str | None] = lambda row: None,
    ):
        """Prepares to read.

        Args:
            corpora: may still be written to by another process.
            held_out_share: of the prompts.
            max_response: longest response that is used, in tokens.
            find_overlap: see `without_overlap`.
        """
        self._corpora = tuple(corpora)
        self._threshold = held_out_share * _SPLITS
        self._max_response = max_response
        self._find_overlap = find_overlap
        self._shards: dict[int, list[Rollout]] = {}

    def shards(self) -> list[int]:
        """Returns the numbers of the shards that exist now, corpus by corpus."""
        return [place * _SHARDS + number for place, corpus in enumerate(self._corpora) for number in corpus.shards()]

    def rows(self, shards: Sequence[int]) -> list[Rollout]:
        """Returns the rows of `shards`."""
        for number in shards:
            if number not in self._shards:
                place, own_number = divmod(number, _SHARDS)
                rows = [rollout for rollout, _ in self._corpora[place].read_shard(own_number)]
                rows = without_overlap(rows, self._find_overlap)
                self._shards[number] = [row for row in rows if len(row.response) <= self._max_response]
        return [row for number in shards for row in self._shards[number]]

    def trained(self, shards: Sequence[int]) -> list[Rollout]:
        """Returns the rows to train on.

        Raises:
            ValueError: if there is none.
        """
        rows = [row for row in self.rows(shards) if not self._is_held_out(row)]
        if not rows:
            raise ValueError(f"{self._corpora[0].directory}: the corpus is empty")
        return rows

    def held_out(self, shards: Sequence[int]) -> list[Rollout]:
        """Returns the greedy rows that are kept apart."""
        return [row for row in self.rows(shards) if self._is_held_out(row) and row.temperature == 0]

    def _is_held_out(self, row: Rollout) -> bool:
        return zlib.crc32(row.prompt.tobytes()) % _SPLITS < self._threshold


def without_overlap(rows: Sequence[Rollout], find: Callable[[Rollout], str | None]) -> list[Rollout]:
    """Leaves out rows whose prompt is one to evaluate on.

    The recipe leaves them out before the target answers; this is for a corpus that others wrote.

    Args:
        rows: of one shard.
        find: returns the run of words that a row shares with a held-out prompt, or None.

    Raises:
        ValueError: quoting the run, if more than a few rows overlap: the recipe is wrong then.
    """
    runs = [find(row) for row in rows]
    found = [run for run in runs if run is not None]
    if len(found) > max(2, _MAX_OVERLAP * len(rows)):
        raise ValueError(
            f"the corpus overlaps the held-out prompts: {len(found)} of {len(rows)} rows, first on {found[0]!r}"
        )
    return [row for row, run in zip(rows, runs, strict=True) if run is None]


def corpus_rows(config: DistillConfig, tokenizer: Tokenizer) -> CorpusRows:
    """Opens the configuration's corpora for training, without what overlaps the held-out prompts.

    Raises:
        ValueError: if one of `DistillConfig.extra_corpora` is absent, or another target's.
    """
    check = OverlapCheck(held_out_texts(config.prompts), config.prompts.overlap_words)
    return CorpusRows(
        [open_corpus(config), *(_extra_corpus(config, Path(directory)) for directory in config.extra_corpora)],
        config.training.held_out_share,
        config.training.batch_tokens,
        lambda row: check.find(tokenizer.decode(row.prompt)),
    )


def _extra_corpus(config: DistillConfig, directory: Path) -> Corpus:
    corpus = Corpus(directory / "corpus")
    if (found := corpus.description().get("target")) != config.target:
        raise ValueError(f"extra_corpora: {directory} is of target {found!r}, expected {config.target!r}")
    return corpus
