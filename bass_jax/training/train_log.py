"""The log of a training: one JSON line per few steps, and one per measurement on held-out prompts."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bass_jax.training.loss import LossParts
from bass_jax.training.training_checkpoints import Place
from bass_jax.typing import Array

_MEANS = ("soft", "hard", "reverse", "total_variation", "hidden", "agreement")


class TrainProgress(NamedTuple):
    """One line of metrics.

    Attributes:
        step: optimizer steps taken.
        epoch: passes over the corpus begun, less one.
        loss: mean since the last line, per response token.
        soft: parts of the loss, before their weights; see `bass_jax.training.loss.LossParts`.
        hard: likewise.
        reverse: likewise.
        total_variation: likewise; about the share of drafts that is rejected at temperature 1.
        hidden: likewise.
        agreement: with the target's most probable token, on the batches trained on.
        tokens_per_second: response tokens.
        seconds: of this process.
        corpus_tokens: response tokens of this epoch's corpus.
    """

    step: int
    epoch: int
    loss: float
    soft: float
    hard: float
    reverse: float
    total_variation: float
    hidden: float
    agreement: float
    tokens_per_second: float
    seconds: float
    corpus_tokens: int


class TrainLog:
    """Collects losses on the device, and writes them out once per line: looking at each would stall it."""

    def __init__(self, path: Path, step: int, progress: Callable[[TrainProgress], None] | None):
        """Opens a log to go on after `step`; later lines will be written again.

        Args:
            path: of the JSON lines.
            step: that the training starts from.
            progress: told every line of losses.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._progress = path, progress
        self._lines = [line for line in read_log(path) if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in self._lines))
        self._pending: list[tuple[int, Array, LossParts]] = []
        self._start = self._last = time.perf_counter()

    def add(self, step: int, loss: Array, parts: LossParts) -> None:
        """Notes one batch, used towards `step`."""
        self._pending.append((step, loss, parts))

    def write(self, place: Place, corpus_tokens: int) -> None:
        """Writes the means since the last line.

        Raises:
            ValueError: if a loss is not finite.
        """
        if not self._pending:
            return
        steps, losses, parts = zip(*jax.device_get(self._pending), strict=True)
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                raise ValueError(
                    f"loss is {loss} at step {step}: stopped; the last snapshot is from before. "
                    "A lower optimizer.learning_rate or clip_norm may help"
                )
        tokens = np.array([part.num_tokens for part in parts])
        share = tokens / tokens.sum()
        now = time.perf_counter()
        line = TrainProgress(
            place.step,
            place.epoch,
            loss=float(share @ np.array(losses)),
            **{name: float(share @ np.array([getattr(part, name) for part in parts])) for name in _MEANS},
            tokens_per_second=float(tokens.sum() / (now - self._last)),
            seconds=now - self._start,
            corpus_tokens=corpus_tokens,
        )
        self._pending, self._last = [], now
        self._append({name: _short(value) for name, value in line._asdict().items()})
        if self._progress is not None:
            self._progress(line)

    def write_held_out(self, place: Place, measured: Any) -> None:
        """Writes what a snapshot is worth on held-out prompts; the time that took counts for no line."""
        content = {f"held_out_{name}": _short(value) for name, value in measured._asdict().items()}
        self._append({"step": place.step, **content})
        self._last = time.perf_counter()

    def block_efficiencies(self) -> dict[int, float]:
        """Measured on held-out prompts, by step."""
        name = "held_out_block_efficiency"
        return {line["step"]: line[name] for line in self._lines if name in line}

    def _append(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log; a last one that a kill cut short is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
