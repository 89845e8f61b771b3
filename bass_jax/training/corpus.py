"""The corpus on disk: a directory of shards, each written atomically and never changed."""

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.runtime.files import read_json, write_atomically
from bass_jax.training.rollout import Rollout

_DESCRIPTION = "corpus.json"
_ROLLOUT_ARRAYS = {"prompts": "prompt", "responses": "response", "ids": "distribution_ids"}


class Corpus:
    """A directory of shards ``shard_00000.npz`` and a description of how they were made.

    ``hidden_00000.npy`` holds the target's hidden states of a shard, if they are kept. It is memory-mapped.

    Attributes:
        directory: of the corpus.
    """

    def __init__(self, directory: Path, description: Mapping[str, Any] | None = None):
        """Opens a corpus, or makes one if `description` is given.

        Args:
            directory: of the corpus.
            description: what its content depends on, as JSON.

        Raises:
            ValueError: if there is no corpus to open, or it was begun with another description.
        """
        self.directory = directory
        path = directory / _DESCRIPTION
        if not path.exists():
            if description is None:
                raise ValueError(f"{directory}: no corpus here: expected {_DESCRIPTION}")
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(description, indent=1, sort_keys=True))
        found = self.description()
        for name, value in json.loads(json.dumps(description or {})).items():
            if found.get(name) != value:
                raise ValueError(
                    f"{directory}: {name} differs from the one that this corpus was begun with; use another output_dir"
                )

    def description(self) -> dict[str, Any]:
        """Returns what the content depends on."""
        return read_json(self.directory / _DESCRIPTION)

    def shards(self) -> list[int]:
        """Returns the numbers of the shards in ascending order; numbers may be missing."""
        return sorted(int(path.stem.removeprefix("shard_")) for path in self.directory.glob("shard_*.npz"))

    def write(self, number: int, rollouts: Sequence[Rollout], sources: Sequence[str]) -> int:
        """Writes one shard.

        Args:
            number: of the shard.
            rollouts: its rows.
            sources: name of the source of each row.

        Returns:
            The number of response tokens in it.
        """
        hidden = [rollout.hidden for rollout in rollouts if rollout.hidden is not None]
        if len(hidden) == len(rollouts):
            buffer = io.BytesIO()
            np.save(buffer, np.concatenate(hidden))
            # Written first, so that a shard never lacks its hidden states.
            write_atomically(self._hidden_path(number), buffer.getvalue())
        arrays = {
            name: _narrow(np.concatenate([getattr(rollout, field) for rollout in rollouts]))
            for name, field in _ROLLOUT_ARRAYS.items()
        }
        arrays |= {
            "logprobs": np.concatenate([rollout.distribution_logprobs for rollout in rollouts]).astype(np.float16),
            "prompt_lengths": np.array([len(rollout.prompt) for rollout in rollouts], np.int32),
            "response_lengths": np.array([len(rollout.response) for rollout in rollouts], np.int32),
            "temperatures": np.array([rollout.temperature for rollout in rollouts], np.float32),
            "sources": np.array(list(sources)),
        }
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        write_atomically(self._shard_path(number), buffer.getvalue())
        return len(arrays["responses"])

    def read(self) -> Iterator[tuple[Rollout, str]]:
        """Yields all rows with their sources.

        Raises:
            ValueError: naming a shard that cannot be read.
        """
        for number in self.shards():
            yield from self.read_shard(number)

    def read_shard(self, number: int) -> list[tuple[Rollout, str]]:
        """Returns one shard's rows with their sources.

        Raises:
            ValueError: naming the shard, if it cannot be read.
        """
        path = self._shard_path(number)
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                shard = {name: file[name] for name in file.files}
            lengths, response_lengths = shard["prompt_lengths"], shard["response_lengths"]
            rows = zip(
                _split(shard["prompts"].astype(np.int32), lengths),
                _split(shard["responses"].astype(np.int32), response_lengths),
                _split(shard["ids"].astype(np.int32), response_lengths),
                _split(shard["logprobs"].astype(np.float32), response_lengths),
                shard["temperatures"].tolist(),
                self._hidden(number, lengths + response_lengths - 1),
                strict=True,
            )
            return [(Rollout(*row), str(source)) for row, source in zip(rows, shard["sources"], strict=True)]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a readable shard: {error}") from None

    def _hidden(self, number: int, lengths: np.ndarray) -> list[np.ndarray | None]:
        """Returns views of the shard's hidden states, one per row."""
        path = self._hidden_path(number)
        if not path.exists():
            return [None] * len(lengths)
        hidden = np.load(path, mmap_mode="r")
        if len(hidden) != lengths.sum():
            raise ValueError(f"{path} has hidden states of {len(hidden)} tokens, its shard {lengths.sum()}")
        return list(_split(hidden, lengths))

    def _shard_path(self, number: int) -> Path:
        return self.directory / f"shard_{number:05d}.npz"

    def _hidden_path(self, number: int) -> Path:
        return self.directory / f"hidden_{number:05d}.npy"


def _split(rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(lengths)[:-1])


def _narrow(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.uint16 if ids.size == 0 or ids.max() < 1 << 16 else np.int32)
