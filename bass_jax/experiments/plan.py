"""The batches of a run, in an order in which the compared methods take turns."""

from collections.abc import Sequence
from typing import NamedTuple

from bass_jax.experiments.experiment_config import ExperimentConfig, Variant


class Row(NamedTuple):
    """One answer to decode."""

    problem: int  # index
    sample: int


class PlannedBatch(NamedTuple):
    """Rows that are decoded together.

    The batches of a group answer the same problems, run one after another, and share a clock.
    """

    variant: Variant
    seed: int
    repeat: int
    group: int  # index of its first problem
    part: int  # index of the batch in its group
    rows: tuple[Row, ...]

    @property
    def group_key(self) -> tuple[str, int, int, int]:
        """Identifies the group in a run directory."""
        return (self.variant.label, self.seed, self.repeat, self.group)

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """Identifies the batch in a run directory."""
        return (*self.group_key, self.part)


def make_plan(config: ExperimentConfig, num_problems: int) -> list[PlannedBatch]:
    """Lists all batches of a run.

    Per seed and repeat, the variants take turns problem by problem, so that changes of the machine's speed affect all
    of them.
    """
    plan = []
    for seed in config.seeds:
        for repeat in range(config.repeats):
            batches = [one for variant in config.variants() for one in _batches(variant, seed, repeat, num_problems)]
            plan += sorted(batches, key=lambda batch: batch.group)  # stable: the order of the variants is kept
    return plan


def share_of(plan: Sequence[PlannedBatch], process: int, num_processes: int) -> list[PlannedBatch]:
    """Returns the batches that one of several processes decodes: every `num_processes`-th group."""
    groups = list(dict.fromkeys(batch.group_key for batch in plan))
    own = set(groups[process::num_processes])
    return [batch for batch in plan if batch.group_key in own]


def row_seed(seed: int, row: Row) -> int:
    """Returns the seed of a row's random key, which depends on neither the method, the batch nor the other problems."""
    return (seed * 1_000_003 + row.problem * 1_009 + row.sample) % 2**32


def _batches(variant: Variant, seed: int, repeat: int, num_problems: int) -> list[PlannedBatch]:
    per_group = max(1, variant.batch // variant.num_samples)
    found = []
    for first in range(0, num_problems, per_group):
        problems = range(first, min(first + per_group, num_problems))
        rows = [Row(problem, sample) for problem in problems for sample in range(variant.num_samples)]
        for part, start in enumerate(range(0, len(rows), variant.batch)):
            batch_rows = tuple(rows[start : start + variant.batch])
            found.append(PlannedBatch(variant, seed, repeat, first, part, batch_rows))
    return found
