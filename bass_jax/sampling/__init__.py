"""Random keys, sampling parameters, logits processors, and the distribution that tokens are sampled from.

Imports `bass_jax.runtime` and lower packages. Start with `distribution.py`: one function turns logits into the
distribution that is sampled from and that enters the acceptance ratio, for the target and the draft model alike.
"""

from bass_jax.sampling.distribution import Law, draw, make_law
from bass_jax.sampling.logits_processors import Adjuster, find_processors
from bass_jax.sampling.params import Sampling, SamplingControls

__all__ = ["Adjuster", "Law", "Sampling", "SamplingControls", "draw", "find_processors", "make_law"]
