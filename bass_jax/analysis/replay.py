"""From a trace to what a simulator asks: how many drafts would be accepted at any position of any row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.decoding.traces import TracedRun


class Replay(NamedTuple):
    """Rows of a trace, whoever they were decoded with; positions count emitted tokens."""

    acceptable: np.ndarray  # [R, N] int32, drafts that would be accepted if drafting began there
    confidence: np.ndarray  # [R, N, G] float32, of the drafts begun there; 1 where it is not known
    num_tokens: np.ndarray  # [R] int32, emitted in all
    limits: np.ndarray  # [R] int32, most that might have been
    prompt_lengths: np.ndarray  # [R] int32
    share_unknown: float  # of the positions whose acceptance was not observed, and is drawn


def make_replay(runs: Sequence[TracedRun], seed: int = 0) -> Replay:
    """Reads off where drafts would be accepted.

    A draft is evaluated given the row's own text. If the text stays what it is, whether the draft at a position is
    accepted does not depend on where drafting began; so a run of accepted drafts ends where one is refused. That is
    exact for greedy decoding with a model as drafter, and exact in distribution for the token rule. Exhaustive
    drafting (`bass_jax.decoding.baselines.exhaustive_step`) sees every position. Steps of a speculating run do not see
    the position of their bonus token: it is drawn with the mean acceptance of the others, from `seed`.

    In a greedy exhaustive run the counts themselves are taken: exact for every drafter.

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
        num_unknown += int(is_unknown[:-1].sum())  # after the last token nothing is drafted
        is_lucky = random.random(num) < (seen > 0).mean()
        counts = np.where(is_unknown, is_lucky, row.runs)
        acceptable[index, :num] = _joined(counts, np.where(is_unknown, is_lucky, row.is_open))
        confidence[index, :num, : row.confidence.shape[1]] = row.confidence
    num_tokens = np.array([len(row.runs) for row in rows], np.int32)
    limits, prompts = (np.concatenate([run.about[name] for run in runs]) for name in ("limits", "prompt_lengths"))
    share = num_unknown / max(1, int(num_tokens.sum()))
    return Replay(acceptable, confidence, num_tokens, limits.astype(np.int32), prompts.astype(np.int32), share)


def acceptance_by_position(replay: Replay, num_positions: int = 8) -> tuple[float, ...]:
    """Share of the positions from which draft i is accepted, given that those before it are.

    Args:
        replay: any.
        num_positions: drafts.
    """
    is_text = np.arange(replay.acceptable.shape[1]) < replay.num_tokens[:, None] - 1
    runs = replay.acceptable[is_text]
    reached = [max(int((runs >= position).sum()), 1) for position in range(num_positions)]
    return tuple(float((runs > position).sum() / num) for position, num in enumerate(reached))


class _Row(NamedTuple):
    """What one row's steps say of its positions."""

    runs: np.ndarray  # [n] int, drafts accepted from each position on; -1 where it was not seen
    is_open: np.ndarray  # [n] bool, the run goes on as that of the position after it does
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
            # Position by position: accepted drafts, then one that was refused, unless all stood.
            num_run = min(accepted, num)
            row.runs[start : start + num_run], row.is_open[start : start + num_run] = 1, True
            if num_run < num and (accepted < drafted or is_exhaustive):
                row.runs[start + num_run] = 0
    return rows


def _joined(runs: np.ndarray, is_open: np.ndarray) -> np.ndarray:
    """Follows runs that go on into those of later positions."""
    num = len(runs)
    joined = np.zeros(num + 1, np.int32)
    for position in range(num - 1, -1, -1):
        end = position + int(runs[position])
        joined[position] = runs[position] + (joined[min(end, num)] if is_open[position] else 0)
    return joined[:num]
