"""How long to draft: one small pure function per idea, the same in the decoder, on the device and in the simulator."""

from bass_jax.policies.base import (
    Plan,
    Policy,
    PolicyStats,
    find_policy,
    register_policy,
    registered_policies,
)
from bass_jax.policies.constant import Fixed as fixed  # noqa: N813
from bass_jax.policies.heuristic import BassHeuristic as bass_heuristic  # noqa: N813

__all__ = [
    "Plan",
    "Policy",
    "PolicyStats",
    "bass_heuristic",
    "find_policy",
    "fixed",
    "register_policy",
    "registered_policies",
]
