"""The same draft length in every step."""

import dataclasses

import jax

from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.runtime.checks import check_integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """Plans the same length for every step and row.

    Attributes:
        draft_len: the length; 0 is regular decoding.
    """

    draft_len: int = dataclasses.field(default=4, metadata={"static": True})

    def __post_init__(self):
        object.__setattr__(self, "draft_len", check_integer("draft_len", self.draft_len, 0, DRAFT_LEN_BUCKETS[-1]))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft length."""
        return (self.draft_len,)

    def init(self, num_rows: int) -> None:
        """Returns None: the policy has no state."""
        del num_rows

    def update(self, state: None, stats: PolicyStats) -> tuple[None, Plan]:
        """Plans the draft length."""
        return state, all_rows(stats, self.draft_len)


register_policy("fixed", Fixed)
