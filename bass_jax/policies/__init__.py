"""Policies: how many tokens to draft in the next step, given the results of the previous ones.

Imports `bass_jax.cost_model` and lower packages. Start with `protocol.py`, then `bass_heuristic.py`, the policy of
BASS. To write your own policy, copy `template.py`.
"""

from bass_jax.policies.auto import auto
from bass_jax.policies.bandit import Bandit as bandit  # noqa: N813
from bass_jax.policies.bass_heuristic import BassHeuristic as bass_heuristic  # noqa: N813
from bass_jax.policies.batch_table import batch_table
from bass_jax.policies.confidence import Confidence as confidence  # noqa: N813
from bass_jax.policies.fixed import Fixed as fixed  # noqa: N813
from bass_jax.policies.oracle import Oracle as oracle  # noqa: N813
from bass_jax.policies.protocol import (
    Plan,
    Policy,
    PolicyStats,
    find_policy,
    register_policy,
    registered_policies,
)

__all__ = [
    "Plan",
    "Policy",
    "PolicyStats",
    "auto",
    "bandit",
    "bass_heuristic",
    "batch_table",
    "confidence",
    "find_policy",
    "fixed",
    "oracle",
    "register_policy",
    "registered_policies",
]
