"""Random keys, sampling parameters, logits processors, and the distribution that tokens are sampled from.

Imports `bass_jax.runtime` and lower packages. Start with `distribution.py`: one function turns logits into the
distribution that is sampled from and that enters the acceptance ratio, for both the target and the draft model.
"""

from bass_jax.sampling.distribution import TokenDistribution, sample_tokens, token_distribution
from bass_jax.sampling.grammar import Grammar
from bass_jax.sampling.logits_processors import LogitsProcessors, find_processors
from bass_jax.sampling.params import SamplingArrays, SamplingParams

__all__ = [
    "Grammar",
    "LogitsProcessors",
    "SamplingArrays",
    "SamplingParams",
    "TokenDistribution",
    "find_processors",
    "sample_tokens",
    "token_distribution",
]
