"""The run directory: what was asked for, on what, and every sample as soon as there is one."""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from bass_jax.experiments.experiment_config import ExperimentConfig, parse_experiment
from bass_jax.runtime.yaml_config import as_plain

type Record = dict[str, Any]
"""One JSON line."""

CONFIG, MANIFEST, SAMPLES, BATCHES, SCORES = "config.yaml", "run.json", "samples", "batches", "scores"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """What a run directory holds.

    Attributes:
        path: of the directory.
        config: as resolved.
        sessions: one per process that worked on it: environment and command.
        batches: one per decoded batch.
        samples: one per answer, in no particular order.
        scores: measures per sample key; see `sample_key`.
    """

    path: Path
    config: ExperimentConfig
    sessions: list[Record]
    batches: list[Record]
    samples: list[Record]
    scores: dict[tuple, Record]


def batch_key(record: Mapping[str, Any]) -> tuple[str, int, int, int, int]:
    """Returns what tells batches apart."""
    return (record["variant"], record["seed"], record["repeat"], record["group"], record["part"])


def sample_key(record: Mapping[str, Any]) -> tuple[str, int, int, str, int]:
    """Returns what tells samples apart."""
    return (record["variant"], record["seed"], record["repeat"], record["problem"], record["sample"])


class RunDirectory:
    """A run directory that is written to.

    Samples are appended first, then their batch; a batch counts when its own line is whole. What a killed process left
    behind the last whole batch is cut off when the directory is opened again.

    Attributes:
        path: of the directory.
        done: keys of the batches that it holds, those of other processes included.
        ends: seconds on a group's clock when its last batch ended, by the group's key.
    """

    def __init__(self, path: str | Path, config: ExperimentConfig, *, process: int = 0, num_processes: int = 1):
        """Makes or reopens the directory.

        Args:
            path: of the directory.
            config: must be that of an existing run.
            process: of several that work on the run, this one; each has its own files.
            num_processes: that work on it.

        Raises:
            ValueError: if it holds another run, cannot be written, or is being written to by another process.
        """
        self.path = Path(path)
        self._suffix = "" if num_processes == 1 else f"-{process}"
        self._files: dict[str, IO[bytes]] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Kept as long as the process lives.
            self._lock = (self.path / f"lock{self._suffix}").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"{self.path}: another process is writing to this run") from None
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be written: {error.strerror}") from None
        try:
            self._check_config(config)
        except ValueError:
            self._lock.close()
            raise
        self.done: set[tuple] = set()
        self.ends: dict[tuple, float] = {}
        for record in _records(self.path, BATCHES):
            self._note(record)
        self._cut()

    def _check_config(self, config: ExperimentConfig) -> None:
        file = self.path / CONFIG
        if not file.exists():
            text = yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True, width=110)
            _write_whole(file, text)
            return
        there = dataclasses.replace(read_config(self.path), output_dir=config.output_dir)
        for name in (field.name for field in dataclasses.fields(config)):
            ours, theirs = as_plain(getattr(config, name)), as_plain(getattr(there, name))
            if ours != theirs:
                raise ValueError(
                    f"{self.path} holds a run with another configuration: {name} is {theirs} there and {ours} here; "
                    "expected another output_dir"
                )

    def _note(self, record: Record) -> None:
        key = batch_key(record)
        self.done.add(key)
        self.ends[key[:4]] = max(self.ends.get(key[:4], 0.0), record["end"])

    def _cut(self) -> None:
        """Cuts this process' files back to whole batches."""
        batches = self._file(BATCHES)
        whole, size = set(), 0
        for record, end in _whole_lines(batches):
            whole.add(batch_key(record))
            size = end
        batches.truncate(size)
        batches.seek(size)
        samples, size = self._file(SAMPLES), 0
        for record, end in _whole_lines(samples):
            if tuple(record["batch"]) not in whole:
                break
            size = end
        samples.truncate(size)
        samples.seek(size)

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            path = self.path / f"{name}{self._suffix}.jsonl"
            path.touch()
            self._files[name] = path.open("r+b")
        return self._files[name]

    def begin(self, session: Record) -> None:
        """Notes who works on the run, and on what machine."""
        file = self.path / f"run{self._suffix}.json"
        content = json.loads(file.read_text()) if file.exists() else {"version": VERSION, "sessions": []}
        content["sessions"].append(session)
        _write_whole(file, json.dumps(content, indent=1) + "\n")

    def commit(self, batch: Record, samples: Sequence[Record]) -> None:
        """Appends a batch with its samples; when this returns, no kill loses them."""
        key = batch_key(batch)
        self._append(SAMPLES, [{**sample, "batch": key} for sample in samples])
        self._append(BATCHES, [batch])
        self._note(batch)

    def _append(self, name: str, records: Sequence[Record]) -> None:
        file = self._file(name)
        file.write("".join(_line(record) for record in records).encode())
        file.flush()
        os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the files and lets others write."""
        for file in (*self._files.values(), self._lock):
            file.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class ScoreFile:
    """The scores of a run, appended as they come; resumes like the run itself."""

    def __init__(self, path: Path):
        """Opens the scores of the run directory `path`."""
        file = path / f"{SCORES}.jsonl"
        file.touch()
        self._file = file.open("r+b")
        self.done, size = set(), 0
        for record, end in _whole_lines(self._file):
            self.done.add(sample_key(record))
            size = end
        self._file.truncate(size)
        self._file.seek(size)

    def append(self, record: Record) -> None:
        """Adds the scores of one sample."""
        self._file.write(_line(record).encode())
        self._file.flush()
        self.done.add(sample_key(record))

    def __enter__(self) -> "ScoreFile":
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()


def read_config(path: Path) -> ExperimentConfig:
    """Reads the configuration of a run.

    Raises:
        ValueError: if the directory is no run.
    """
    file = path / CONFIG
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        raise ValueError(f"{path}: no run directory: expected a {CONFIG}, which bass-jax run writes") from None
    return parse_experiment(content, str(file))


def read_run(path: str | Path) -> RunRecords:
    """Reads a run directory, be it finished or not.

    Raises:
        ValueError: if it is none, or holds no batch.
    """
    path = Path(path)
    config = read_config(path)
    batches = list(_records(path, BATCHES))
    if not batches:
        raise ValueError(f"{path}: the run has decoded nothing yet")
    whole = {batch_key(record) for record in batches}
    samples = [record for record in _records(path, SAMPLES) if tuple(record["batch"]) in whole]
    scores = {sample_key(record): record for record in _records(path, SCORES)}
    sessions = [
        session for file in sorted(path.glob("run*.json")) for session in json.loads(file.read_text())["sessions"]
    ]
    return RunRecords(path, config, sessions, batches, samples, scores)


def _records(path: Path, name: str) -> Iterator[Record]:
    for file in sorted(path.glob(f"{name}*.jsonl")):
        with file.open("rb") as lines:
            yield from (record for record, _ in _whole_lines(lines))


def _whole_lines(file: IO[bytes]) -> Iterator[tuple[Record, int]]:
    """Yields the records up to the first line that is not whole, and where each ends."""
    file.seek(0)
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
        except ValueError:
            return
        end += len(line)
        yield record, end


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
