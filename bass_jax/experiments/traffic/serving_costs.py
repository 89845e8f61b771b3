"""What serving costs beside the steps themselves, and all of it as tables that a host loop can look up."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from bass_jax.cost_model import CostModel, Device, PassShape, RooflineModel
from bass_jax.cost_model.roofline import CATCH_UP_CHUNK
from bass_jax.engine import EngineConfig
from bass_jax.experiments.traffic.workload import MAX_DRAFTS

NUM_CONTEXTS = 17
"""Contexts at which the tables hold costs; between them they are interpolated."""


@dataclasses.dataclass(frozen=True)
class ServingCosts:
    """Seconds of what an executor does.

    Attributes:
        steps: prices target passes and drafts.
        piece: ``(context) -> seconds`` of a pass over a chunk of a prompt, by both models; ``[contexts]`` at the
            contexts of `grid`.
        insert: of moving a prompt that was read into its row.
        regroup: of making a batch of so many rows from one of so many: ``(from, to) -> seconds``.
        host: between two steps, while the device waits.
    """

    steps: CostModel
    chunk: np.ndarray
    insert: float
    regroup: Mapping[tuple[int, int], float]
    host: float


def grid(capacity: int) -> np.ndarray:
    """The contexts of the tables: ``[NUM_CONTEXTS]`` from 0 to `capacity`."""
    return np.linspace(0, capacity, NUM_CONTEXTS)


def neighbours(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The moves that a scheduler makes between batch sizes."""
    ups = list(itertools.pairwise(sizes))
    return ups + [(large, small) for small, large in ups]


def device_costs(model: RooflineModel, device: Device, config: EngineConfig, host: float) -> ServingCosts:
    """Costs from public figures: passes by the roofline, moves by the bytes that they read and write.

    Args:
        model: of the pair on `device`.
        device: the same.
        config: sizes of the engine.
        host: assumed seconds between two steps.
    """
    contexts = grid(config.capacity)
    chunk = sum(
        np.asarray(model.pass_seconds(shape, 1, config.chunk, contexts))
        for shape in (model.target, model.draft)
        if shape.num_layers > 0
    )
    # Rows in pages move by their tables.
    row_bytes = 0 if config.page_size else config.capacity * (model.target.cache_bytes + model.draft.cache_bytes)
    row = row_bytes / (device.bandwidth * device.bandwidth_efficiency)
    moves = {(old, new): (min(old, new) + new) * row for old, new in neighbours(config.sizes)}
    return ServingCosts(model, np.asarray(chunk), 2 * row, moves, host)


NO_DRAFT = PassShape(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of a drafter that costs nothing."""


class StepTable:
    """A cost model at the batch sizes and widths of an engine, in numpy: a look-up takes microseconds."""

    def __init__(self, cost: CostModel, config: EngineConfig, buckets: Sequence[int]):
        """Asks `cost` for every size, width and number of drafts."""
        self._contexts = grid(config.capacity)
        self._target, self._draft, self._read = {}, {}, {}
        drafts = np.arange(MAX_DRAFTS + 1)[:, None]
        for size in config.sizes:
            for bucket in buckets:
                self._target[size, bucket] = np.asarray(cost.target_seconds(size, bucket + 1, self._contexts)).ravel()
            self._draft[size] = np.broadcast_to(
                np.asarray(cost.draft_seconds(size, drafts, self._contexts[None], 0)), (MAX_DRAFTS + 1, NUM_CONTEXTS)
            )
            behind = np.asarray(cost.draft_seconds(size, 1, self._contexts, CATCH_UP_CHUNK))
            self._read[size] = behind - np.asarray(cost.draft_seconds(size, 1, self._contexts, 0))

    def seconds(self, size: int, bucket: int, num_drafts: int, context: float, num_behind: int) -> float:
        """Of one step.

        Args:
            size: rows of the batch.
            bucket: draft length that it ran in.
            num_drafts: of the row that drafted most.
            context: mean committed tokens of the running rows.
            num_behind: tokens that the drafter reads first, of the row where they are most.
        """
        place = context / self._contexts[1]
        low = min(int(place), NUM_CONTEXTS - 2)
        share = place - low

        def at(values) -> float:
            return float(values[low] * (1 - share) + values[low + 1] * share)

        total = at(np.broadcast_to(self._target[size, bucket], NUM_CONTEXTS))
        if num_drafts:
            total += at(self._draft[size][num_drafts])
            if num_behind:
                read = np.broadcast_to(self._read[size], NUM_CONTEXTS)
                total += -(-num_behind // CATCH_UP_CHUNK) * at(read)
        return total
