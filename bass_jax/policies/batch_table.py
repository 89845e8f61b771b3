"""A table from batch size to draft length, made before serving."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from bass_jax.config import BATCH_BUCKETS
from bass_jax.cost_model import CostModel, Profile, expected_emitted, read_profile, step_seconds
from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.typing import Array

LENGTHS = (0, 1, 2, 3, 4, 6, 8)
"""Draft lengths that a table is made of, unless told otherwise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchTable:
    """Looks the batch's bucket up: every row of it is computed, finished or not.

    Attributes:
        table: pairs of batch size and draft length, ascending; a batch takes the entry of the largest size that it
            reaches, the first if it reaches none.

    Source: Su et al. 2023 (arXiv 2310.18813), section 5: the adaptive scheme.
    """

    table: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those of the table."""
        return tuple(sorted({draft_len for _, draft_len in self.table}))

    def init(self, num_rows: int) -> None:
        """Nothing to keep."""
        del num_rows

    def update(self, state: None, stats: PolicyStats) -> tuple[None, Plan]:
        """Plans the batch's entry."""
        num_rows = stats.lengths.shape[0]
        reached = [draft_len for batch, draft_len in self.table if batch <= num_rows]
        return state, all_rows(stats, reached[-1] if reached else self.table[0][1])


def batch_table(
    table: Mapping[int, int] | None = None,
    *,
    profile: Profile | str | Path | None = None,
    cost: CostModel | None = None,
    rates: Sequence[float] | None = None,
    context: float | int = 200.0,
    lengths: tuple[int, ...] = LENGTHS,
) -> BatchTable:
    """Makes the policy from a table, or from costs: per batch size the length of most tokens per second.

    Args:
        table: batch size → draft length.
        profile: of the pair on this device, or its file; used if there is no table.
        cost: with `rates`, in place of a profile.
        rates: acceptance by position.
        context: committed tokens per row that the table is made for.
        lengths: to choose from.

    Raises:
        ValueError: if there is none of them, or the table is empty.
    """
    if table is None:
        cost, rates = cost_and_rates("batch_table", profile, cost, rates)
        table = {
            batch: best_draft_len(cost, jax.numpy.asarray(rates), batch, context, lengths) for batch in BATCH_BUCKETS
        }
    if not table:
        raise ValueError("table is empty: expected at least one batch size")
    return BatchTable(tuple(sorted((int(batch), int(draft_len)) for batch, draft_len in table.items())))


def cost_and_rates(
    name: str, profile: Profile | str | Path | None, cost: CostModel | None, rates: Sequence[float] | None
) -> tuple[CostModel, Sequence[float]]:
    """Takes costs and acceptance by position from `profile`, or as they are given.

    Raises:
        ValueError: if policy `name` has neither.
    """
    if profile is None:
        if cost is None or rates is None or len(rates) == 0:
            raise ValueError(f"policy={name!r}: expected a profile, or cost and rates; bass-jax profile writes one")
        return cost, rates
    profile = profile if isinstance(profile, Profile) else read_profile(profile)
    return profile.table, profile.rates


def best_draft_len(
    cost: CostModel, rates: Array, num_rows: int, context: float | int, lengths: tuple[int, ...] = LENGTHS
) -> int:
    """Returns the one of `lengths` that gives most tokens per second in the long run."""
    candidates = jax.numpy.asarray(lengths)
    rate = expected_emitted(rates, candidates) / step_seconds(cost, num_rows, candidates, context)
    return int(candidates[rate.argmax()])


register_policy("batch_table", batch_table)
