"""A policy to copy: each row drafts one token more than it accepted in its last step.

Name your policy in a configuration as ``"my_module:MyPolicy"``, or register it with `register_policy`. The protocol
tests run over every registered policy and over this one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.policies.protocol import Plan, PolicyStats
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneMore:
    """Plans one draft more than were accepted. Rows that did not draft keep their length.

    The state is the last plan, ``[B]`` int32.

    Attributes:
        max_len: largest number of drafts per row.
    """

    max_len: int = dataclasses.field(default=8, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths from 1 to the largest."""
        return tuple(range(1, self.max_len + 1))

    def init(self, num_rows: int) -> Array:
        """Returns one draft for every row."""
        return jnp.ones(num_rows, jnp.int32)

    def update(self, state: Array, stats: PolicyStats) -> tuple[Array, Plan]:
        """Plans by each row's number of accepted drafts."""
        state = jnp.where(stats.num_drafted > 0, jnp.minimum(stats.num_accepted + 1, self.max_len), state)
        return state, Plan(state)
