"""Drafters: what proposes the tokens that the target verifies.

Imports `bass_jax.acceptance` and lower packages. Start with `protocols.py`, then `draft_model.py`; `template.py` is the
file to copy for a drafter of your own.
"""

from bass_jax.drafters.draft_model import ModelDrafter
from bass_jax.drafters.ensemble import EnsembleDrafter
from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.protocols import DraftContext, Drafter, Proposal, reads_hidden_states
from bass_jax.drafters.retrieval import RetrievalDrafter

__all__ = [
    "DraftContext",
    "Drafter",
    "EnsembleDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Proposal",
    "RetrievalDrafter",
    "reads_hidden_states",
]
