"""Drafters: what proposes the tokens that the target verifies.

Imports `bass_jax.acceptance` and lower packages. Start with `protocols.py`, then `draft_model.py`; `template.py` is the
file to copy for a drafter of your own.
"""

from bass_jax.drafters.draft_model import ModelDrafter
from bass_jax.drafters.ensemble import CombinedDrafter
from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.protocols import DraftContext, Drafter, Proposal, reads_features
from bass_jax.drafters.retrieval import StoreDrafter

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
