"""The rows of a corpus that a training reads, split into trained and held-out ones."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from bass_jax.checkpoint import Tokenizer
from bass_jax.training.corpus import Corpus
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.prompts import PromptSource
from bass_jax.training.rollout import Rollout

_SPLITS = 10_000
_MAX_OVERLAP = 0.05
_SHARDS = 1_000_000
"""Offset between the shard numbers of two corpora."""


class CorpusRows:
    """The rows of several corpora, read shard by shard and kept in memory.

    A row is held out by its prompt alone. All answers to a prompt are therefore on one side, and the split does not
    change when a corpus grows.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        held_out_share: float,
        max_response: int,
        find_overlap: Callable[[Rollout], str | None] = lambda row: None,
    ):
        """Reads nothing yet.

        Args:
            corpora: other processes may still add shards.
            held_out_share: of the prompts.
            max_response: rows with more response tokens are left out.
            find_overlap: returns what the prompt of a row shares with a prompt to evaluate on, or None; see `rows`.
        """
        self._corpora = tuple(corpora)
        self._threshold = held_out_share * _SPLITS
        self._max_response = max_response
        self._find_overlap = find_overlap
        self._shards: dict[int, list[Rollout]] = {}

    def shards(self) -> list[int]:
        """Returns the numbers of the shards that exist now, corpus by corpus."""
        return [index * _SHARDS + number for index, corpus in enumerate(self._corpora) for number in corpus.shards()]

    def rows(self, shards: Sequence[int]) -> list[Rollout]:
        """Returns the rows of `shards` without those that overlap a prompt to evaluate on.

        Raises:
            ValueError: if more than a few rows of a shard overlap, because the corpus then was made from prompts to
                evaluate on.
        """
        for number in shards:
            if number not in self._shards:
                self._shards[number] = self._read(number)
        return [row for number in shards for row in self._shards[number]]

    def _read(self, number: int) -> list[Rollout]:
        index, own_number = divmod(number, _SHARDS)
        rows = [rollout for rollout, _ in self._corpora[index].read_shard(own_number)]
        overlaps = [self._find_overlap(row) for row in rows]
        found = [overlap for overlap in overlaps if overlap is not None]
        if len(found) > max(2, _MAX_OVERLAP * len(rows)):
            raise ValueError(
                f"the corpus overlaps the held-out prompts: {len(found)} of {len(rows)} rows, first on {found[0]!r}"
            )
        kept = [row for row, overlap in zip(rows, overlaps, strict=True) if overlap is None]
        return [row for row in kept if len(row.response) <= self._max_response]

    def trained(self, shards: Sequence[int]) -> list[Rollout]:
        """Returns the rows to train on.

        Raises:
            ValueError: if there are none; see also `rows`.
        """
        rows = [row for row in self.rows(shards) if not self._is_held_out(row)]
        if not rows:
            raise ValueError(f"{self._corpora[0].directory}: the corpus is empty")
        return rows

    def held_out(self, shards: Sequence[int]) -> list[Rollout]:
        """Returns the greedy rows that are not trained on."""
        return [row for row in self.rows(shards) if self._is_held_out(row) and row.temperature == 0]

    def _is_held_out(self, row: Rollout) -> bool:
        return zlib.crc32(row.prompt.tobytes()) % _SPLITS < self._threshold


def corpus_rows(config: DistillConfig, source: PromptSource, tokenizer: Tokenizer) -> CorpusRows:
    """Opens the corpora of a configuration for training.

    Raises:
        ValueError: if one of them is missing, or one of `DistillConfig.extra_corpora` is another target's.
    """
    return CorpusRows(
        [Corpus(config.corpus_root / "corpus"), *extra_corpora(config)],
        config.training.held_out_share,
        config.training.batch_tokens,
        lambda row: source.find_overlap(tokenizer.decode(row.prompt)),
    )


def extra_corpora(config: DistillConfig) -> list[Corpus]:
    """Opens `DistillConfig.extra_corpora`.

    Raises:
        ValueError: if one is missing, or another target's.
    """
    corpora = [Corpus(Path(directory) / "corpus") for directory in config.extra_corpora]
    for corpus in corpora:
        if (found := corpus.description().get("target")) != config.target:
            raise ValueError(
                f"extra_corpora: {corpus.directory.parent} is of target {found!r}, expected {config.target!r}"
            )
    return corpora
