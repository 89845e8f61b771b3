"""A table from batch size to draft length, made before serving."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax

from bass_jax.config import BATCH_BUCKETS
from bass_jax.costmodel import CostModel, Profile, expected_emitted, read_profile, step_seconds
from bass_jax.policies.base import Plan, PolicyStats, all_rows, register_policy
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
    lengths: tuple[int, ...] = LENGTHS,
) -> BatchTable:
    """Makes the policy from a table, or from a profile: per batch size the length of most tokens per second.

    Args:
        table: batch size → draft length.
        profile: of the pair on this device, or its file; used if there is no table.
        lengths: to choose from.

    Raises:
        ValueError: if there is neither, or the table is empty.
    """
    if table is None:
        if profile is None:
            raise ValueError("batch_table: expected a table or a profile; bass-jax profile writes one")
        profile = profile if isinstance(profile, Profile) else read_profile(profile)
        rates = jax.numpy.asarray(profile.rates)
        context = float(profile.table.contexts[0])
        table = {
            batch: best_draft_len(profile.table, rates, batch, context, lengths)
            for batch in BATCH_BUCKETS if batch <= float(profile.table.batches[-1])
        }  # fmt: skip
    if not table:
        raise ValueError("table is empty: expected at least one batch size")
    return BatchTable(tuple(sorted((int(batch), int(draft_len)) for batch, draft_len in table.items())))


def best_draft_len(
    cost: CostModel, rates: Array, num_rows: int, context: float | int, lengths: tuple[int, ...] = LENGTHS
) -> int:
    """Returns the one of `lengths` that gives most tokens per second in the long run."""
    candidates = jax.numpy.asarray(lengths)
    rate = expected_emitted(rates, candidates) / step_seconds(cost, num_rows, candidates, context)
    return int(candidates[rate.argmax()])


register_policy("batch_table", batch_table)
