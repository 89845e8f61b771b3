"""The corpus on disk: shards that are only ever added, each written whole or not at all."""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.training.rollout import Rollout

_META = "corpus.json"


class Corpus:
    """A directory of shards ``shard_00000.npz`` and a description of how they were made.

    Where the target's hidden states were kept, ``features_00000.npy`` lies beside a shard, and is read memory-mapped.

    Attributes:
        directory: of the corpus.
    """

    def __init__(self, directory: Path, description: dict[str, Any] | None = None):
        """Opens a corpus, making it if `description` is given and there is none.

        Args:
            directory: of the corpus.
            description: what its content depends on; a corpus made otherwise is refused.

        Raises:
            ValueError: if there is none to open, or it was made from another description.
        """
        self.directory = directory
        path = directory / _META
        if not path.exists():
            if description is None:
                raise ValueError(f"{directory}: no corpus here: expected {_META}")
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(description, indent=1, sort_keys=True).encode())
        elif description is not None:
            found = self.description()
            for name, value in json.loads(json.dumps(description)).items():
                if found.get(name) != value:
                    raise ValueError(
                        f"{directory}: {name} differs from the one that this corpus was begun with; "
                        "use another output_dir"
                    )

    def description(self) -> dict[str, Any]:
        """Returns what the content depends on."""
        return json.loads((self.directory / _META).read_text())

    def shards(self) -> list[int]:
        """Returns the numbers of the shards written, in order; there may be gaps."""
        return sorted(int(path.stem.removeprefix("shard_")) for path in self.directory.glob("shard_*.npz"))

    def write(self, number: int, rollouts: Sequence[Rollout], sources: Sequence[str]) -> int:
        """Writes one shard.

        Args:
            number: of the shard.
            rollouts: its rows.
            sources: name of each row's source.

        Returns:
            The number of response tokens in it.
        """
        kept = [rollout.hidden_states for rollout in rollouts if rollout.hidden_states is not None]
        if len(kept) == len(rollouts):
            buffer = io.BytesIO()
            np.save(buffer, np.concatenate(kept))
            # First, so that a shard never lacks what was kept for it.
            write_whole(self.directory / _features_name(number), buffer.getvalue())
        buffer = io.BytesIO()
        ids = np.concatenate([rollout.distribution_ids for rollout in rollouts])
        responses = np.concatenate([rollout.response for rollout in rollouts])
        np.savez(
            buffer,
            prompts=_narrow(np.concatenate([rollout.prompt for rollout in rollouts])),
            prompt_lengths=np.array([len(rollout.prompt) for rollout in rollouts], np.int32),
            responses=_narrow(responses),
            response_lengths=np.array([len(rollout.response) for rollout in rollouts], np.int32),
            distribution_ids=_narrow(ids),
            distribution_logprobs=np.concatenate([rollout.distribution_logprobs for rollout in rollouts]).astype(
                np.float16
            ),
            temperatures=np.array([rollout.temperature for rollout in rollouts], np.float32),
            sources=np.array(list(sources)),
        )
        write_whole(self.directory / _shard_name(number), buffer.getvalue())
        return len(responses)

    def read(self, shards: Sequence[int] | None = None) -> Iterator[tuple[Rollout, str]]:
        """Yields the rows of `shards`, all by default, with their sources.

        Raises:
            ValueError: naming a shard that cannot be read.
        """
        for number in self.shards() if shards is None else shards:
            yield from self.read_shard(number)

    def read_shard(self, number: int) -> list[tuple[Rollout, str]]:
        """Returns one shard's rows with their sources.

        Raises:
            ValueError: if it cannot be read.
        """
        path = self.directory / _shard_name(number)
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                shard = {name: file[name] for name in file.files}
            prompt_ends = np.cumsum(shard["prompt_lengths"])
            response_ends = np.cumsum(shard["response_lengths"])
            ids = shard["distribution_ids"].astype(np.int32)
            logprobs = shard["distribution_logprobs"].astype(np.float32)
            prompts = np.split(shard["prompts"].astype(np.int32), prompt_ends[:-1])
            responses = np.split(shard["responses"].astype(np.int32), response_ends[:-1])
            distributions = zip(np.split(ids, response_ends[:-1]), np.split(logprobs, response_ends[:-1]), strict=True)
            hidden_states = self._features(number, shard["prompt_lengths"] + shard["response_lengths"] - 1)
            return [
                (
                    Rollout(prompt, response, *distribution, temperature=float(temperature), hidden_states=kept),
                    str(source),
                )
                for prompt, response, distribution, temperature, kept, source in zip(
                    prompts,
                    responses,
                    distributions,
                    shard["temperatures"],
                    hidden_states,
                    shard["sources"],
                    strict=True,
                )
            ]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a readable shard: {error}") from None

    def _features(self, number: int, lengths: np.ndarray) -> list[np.ndarray | None]:
        """Views of the shard's hidden states, one per row; nothing is read before it is looked at."""
        path = self.directory / _features_name(number)
        if not path.exists():
            return [None] * len(lengths)
        kept = np.load(path, mmap_mode="r")
        if len(kept) != lengths.sum():
            raise ValueError(f"{path} has hidden states of {len(kept)} tokens, its shard {lengths.sum()}")
        return list(np.split(kept, np.cumsum(lengths)[:-1]))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file beside its place and renames it: a kill leaves the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _shard_name(number: int) -> str:
    return f"shard_{number:05d}.npz"


def _features_name(number: int) -> str:
    return f"features_{number:05d}.npy"


def _narrow(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.uint16 if ids.size == 0 or ids.max() < 1 << 16 else np.int32)
