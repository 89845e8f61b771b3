"""A table from batch size to draft length, computed before decoding."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from bass_jax.config import BATCH_BUCKETS
from bass_jax.cost_model import CostModel, Profile, expected_emitted, read_profile, step_seconds
from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.typing import Array

LENGTHS = (0, 1, 2, 3, 4, 6, 8)
"""The default draft lengths to choose from."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchTable:
    """Looks up the draft length for the batch size. Finished rows count, because they are computed too.

    Attributes:
        table: pairs of batch size and draft length, ascending. A batch uses the entry of the largest size that is at
            most its own, or the first entry.

    Source: Su et al. 2023 (arXiv 2310.18813), section 5: the adaptive scheme.
    """

    table: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths in the table."""
        return tuple(sorted({draft_len for _, draft_len in self.table}))

    def init(self, num_rows: int) -> None:
        """Returns None: the policy has no state."""
        del num_rows

    def update(self, state: None, stats: PolicyStats) -> tuple[None, Plan]:
        """Plans the length in the table."""
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
    """Makes the policy from a table, or from costs as the length with most tokens per second at each batch size.

    Args:
        table: batch size → draft length.
        profile: a profile of the pair on this device, or its file; used if there is no table.
        cost: with `rates`, instead of a profile.
        rates: acceptance rate by position.
        context: committed tokens per row that the table is computed for.
        lengths: draft lengths to choose from.

    Raises:
        ValueError: if no table, profile or cost is given, or the table is empty.
    """
    if table is None:
        cost, rates = cost_and_rates("batch_table", profile, cost, rates)
        table = {
            batch: fastest_draft_len(cost, jax.numpy.asarray(rates), batch, context, lengths) for batch in BATCH_BUCKETS
        }
    if not table:
        raise ValueError("table is empty: expected at least one batch size")
    return BatchTable(tuple(sorted((int(batch), int(draft_len)) for batch, draft_len in table.items())))


def cost_and_rates(
    name: str, profile: Profile | str | Path | None, cost: CostModel | None, rates: Sequence[float] | None
) -> tuple[CostModel, Sequence[float]]:
    """Returns the costs and acceptance rates of `profile`, or without a profile `cost` and `rates`.

    Raises:
        ValueError: if neither is given to policy `name`.
    """
    if profile is None:
        if cost is None or rates is None or len(rates) == 0:
            raise ValueError(f"policy={name!r}: expected a profile, or cost and rates; bass-jax profile writes one")
        return cost, rates
    profile = profile if isinstance(profile, Profile) else read_profile(profile)
    return profile.table, profile.rates


def fastest_draft_len(
    cost: CostModel, rates: Array, num_rows: int, context: float | int, lengths: tuple[int, ...] = LENGTHS
) -> int:
    """Returns the one of `lengths` with the most expected tokens per second."""
    candidates = jax.numpy.asarray(lengths)
    rate = expected_emitted(rates, candidates) / step_seconds(cost, num_rows, candidates, context)
    return int(candidates[rate.argmax()])


register_policy("batch_table", batch_table)
