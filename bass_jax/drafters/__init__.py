"""Whatever proposes tokens."""

from bass_jax.drafters.base import DraftContext, Drafter, Proposal, reads_features
from bass_jax.drafters.combined import CombinedDrafter
from bass_jax.drafters.model import ModelDrafter
from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.store import StoreDrafter

__all__ = [
    "CombinedDrafter",
    "DraftContext",
    "Drafter",
    "ModelDrafter",
    "NgramDrafter",
    "Proposal",
    "StoreDrafter",
    "reads_features",
]
