"""Traces: a JSON Lines file with the draft records of runs."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.decoding.state import StepInfo

DIGITS = 4
"""Significant digits of the numbers in a trace."""


class TraceWriter:
    """Appends runs to a JSON Lines file: a first line, a line per step, and a last line.

    Every line is flushed. An existing file is continued after its last complete run.

    Attributes:
        num_complete: complete runs in the file when it was opened. A caller who resumes skips as many.
    """

    def __init__(self, path: str | Path):
        """Opens or creates `path`.

        Raises:
            ValueError: if it cannot be written, or is not a trace.
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
        """Begins a run; `about` is its description, with ``prompt_lengths`` and ``limits`` (new tokens per row)."""
        self._write({"kind": "run", **{name: _plain(value) for name, value in about.items()}})

    def step(self, info: StepInfo, seconds: float, num_rows: int) -> None:
        """Records one step of the first `num_rows` rows, without the finished ones."""
        active = np.flatnonzero(np.asarray(info.is_active)[:num_rows])
        record: dict[str, Any] = {"kind": "step", "seconds": _rounded(float(seconds)), "rows": active.tolist()}
        for name in ("num_drafted", "num_accepted", "num_emitted"):
            record[name] = np.asarray(getattr(info, name))[active].tolist()
        if info.draft_record is not None:
            for name, values in info.draft_record._asdict().items():
                if values is not None:
                    rows = zip(np.asarray(values)[active], record["num_drafted"], strict=True)
                    # The confidence after the last draft is the one that stopped the row.
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
        about: the arguments of `TraceWriter.begin`.
        steps: the recorded steps.
    """

    about: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return sum(step["seconds"] for step in self.steps)


def read_trace(path: str | Path) -> list[TracedRun]:
    """Reads the complete runs of a trace.

    Raises:
        ValueError: if the file cannot be read, is not a trace, or contains no complete run.
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
        raise ValueError(f"trace {path}: contains no complete run")
    return runs


def _complete_runs(path: Path) -> tuple[int, int]:
    """Returns the number of complete runs in a file, and the position in bytes after the last one."""
    if not path.exists() or path.stat().st_size == 0:
        return 0, 0
    num, end, position = 0, 0, 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            if line == b'{"kind":"end"}\n':
                num, end = num + 1, position
    if not num:
        for _ in _records(path):  # Raises if the file is not a trace.
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
                        return  # The process was killed while it wrote this line.
                    raise ValueError(f"{path}:{number}: not JSON: is this a trace?") from None
                if not isinstance(record, dict) or record.get("kind") not in ("run", "step", "end"):
                    raise ValueError(f"{path}:{number}: expected a trace of bass-jax generate --trace")
                yield record
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path}: cannot be read: {error}") from None


def _rounded(value: float) -> float | None:
    """Returns a number with few digits; None for minus infinity, which JSON does not have."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
