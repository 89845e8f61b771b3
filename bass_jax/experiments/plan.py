"""What a run decodes, batch by batch, in an order that shares a machine's moods among the ways that are compared."""

from collections.abc import Sequence
from typing import NamedTuple

from bass_jax.experiments.experiment_config import ExperimentConfig, Variant


class Row(NamedTuple):
    """One answer to draw."""

    problem: int  # index
    sample: int


class Batch(NamedTuple):
    """Rows that are decoded together.

    Batches of one group answer the same problems and share a clock: they run one after another.
    """

    variant: Variant
    seed: int
    repeat: int
    group: int  # index of its first problem
    part: int  # of the group's batches, this one
    rows: tuple[Row, ...]

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """What it is called in a run directory."""
        return (self.variant.label, self.seed, self.repeat, self.group, self.part)


def make_plan(config: ExperimentConfig, num_problems: int) -> list[Batch]:
    """Lists all batches of a run: per seed and repeat, problem after problem, all ways in turn."""
    batches = [
        batch
        for seed in config.seeds
        for repeat in range(config.repeats)
        for variant in config.variants()
        for batch in _batches(variant, seed, repeat, num_problems)
    ]
    order = {variant.label: index for index, variant in enumerate(config.variants())}
    seeds = {seed: index for index, seed in enumerate(config.seeds)}
    return sorted(
        batches, key=lambda one: (seeds[one.seed], one.repeat, one.group, order[one.variant.label], one.part)
    )  # fmt: skip


def share_of(plan: Sequence[Batch], process: int, num_processes: int) -> list[Batch]:
    """Returns what one of several processes decodes: whole groups, dealt out in turn."""
    groups = list(dict.fromkeys(batch.key[:4] for batch in plan))
    mine = set(groups[process::num_processes])
    return [batch for batch in plan if batch.key[:4] in mine]


def row_seed(seed: int, row: Row) -> int:
    """Returns the seed of a row's noise: its own whatever the way, the batch or the number of problems."""
    return (seed * 1_000_003 + row.problem * 1_009 + row.sample) % 2**32


def _batches(variant: Variant, seed: int, repeat: int, num_problems: int) -> list[Batch]:
    per_group = max(1, variant.batch // variant.num_samples)
    found = []
    for first in range(0, num_problems, per_group):
        problems = range(first, min(first + per_group, num_problems))
        rows = [Row(problem, sample) for problem in problems for sample in range(variant.num_samples)]
        for part, start in enumerate(range(0, len(rows), variant.batch)):
            found.append(Batch(variant, seed, repeat, first, part, tuple(rows[start : start + variant.batch])))
    return found
