"""How long to draft: one small pure function per idea, the same in the decoder, on the device and in the simulator."""

from bass_jax.policies.base import (
    Plan,
    Policy,
    PolicyStats,
    find_policy,
    register_policy,
    registered_policies,
)
from bass_jax.policies.by_batch import batch_table
from bass_jax.policies.by_confidence import Confidence as confidence  # noqa: N813
from bass_jax.policies.by_goodput import goodput
from bass_jax.policies.by_hindsight import Oracle as oracle  # noqa: N813
from bass_jax.policies.by_reward import Bandit as bandit  # noqa: N813
from bass_jax.policies.constant import Fixed as fixed  # noqa: N813
from bass_jax.policies.heuristic import BassHeuristic as bass_heuristic  # noqa: N813

__all__ = [
    "Plan",
    "Policy",
    "PolicyStats",
    "bandit",
    "bass_heuristic",
    "batch_table",
    "confidence",
    "find_policy",
    "fixed",
    "goodput",
    "oracle",
    "register_policy",
    "registered_policies",
]
