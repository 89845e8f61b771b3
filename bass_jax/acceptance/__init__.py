"""Acceptance rules: which drafts are accepted, and which token follows them.

Imports `bass_jax.sampling` and lower packages. Start with `base.py`, the interface of a rule, then `token.py`, the rule
of Leviathan et al. To write your own rule, copy `template.py`.
"""

from bass_jax.acceptance.base import (
    AcceptanceResult,
    AcceptanceRule,
    MultiDraftAcceptanceResult,
    RuleKeys,
    find_rule,
    register_rule,
    registered_rules,
)
from bass_jax.acceptance.block import BLOCK
from bass_jax.acceptance.greedy import GREEDY
from bass_jax.acceptance.lossy import THRESHOLD, TYPICAL, threshold, typical
from bass_jax.acceptance.multi_draft import MULTI_DRAFT
from bass_jax.acceptance.shared_noise import SHARED_NOISE
from bass_jax.acceptance.synthetic import synthetic
from bass_jax.acceptance.token import TOKEN

__all__ = [
    "BLOCK",
    "GREEDY",
    "MULTI_DRAFT",
    "SHARED_NOISE",
    "THRESHOLD",
    "TOKEN",
    "TYPICAL",
    "AcceptanceResult",
    "AcceptanceRule",
    "MultiDraftAcceptanceResult",
    "RuleKeys",
    "find_rule",
    "register_rule",
    "registered_rules",
    "synthetic",
    "threshold",
    "typical",
]
