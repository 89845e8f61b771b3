"""One small file per model family: its configuration and its name map."""

from bass_jax.models.families import llama
from bass_jax.models.families.base import Family, Rule

FAMILIES: dict[str, Family] = {"llama": llama.FAMILY}
"""By the ``model_type`` of a Hugging Face configuration."""

__all__ = ["FAMILIES", "Family", "Rule"]
