"""The adaptive draft length of BASS."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.typing import Array


class HeuristicState(NamedTuple):
    """The variables l and s of the paper."""

    draft_len: Array  # [] int32
    has_shrunk: Array  # [] int32, 1 if the last step shrank the length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BassHeuristic:
    """One draft length for the batch. It grows when some row accepts all drafts, and shrinks otherwise.

    Let l be the length and x the accepted drafts of a row. If ``max(x) == l``, l grows by `growth`, up to `limit`.
    Otherwise l becomes ``l - ceil(l / divisor) - s``, but at least 1 and at least ``max(x)``; s is 1 if the previous
    step shrank l too. Finished rows are ignored. A row whose token limit allows fewer than l drafts counts with the
    drafts that it accepted.

    The policy uses no costs, so it never turns speculation off.

    Attributes:
        start: l0 of the paper.
        growth: l_incre.
        divisor: l_mod.
        limit: l_limit.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), algorithm 1.
    """

    start: int = dataclasses.field(default=7, metadata={"static": True})
    growth: int = dataclasses.field(default=2, metadata={"static": True})
    divisor: int = dataclasses.field(default=10, metadata={"static": True})
    limit: int = dataclasses.field(default=32, metadata={"static": True})

    def __post_init__(self):
        if not 1 <= self.start <= self.limit <= 32:
            raise ValueError(f"start={self.start}, limit={self.limit}: expected 1 <= start <= limit <= 32")
        if self.growth < 1 or self.divisor < 1:
            raise ValueError(f"growth={self.growth}, divisor={self.divisor}: expected at least 1")

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths from 1 to the limit."""
        return tuple(range(1, self.limit + 1))

    def init(self, num_rows: int) -> HeuristicState:
        """Returns the state with l = l0."""
        del num_rows
        return HeuristicState(jnp.int32(self.start), jnp.int32(0))

    def update(self, state: HeuristicState, stats: PolicyStats) -> tuple[HeuristicState, Plan]:
        """Applies one round of the algorithm, if any row was active."""
        draft_len, has_shrunk = state
        most = jnp.where(stats.is_active, stats.num_accepted, 0).max()
        grown = jnp.minimum(draft_len + self.growth, self.limit)
        shrunk = draft_len - -(-draft_len // self.divisor) - has_shrunk
        shrunk = jnp.maximum(jnp.maximum(shrunk, most), 1)
        is_full = most >= draft_len
        is_round = stats.is_active.any()
        draft_len = jnp.where(is_round, jnp.where(is_full, grown, shrunk), draft_len).astype(jnp.int32)
        has_shrunk = jnp.where(is_round, jnp.where(is_full, 0, 1), has_shrunk).astype(jnp.int32)
        return HeuristicState(draft_len, has_shrunk), all_rows(stats, draft_len)


register_policy("bass_heuristic", BassHeuristic)
