"""Turns recorded runs into what a simulator needs: the number of drafts that would be accepted at every position."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.decoding.traces import TracedRun


class Replay(NamedTuple):
    """The rows of a trace, independent of the batches in which they were decoded. Positions count emitted tokens."""

    acceptable: np.ndarray  # [R, N] int32, drafts that would be accepted if drafting started at this position
    confidence: np.ndarray  # [R, N, G] float32, of the drafts that start at this position; 1 if unknown
    num_tokens: np.ndarray  # [R] int32, emitted tokens
    limits: np.ndarray  # [R] int32, largest number of emitted tokens
    prompt_lengths: np.ndarray  # [R] int32
    share_unknown: float  # share of the positions whose acceptance was not observed and is sampled


def make_replay(runs: Sequence[TracedRun], seed: int = 0) -> Replay:
    """Computes the number of acceptable drafts at every position.

    The draft at a position is accepted or rejected given the row's own text, independent of the position at which
    drafting started. Consecutive accepted drafts are therefore joined until one is rejected. This is exact for greedy
    decoding with a draft model, and exact in distribution for the token rule. An exhaustive run
    (`bass_jax.decoding.baselines.exhaustive_step`) observes every position; if it is greedy, its counts are used
    directly, which is exact for every drafter. A speculative run does not observe the positions of its bonus tokens:
    their acceptance is sampled with the mean of the others, from `seed`.

    Raises:
        ValueError: if no draft was recorded.
    """
    rows = [row for run in runs for row in _rows_of(run)]
    random = np.random.default_rng(seed)
    seen = np.concatenate([row.runs[row.runs >= 0] for row in rows] or [np.zeros(0)])
    if seen.size == 0:
        raise ValueError("the trace holds no drafts: record it with speculation")
    longest = max(len(row.runs) for row in rows)
    width = max(row.confidence.shape[1] for row in rows)
    acceptable = np.zeros((len(rows), longest), np.int32)
    confidence = np.ones((len(rows), longest, width), np.float32)
    num_unknown = 0
    for index, row in enumerate(rows):
        num, is_unknown = len(row.runs), row.runs < 0
        num_unknown += int(is_unknown[:-1].sum())  # nothing is drafted after the last token
        sampled = random.random(num) < (seen > 0).mean()
        counts = np.where(is_unknown, sampled, row.runs)
        acceptable[index, :num] = _join(counts, np.where(is_unknown, sampled, row.is_open))
        confidence[index, :num, : row.confidence.shape[1]] = row.confidence
    num_tokens = np.array([len(row.runs) for row in rows], np.int32)
    limits, prompts = (np.concatenate([run.about[name] for run in runs]) for name in ("limits", "prompt_lengths"))
    share = num_unknown / max(1, int(num_tokens.sum()))
    return Replay(acceptable, confidence, num_tokens, limits.astype(np.int32), prompts.astype(np.int32), share)


def replay_acceptance(replay: Replay) -> tuple[float, ...]:
    """Returns the acceptance rates of the first 8 drafts, each given that the drafts before it were accepted."""
    is_text = np.arange(replay.acceptable.shape[1]) < replay.num_tokens[:, None] - 1
    runs = replay.acceptable[is_text]
    reached = [max(int((runs >= position).sum()), 1) for position in range(8)]
    return tuple(float((runs > position).sum() / num) for position, num in enumerate(reached))


class _Row(NamedTuple):
    """The observations of one row."""

    runs: np.ndarray  # [n] int, accepted drafts from this position on; -1 if not observed
    is_open: np.ndarray  # [n] bool, the run continues with that of the position after it
    confidence: np.ndarray  # [n, G] float32


def _rows_of(run: TracedRun) -> list[_Row]:
    num_rows = len(run.about["prompt_lengths"])
    num_tokens = np.zeros(num_rows, int)
    for step in run.steps:
        np.add.at(num_tokens, step["rows"], step["num_emitted"])
    width = max((max(step["num_drafted"], default=0) for step in run.steps), default=0) + 1
    rows = [_Row(np.full(num, -1), np.zeros(num, bool), np.ones((num, width), np.float32)) for num in num_tokens]
    is_exhaustive = run.about.get("step") == "exhaustive"
    is_exact = is_exhaustive and run.about.get("is_greedy", False)
    position = np.zeros(num_rows, int)
    for step in run.steps:
        columns = (step["rows"], step["num_drafted"], step["num_accepted"], step["num_emitted"])
        for slot, (index, drafted, accepted, num) in enumerate(zip(*columns, strict=True)):
            if num == 0:
                continue
            row, start = rows[index], position[index]
            position[index] += num
            if "confidence" in step:
                values = [0.0 if value is None else value for value in step["confidence"][slot]]
                row.confidence[start, : len(values)] = values
            if is_exact:
                row.runs[start], row.is_open[start] = accepted, 0 < accepted == drafted
                continue
            # The accepted drafts, then the rejected one. In a speculative run there is none if all were accepted.
            num_run = min(accepted, num)
            row.runs[start : start + num_run], row.is_open[start : start + num_run] = 1, True
            if num_run < num and (accepted < drafted or is_exhaustive):
                row.runs[start + num_run] = 0
    return rows


def _join(runs: np.ndarray, is_open: np.ndarray) -> np.ndarray:
    """Returns the lengths of the runs ``[n]``, with each open run continued by the run at its end."""
    num = len(runs)
    joined = np.zeros(num + 1, np.int32)
    for position in range(num - 1, -1, -1):
        end = position + int(runs[position])
        joined[position] = runs[position] + (joined[min(end, num)] if is_open[position] else 0)
    return joined[:num]
