"""The costs of serving, as tables that the host loop of a simulation looks up."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.cost_model import CostModel, Device, RooflineModel
from bass_jax.cost_model.roofline import CATCH_UP_CHUNK
from bass_jax.engine import EngineConfig
from bass_jax.experiments.traffic.workload import MAX_DRAFTS

NUM_CONTEXTS = 17
"""Context lengths in the tables; costs between them are interpolated."""


class ServingCosts(NamedTuple):
    """Seconds of the operations of an executor."""

    steps: CostModel  # of target passes and drafts
    chunk: np.ndarray  # [NUM_CONTEXTS] float64, reading a chunk of a prompt with both models, at `context_grid`
    insert: float  # moving a prompt that was read into its row
    regroup: Mapping[tuple[int, int], float]  # changing the batch size: (from, to) → seconds
    host: float  # between two steps, while the device waits


def context_grid(capacity: int) -> np.ndarray:
    """Returns the contexts of the tables: ``[NUM_CONTEXTS]`` from 0 to `capacity`."""
    return np.linspace(0, capacity, NUM_CONTEXTS)


def size_changes(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the changes of the batch size that a scheduler makes: to the next larger and smaller size."""
    ups = list(itertools.pairwise(sizes))
    return ups + [(large, small) for small, large in ups]


def device_costs(model: RooflineModel, device: Device, config: EngineConfig, host: float) -> ServingCosts:
    """Computes costs from public figures: passes by the roofline `model`, moves of rows by their bytes."""
    contexts = context_grid(config.capacity)
    models = [shape for shape in (model.target, model.draft) if shape.num_layers > 0]
    chunk = sum(np.asarray(model.pass_seconds(shape, 1, config.chunk, contexts)) for shape in models)
    # Rows of paged caches are moved by changing their tables. A state counts once as read and once as written.
    row_bytes = 0 if config.page_size else config.capacity * (model.target.cache_bytes + model.draft.cache_bytes)
    row_bytes += model.target.state_bytes / 2
    row = row_bytes / (device.bandwidth * device.bandwidth_efficiency)
    moves = {(old, new): (min(old, new) + new) * row for old, new in size_changes(config.sizes)}
    return ServingCosts(model, np.asarray(chunk), 2 * row, moves, host)


class StepTable:
    """A cost model at the batch sizes and draft-length buckets of an engine, in NumPy, for lookups in microseconds."""

    def __init__(self, cost: CostModel, config: EngineConfig, buckets: Sequence[int]):
        """Evaluates `cost` for every batch size, bucket and number of drafts."""
        self._contexts = context_grid(config.capacity)
        self._target, self._draft, self._catch_up = {}, {}, {}

        def table(values, *shape: int) -> np.ndarray:
            return np.broadcast_to(np.asarray(values), (*shape, NUM_CONTEXTS))

        drafts = np.arange(MAX_DRAFTS + 1)[:, None]
        for size in config.sizes:
            for bucket in buckets:
                self._target[size, bucket] = table(cost.target_seconds(size, bucket + 1, self._contexts))
            self._draft[size] = table(cost.draft_seconds(size, drafts, self._contexts[None], 0), MAX_DRAFTS + 1)
            behind = table(cost.draft_seconds(size, 1, self._contexts, CATCH_UP_CHUNK))
            self._catch_up[size] = behind - self._draft[size][1]

    def seconds(self, size: int, bucket: int, num_drafts: int, context: float, num_behind: int) -> float:
        """Returns the seconds of one step.

        Args:
            size: rows of the batch.
            bucket: draft-length bucket.
            num_drafts: largest number of drafts of a row.
            context: mean number of committed tokens of the running rows.
            num_behind: largest number of tokens that the drafter of a row reads first.
        """
        place = context / self._contexts[1]
        low = min(int(place), NUM_CONTEXTS - 2)
        weights = np.array([1 - place + low, place - low])
        costs = self._target[size, bucket][low : low + 2]
        if num_drafts:
            num_chunks = -(-num_behind // CATCH_UP_CHUNK)
            costs = (
                costs + self._draft[size][num_drafts, low : low + 2] + num_chunks * self._catch_up[size][low : low + 2]
            )
        return float(weights @ costs)
