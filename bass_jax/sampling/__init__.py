"""Keys, laws and acceptance rules."""

from bass_jax.sampling.adjuster import Adjuster, find_processors
from bass_jax.sampling.block import BLOCK
from bass_jax.sampling.controls import Sampling, SamplingControls
from bass_jax.sampling.greedy import GREEDY
from bass_jax.sampling.law import Law, draw, make_law
from bass_jax.sampling.lossy import THRESHOLD, TYPICAL, threshold, typical
from bass_jax.sampling.multi_draft import MULTI_DRAFT
from bass_jax.sampling.rules import (
    AcceptanceRule,
    ChainVerdict,
    RuleKeys,
    Verdict,
    find_rule,
    register_rule,
    registered_rules,
)
from bass_jax.sampling.shared_noise import SHARED_NOISE
from bass_jax.sampling.synthetic import synthetic
from bass_jax.sampling.token import TOKEN

__all__ = [
    "BLOCK",
    "GREEDY",
    "MULTI_DRAFT",
    "SHARED_NOISE",
    "THRESHOLD",
    "TOKEN",
    "TYPICAL",
    "AcceptanceRule",
    "Adjuster",
    "ChainVerdict",
    "Law",
    "RuleKeys",
    "Sampling",
    "SamplingControls",
    "Verdict",
    "draw",
    "find_processors",
    "find_rule",
    "make_law",
    "register_rule",
    "registered_rules",
    "synthetic",
    "threshold",
    "typical",
]
