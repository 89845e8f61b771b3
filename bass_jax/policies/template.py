"""A policy to copy: per row, one draft more than were accepted last time.

Name yours in a config as ``"my_module:MyPolicy"``, or call `register_policy`; the protocol tests run over every
registered policy, and over this one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.policies.protocol import Plan, PolicyStats
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneMore:
    """Its state is the last plan. Rows that did not draft keep their length.

    Attributes:
        max_len: most drafts per row.
    """

    max_len: int = dataclasses.field(default=8, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every length from 1 on."""
        return tuple(range(1, self.max_len + 1))

    def init(self, num_rows: int) -> Array:
        """Starts with one draft."""
        return jnp.ones(num_rows, jnp.int32)

    def update(self, state: Array, stats: PolicyStats) -> tuple[Array, Plan]:
        """Follows each row's last count."""
        state = jnp.where(stats.num_drafted > 0, jnp.minimum(stats.num_accepted + 1, self.max_len), state)
        return state, Plan(state)
