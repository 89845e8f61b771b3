"""A sweep over draft shapes at one training budget: what each accepts, costs, and is predicted to be worth."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.checkpoint import Tokenizer
from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.cost_model import CostModel, expected_emitted, step_seconds
from bass_jax.models import Model
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.training.agreement import accepted_runs, teacher_forced
from bass_jax.training.data import CorpusRows
from bass_jax.training.distill import new_draft
from bass_jax.training.distill_config import DistillConfig, DraftConfig
from bass_jax.training.trainer import train
from bass_jax.typing import Bool

NUM_POSITIONS = 8
"""Draft positions whose acceptance is measured; a longer draft counts as this long."""

_REPEATS = 15


class DraftPoint(NamedTuple):
    """One shape after its training.

    Attributes:
        num_layers: L.
        width: D.
        num_params: without the target's embedding.
        agreement: with the target's greedy answers to prompts kept apart, given their prefix.
        rates: of each draft position, the share accepted, given that those before it were.
        pass_seconds: of one draft here: a pass of one token and the choice of the next, batch 1.
        speedups: batch size to predicted speed-up over regular decoding, at the best draft length.
        draft_lens: batch size to that length.
    """

    num_layers: int
    width: int
    num_params: int
    agreement: float
    rates: list[float]
    pass_seconds: float
    speedups: dict[int, float]
    draft_lens: dict[int, int]


def search_drafts(
    config: DistillConfig,
    rows: CorpusRows,
    target: Model,
    tokenizer: Tokenizer,
    shapes: Sequence[tuple[int, int]],
    cost_of: Callable[[ModelConfig], CostModel],
    *,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    context: int = 256,
    progress: Callable[[DraftConfig], None] = lambda shape: None,
) -> Iterator[DraftPoint]:
    """Trains each shape for the configuration's steps on the same data, and measures it.

    ``output_dir/search/points.jsonl`` keeps what is done: a second call goes on where the first was interrupted.

    Args:
        config: of the distillation; its draft gives head size and output vocabulary.
        rows: of its corpus.
        target: whose embedding the drafts share.
        tokenizer: the target's.
        shapes: ``(num_layers, width)`` of every draft.
        cost_of: the cost model of the target with a draft of that shape.
        batches: batch sizes of the predictions.
        context: committed tokens per row of the predictions.
        progress: told which shape begins.

    Raises:
        ValueError: as `train`; if a width is smaller than a head, or no prompt was kept apart.
    """
    directory = Path(config.output_dir) / "search"
    path = directory / "points.jsonl"
    done = {(point.num_layers, point.width): point for point in read_points(path)}
    for num_layers, width in shapes:
        if (num_layers, width) not in done:
            shape = draft_shape(config.draft, num_layers, width)
            progress(shape)
            own = dataclasses.replace(config, draft=shape, output_dir=str(directory / f"{num_layers}x{width}"))
            Path(own.output_dir).mkdir(parents=True, exist_ok=True)
            draft = train(own, rows, new_draft(own, rows, target, tokenizer), target=target)
            point = measure_point(draft, rows, cost_of(draft.config), batches, context)
            with path.open("a") as file:
                file.write(json.dumps(point._asdict()) + "\n")
            done[num_layers, width] = point
        yield done[num_layers, width]


def draft_shape(like: DraftConfig, num_layers: int, width: int) -> DraftConfig:
    """Scales `like` to a depth and a width: heads of its size, half as many key-value heads, an mlp of three widths.

    Raises:
        ValueError: if the width does not hold a head, or the depth is 0.
    """
    num_heads = width // like.head_dim
    if num_layers < 1 or num_heads < 1:
        raise ValueError(f"{num_layers} layers of width {width}: expected at least 1, of at least {like.head_dim}")
    return dataclasses.replace(
        like, num_layers=num_layers, width=width, num_heads=num_heads,
        num_kv_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads, mlp_width=3 * width, start=None,
    )  # fmt: skip


def measure_point(draft: Model, rows: CorpusRows, cost: CostModel, batches: Sequence[int], context: int) -> DraftPoint:
    """Measures a trained draft; see `search_drafts`."""
    watched = rows.held_out(rows.shards())
    if not watched:
        raise ValueError("held_out_share: no prompt of the corpus is kept apart; expected some, to measure drafts on")
    matches = list(teacher_forced(draft, watched))
    rates = acceptance_rates(matches, NUM_POSITIONS)
    best = {batch: best_draft_len(cost, rates, batch, context) for batch in batches}
    own = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    return DraftPoint(
        num_layers=draft.config.num_layers,
        width=draft.config.width,
        num_params=sum(leaf.size for leaf in jax.tree.leaves(own)),
        agreement=float(np.concatenate(matches).mean()),
        rates=rates,
        pass_seconds=time_pass(draft, context),
        speedups={batch: speedup for batch, (_, speedup) in best.items()},
        draft_lens={batch: length for batch, (length, _) in best.items()},
    )


def acceptance_rates(matches: Sequence[Bool[np.ndarray, "_"]], draft_len: int) -> list[float]:
    """Of each draft position, the share of greedy speculation's drafts that are accepted where it is reached."""
    accepted = np.concatenate([accepted_runs(agrees, draft_len) for agrees in matches]) - 1
    reached = [(accepted >= position).sum() for position in range(draft_len + 1)]
    return [float(reached[i + 1] / reached[i]) if reached[i] else 0.0 for i in range(draft_len)]


def best_draft_len(cost: CostModel, rates: Sequence[float], num_rows: int, context: int) -> tuple[int, float]:
    """Returns the draft length with the largest predicted speed-up over regular decoding, and that speed-up."""
    regular = float(step_seconds(cost, num_rows, 0, context))
    found = {}
    for length in (length for length in DRAFT_LEN_BUCKETS if length <= len(rates)):
        emitted = float(expected_emitted(jnp.asarray(rates), jnp.asarray(length)))
        found[length] = emitted * regular / float(step_seconds(cost, num_rows, length, context))
    best = max(found, key=lambda length: (found[length], -length))
    return best, found[best]


def time_pass(draft: Model, context: int) -> float:
    """Median seconds of one pass of one token at batch 1, with the choice of the next."""

    @jax.jit
    def once(params, tokens, positions, cache):
        model = Model(params, draft.config, draft.output_ids)
        hidden_states, cache = model.hidden_states(tokens, positions, cache)
        return argmax(model.logits(hidden_states)), cache

    arguments = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), context), draft.init_cache(1, 2 * context)
    jax.block_until_ready(once(draft.params, *arguments))
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(once(draft.params, *arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def read_points(path: Path) -> list[DraftPoint]:
    """Returns the points that a search has written; a last line that a kill cut short is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    points = []
    for line in lines:
        if line.endswith("}"):
            content = json.loads(line)
            for name in ("speedups", "draft_lens"):
                content[name] = {int(batch): value for batch, value in content[name].items()}
            points.append(DraftPoint(**content))
    return points
