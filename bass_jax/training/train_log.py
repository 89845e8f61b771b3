"""The log of a training, one JSON object per line."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bass_jax.runtime.files import read_jsonl
from bass_jax.training.agreement import Agreement
from bass_jax.training.loss import LossParts
from bass_jax.training.training_checkpoints import TrainPosition
from bass_jax.typing import Array

_MEANS = ("soft", "hard", "reverse", "total_variation", "hidden", "agreement")


class TrainProgress(NamedTuple):
    """One line of the log: means since the previous line, per response token. See also `LossParts`."""

    step: int  # optimizer steps taken
    epoch: int  # from 0
    loss: float  # weighted sum of the parts
    soft: float
    hard: float
    reverse: float
    total_variation: float
    hidden: float
    agreement: float
    tokens_per_second: float  # response tokens
    seconds: float  # since this process began to train
    corpus_tokens: int  # response tokens that this epoch reads


class TrainLog:
    """Keeps losses on the device until a line is due, because reading one would wait for its step."""

    def __init__(self, path: Path, step: int, progress: Callable[[TrainProgress], None] | None):
        """Opens a log to continue after `step`; later lines are removed.

        Args:
            path: of the JSON Lines file.
            step: that the training starts from.
            progress: called with every line of losses.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._progress = path, progress
        self._lines = [line for line in read_log(path) if line["step"] <= step] if path.exists() else []
        path.write_text("".join(json.dumps(line) + "\n" for line in self._lines))
        self._pending: list[tuple[int, Array, LossParts]] = []
        self._start = self._last = time.perf_counter()

    def add(self, step: int, loss: Array, parts: LossParts) -> None:
        """Adds one batch of `step`."""
        self._pending.append((step, loss, parts))

    def write(self, position: TrainPosition, corpus_tokens: int) -> None:
        """Writes a line of losses, if there are any.

        Raises:
            ValueError: if a loss is not finite.
        """
        if not self._pending:
            return
        steps, losses, parts = zip(*jax.device_get(self._pending), strict=True)
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                raise ValueError(
                    f"loss is {loss} at step {step}: stopped; the last checkpoint is from before. "
                    "A lower optimizer.learning_rate or clip_norm may help"
                )
        tokens = np.array([part.num_tokens for part in parts])
        shares = tokens / tokens.sum()
        now = time.perf_counter()
        line = TrainProgress(
            position.step,
            position.epoch,
            loss=float(shares @ np.array(losses)),
            **{name: float(shares @ np.array([getattr(part, name) for part in parts])) for name in _MEANS},
            tokens_per_second=float(tokens.sum() / (now - self._last)),
            seconds=now - self._start,
            corpus_tokens=corpus_tokens,
        )
        self._pending, self._last = [], now
        self._append(line._asdict())
        if self._progress is not None:
            self._progress(line)

    def write_held_out(self, position: TrainPosition, measured: Agreement) -> None:
        """Writes the agreement on held-out prompts. The time since the previous line is not counted."""
        self._append(
            {"step": position.step} | {f"held_out_{name}": value for name, value in measured._asdict().items()}
        )
        self._last = time.perf_counter()

    def tokens_per_pass(self) -> dict[int, float]:
        """Returns the tokens per target pass on held-out prompts by step."""
        name = "held_out_tokens_per_pass"
        return {line["step"]: line[name] for line in self._lines if name in line}

    def _append(self, line: dict[str, Any]) -> None:
        line = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in line.items()}
        self._lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log without an incomplete last line, which a killed process may leave.

    Raises:
        ValueError: if it cannot be read.
    """
    return [line for _, line in read_jsonl(path, skip_partial=True)]
