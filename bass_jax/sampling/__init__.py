"""Keys, laws and acceptance rules."""

from bass_jax.sampling.controls import Sampling, SamplingControls
from bass_jax.sampling.greedy import GREEDY
from bass_jax.sampling.law import Law, draw, make_law
from bass_jax.sampling.rules import (
    AcceptanceRule,
    RuleKeys,
    Verdict,
    find_rule,
    register_rule,
    registered_rules,
)
from bass_jax.sampling.token import TOKEN

__all__ = [
    "GREEDY",
    "TOKEN",
    "AcceptanceRule",
    "Law",
    "RuleKeys",
    "Sampling",
    "SamplingControls",
    "Verdict",
    "draw",
    "find_rule",
    "make_law",
    "register_rule",
    "registered_rules",
]
