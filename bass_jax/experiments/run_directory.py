"""The run directory: the configuration, the environment, and the samples of each batch as soon as it has ended."""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml
from flax.traverse_util import flatten_dict

from bass_jax.experiments.experiment_config import ExperimentConfig, parse_experiment
from bass_jax.runtime.files import write_atomically
from bass_jax.runtime.yaml_config import as_plain

type Record = dict[str, Any]
"""One line of JSON."""

CONFIG, SAMPLES, BATCHES, SCORES = "config.yaml", "samples", "batches", "scores.jsonl"
VERSION = 1
_MAX_SHOWN = 6  # differences of configurations in an error message


class RunRecords(NamedTuple):
    """The content of a run directory."""

    path: Path
    config: ExperimentConfig  # as resolved
    sessions: list[Record]  # environment and command of each process that worked on the run
    batches: list[Record]  # one per decoded batch
    samples: list[Record]  # one per answer, in no particular order
    scores: dict[tuple, Record]  # one per scored answer, by `sample_key`

    def progress(self) -> dict[str, tuple[int, int]]:
        """Returns the number of decoded and of planned batches by variant; the second is 0 in old runs."""
        planned = self.sessions[-1].get("num_batches", {}) if self.sessions else {}
        num_done = Counter(batch["variant"] for batch in self.batches)
        return {one.label: (num_done[one.label], planned.get(one.label, 0)) for one in self.config.variants()}


def batch_key(record: Mapping[str, Any]) -> tuple[str, int, int, int, int]:
    """Returns what identifies a batch."""
    return (record["variant"], record["seed"], record["repeat"], record["group"], record["part"])


def sample_key(record: Mapping[str, Any]) -> tuple[str, int, int, str, int]:
    """Returns what identifies a sample."""
    return (record["variant"], record["seed"], record["repeat"], record["problem"], record["sample"])


class RunDirectory:
    """A run directory that is being written.

    The samples of a batch are appended before the batch. A batch exists if its own line is complete. What a killed
    process wrote after its last complete batch is cut off when the directory is opened again.

    Attributes:
        path: of the directory.
        done: keys of the batches in it, those of other processes included.
        ends: by group, the seconds on the group's clock at the end of its last batch.
    """

    def __init__(self, path: str | Path, config: ExperimentConfig, *, process: int = 0, num_processes: int = 1):
        """Makes or reopens the directory. Each of several processes has files of its own.

        Raises:
            ValueError: if it holds another run, cannot be written, or is being written to by another process.
        """
        self.path = Path(path)
        self._suffix = "" if num_processes == 1 else f"-{process}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / f"lock{self._suffix}").open("w")  # Closing the file releases the lock.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"{self.path}: another process is writing to this run") from None
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be written: {error.strerror}") from None
        try:
            self._check_config(config, is_writer=process == 0)
        except ValueError:
            self._lock.close()
            raise
        self.done: set[tuple] = set()
        self.ends: dict[tuple, float] = {}
        for record in _read_records(self.path, BATCHES):
            self._add(record)
        own: set[tuple] = set()
        self._batches = open_records(
            self.path / f"{BATCHES}{self._suffix}.jsonl", lambda batch: own.add(batch_key(batch))
        )
        self._samples = open_records(
            self.path / f"{SAMPLES}{self._suffix}.jsonl", lambda sample: tuple(sample["batch"]) in own
        )

    def _check_config(self, config: ExperimentConfig, *, is_writer: bool) -> None:
        file = self.path / CONFIG
        if not file.exists():
            if is_writer:
                self._write_config(file, config)
            return
        differences = config_differences(read_run_config(self.path), config)
        if not differences:
            return
        if any(_read_records(self.path, BATCHES)):
            listed = ", ".join(
                f"{name} is {there} there and {here} here" for name, (there, here) in differences.items()
            )
            raise ValueError(
                f"{self.path} holds results of another configuration: {listed}; expected another output_dir"
            )
        if is_writer:  # A run that failed before its first batch does not keep the directory.
            (self.path / f"run{self._suffix}.json").unlink(missing_ok=True)
            self._write_config(file, config)

    def _write_config(self, file: Path, config: ExperimentConfig) -> None:
        write_atomically(file, yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True, width=110))

    def _add(self, batch: Record) -> None:
        key = batch_key(batch)
        self.done.add(key)
        self.ends[key[:4]] = max(self.ends.get(key[:4], 0.0), batch["end"])

    def begin(self, session: Record) -> None:
        """Records a session: the process that works on the run now, and its environment."""
        file = self.path / f"run{self._suffix}.json"
        content = json.loads(file.read_text()) if file.exists() else {"version": VERSION, "sessions": []}
        content["sessions"].append(session)
        write_atomically(file, json.dumps(content, indent=1) + "\n")

    def commit(self, batch: Record, samples: Sequence[Record]) -> None:
        """Appends a batch with its samples; they are on the disk when this returns."""
        key = batch_key(batch)
        append_records(self._samples, *({**sample, "batch": key} for sample in samples))
        os.fsync(self._samples.fileno())
        append_records(self._batches, batch)
        os.fsync(self._batches.fileno())
        self._add(batch)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception) -> None:
        for file in (self._batches, self._samples, self._lock):
            file.close()


def config_differences(one: ExperimentConfig, other: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the keys in which two configurations differ: dotted key → both values, without the output directory."""
    here, there = (flatten_dict(as_plain(config), sep=".") for config in (one, other))
    return {
        name: (here.get(name), there.get(name))
        for name in {**here, **there}
        if here.get(name) != there.get(name) and name != "output_dir"
    }


def read_run_config(path: Path) -> ExperimentConfig:
    """Reads the configuration of a run.

    Raises:
        ValueError: if the directory is not a run directory.
    """
    file = path / CONFIG
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        raise ValueError(f"{path}: no run directory: expected a {CONFIG}, which bass-jax run writes") from None
    return parse_experiment(content, str(file))


def read_run(path: str | Path) -> RunRecords:
    """Reads a run directory, of a finished or an unfinished run.

    Raises:
        ValueError: if it is not a run directory, or holds no batch.
    """
    path = Path(path)
    config = read_run_config(path)
    batches = list(_read_records(path, BATCHES))
    if not batches:
        raise ValueError(f"{path}: the run has decoded nothing yet")
    complete = {batch_key(record) for record in batches}
    samples = [record for record in _read_records(path, SAMPLES) if tuple(record["batch"]) in complete]
    scores = {sample_key(record): record for record in _read_records(path, "scores")}
    files = sorted(path.glob("run*.json"))
    sessions = [session for file in files for session in json.loads(file.read_text())["sessions"]]
    return RunRecords(path, config, sessions, batches, samples, scores)


def _read_records(path: Path, name: str) -> Iterator[Record]:
    for file in sorted(path.glob(f"{name}*.jsonl")):
        with file.open("rb") as lines:
            yield from (record for record, _ in _complete_lines(lines))


def _complete_lines(file: IO[bytes]) -> Iterator[tuple[Record, int]]:
    """Yields the records before the first incomplete line, and where each ends."""
    end = 0
    for line in file:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n"):
            return
        end += len(line)
        yield record, end


def open_records(path: Path, is_kept: Callable[[Record], Any]) -> IO[bytes]:
    """Opens a file of records and cuts off what follows the leading records for which `is_kept` is not False."""
    path.touch()
    file, size = path.open("r+b"), 0
    for record, end in _complete_lines(file):
        if is_kept(record) is False:
            break
        size = end
    file.truncate(size)
    file.seek(size)
    return file


def append_records(file: IO[bytes], *records: Record) -> None:
    """Appends records, each as one line."""
    for record in records:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        file.write(line.encode() + b"\n")
    file.flush()
