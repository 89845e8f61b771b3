"""Traces: what decided over every draft of a run, in a file that grows line by line."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.decoding.state import StepInfo

DIGITS = 4
"""Significant digits of recorded numbers."""


class TraceWriter:
    """Appends runs to a JSONL file: a line that begins a run, one per step, one that ends it.

    Every line is flushed. A file that a killed process left is continued: what follows its last ended run is cut off.

    Attributes:
        num_complete: runs that the file held when it was opened; a caller who repeats a job skips as many.
    """

    def __init__(self, path: str | Path):
        """Opens `path`, which need not exist.

        Raises:
            ValueError: if it cannot be written, or is no trace.
        """
        self.path = Path(path)
        self.num_complete, size = _complete_runs(self.path)
        try:
            self._file = self.path.open("r+" if self.path.exists() else "w+", encoding="utf-8")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise ValueError(f"trace {path}: cannot be written: {error.strerror}") from None

    def begin(self, **about: Any) -> None:
        """Begins a run; `about` holds ``prompt_lengths``, ``limits`` (of new tokens) and what else tells runs apart."""
        self._write({"kind": "run", **{name: _plain(value) for name, value in about.items()}})

    def step(self, info: StepInfo, seconds: float, num_rows: int) -> None:
        """Records one step of the run's first `num_rows` rows; rows that had finished are left out."""
        active = np.flatnonzero(np.asarray(info.is_active)[:num_rows])
        record: dict[str, Any] = {"kind": "step", "seconds": _rounded(float(seconds)), "rows": active.tolist()}
        for name in ("num_drafted", "num_accepted", "num_emitted"):
            record[name] = np.asarray(getattr(info, name))[active].tolist()
        if info.drafts is not None:
            for name, values in info.drafts._asdict().items():
                if values is not None:
                    rows = zip(np.asarray(values)[active], record["num_drafted"], strict=True)
                    # One more than was drafted: the confidence that stopped a row.
                    extra = name == "confidence"
                    record[name] = [[_rounded(float(value)) for value in row[: num + extra]] for row, num in rows]
        self._write(record)

    def end(self) -> None:
        """Ends the run."""
        self._write({"kind": "end"})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()


@dataclasses.dataclass(frozen=True)
class TracedRun:
    """One run of a trace.

    Attributes:
        about: what `TraceWriter.begin` was told.
        steps: as recorded.
    """

    about: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(step["seconds"] for step in self.steps)


def read_trace(path: str | Path) -> list[TracedRun]:
    """Reads the ended runs of a trace.

    Raises:
        ValueError: if the file cannot be read, is no trace, or holds no run that ended.
    """
    runs: list[TracedRun] = []
    about: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    for record in _records(Path(path)):
        if record["kind"] == "run":
            about, steps = record, []
        elif record["kind"] == "step":
            steps.append(record)
        elif about is not None:
            runs.append(TracedRun(about, steps))
            about = None
    if not runs:
        raise ValueError(f"trace {path}: holds no run that ended")
    return runs


def _complete_runs(path: Path) -> tuple[int, int]:
    """How many runs of a file ended, and where in it the last of them did."""
    if not path.exists() or path.stat().st_size == 0:
        return 0, 0
    num, end, position = 0, 0, 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            if line == b'{"kind":"end"}\n':
                num, end = num + 1, position
    if not num:
        for _ in _records(path):  # is it a trace at all?
            break
    return num, end


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    if not line.endswith("\n") and line.startswith('{"kind":'):
                        return  # cut off in the middle of a line
                    raise ValueError(f"{path}:{number}: not JSON: is this a trace?") from None
                if not isinstance(record, dict) or record.get("kind") not in ("run", "step", "end"):
                    raise ValueError(f"{path}:{number}: expected a trace of bass-jax generate --trace")
                yield record
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path}: cannot be read: {error}") from None


def _rounded(value: float) -> float | None:
    """Few digits; None stands for minus infinity, which JSON has not."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
