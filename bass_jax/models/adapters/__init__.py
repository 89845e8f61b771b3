"""Adapters: models of other libraries as a `bass_jax.models.TargetModel`, for targets and for draft models.

Imports the rest of `bass_jax.models`. Start with `function.py`, which the other adapters use. The results are frozen
pytrees: ``dataclasses.replace(model, params=new)`` swaps the parameters without a compilation.
"""

from bass_jax.models.adapters.flax_linen import from_flax_linen
from bass_jax.models.adapters.flax_nnx import from_flax_nnx
from bass_jax.models.adapters.function import FunctionModel, from_function
from bass_jax.models.adapters.tunix import from_tunix

__all__ = ["FunctionModel", "from_flax_linen", "from_flax_nnx", "from_function", "from_tunix"]
