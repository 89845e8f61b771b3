"""Whatever proposes tokens."""

from bass_jax.drafters.base import DraftContext, Drafter, Proposal
from bass_jax.drafters.model import ModelDrafter
from bass_jax.drafters.ngram import NgramDrafter

__all__ = ["DraftContext", "Drafter", "ModelDrafter", "NgramDrafter", "Proposal"]
