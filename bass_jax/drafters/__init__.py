"""Drafters: what proposes the tokens that the target verifies.

Imports `bass_jax.acceptance` and lower packages. Start with `protocols.py`, then `draft_model.py`. To write your own
drafter, copy `template.py`.
"""

from bass_jax.drafters.draft_model import ModelDrafter
from bass_jax.drafters.eagle.dflash import DFlashDrafter
from bass_jax.drafters.eagle.drafter import EagleDrafter
from bass_jax.drafters.eagle.eagle3 import Eagle3Drafter
from bass_jax.drafters.eagle.p_eagle import PEagleDrafter
from bass_jax.drafters.early_exit import EarlyExitDrafter, EarlyExitModel, early_exit_drafter, early_exit_model
from bass_jax.drafters.ensemble import EnsembleDrafter
from bass_jax.drafters.forced_tokens import ForcedTokensDrafter
from bass_jax.drafters.network_drafter import network_drafter
from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.other_vocabulary import OtherVocabularyDrafter, VocabularyMatch, other_vocabulary_drafter
from bass_jax.drafters.protocols import (
    ChunkedDrafter,
    DraftContext,
    Drafter,
    FinishedTextDrafter,
    HiddenStateDrafter,
    MultiDraftDrafter,
    Proposal,
    TargetCacheDrafter,
    borrows_cache,
    hidden_layers_of,
    keeps_finished_text,
    reads_hidden_states,
)
from bass_jax.drafters.registry import find_drafter, register_drafter, registered_drafters
from bass_jax.drafters.retrieval import RetrievalDrafter
from bass_jax.drafters.suffix import SuffixDrafter, suffix_drafter

__all__ = [
    "ChunkedDrafter",
    "DFlashDrafter",
    "DraftContext",
    "Drafter",
    "Eagle3Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "EarlyExitModel",
    "EnsembleDrafter",
    "FinishedTextDrafter",
    "ForcedTokensDrafter",
    "HiddenStateDrafter",
    "ModelDrafter",
    "MultiDraftDrafter",
    "NgramDrafter",
    "OtherVocabularyDrafter",
    "PEagleDrafter",
    "Proposal",
    "RetrievalDrafter",
    "SuffixDrafter",
    "TargetCacheDrafter",
    "VocabularyMatch",
    "borrows_cache",
    "early_exit_drafter",
    "early_exit_model",
    "find_drafter",
    "hidden_layers_of",
    "keeps_finished_text",
    "network_drafter",
    "other_vocabulary_drafter",
    "reads_hidden_states",
    "register_drafter",
    "registered_drafters",
    "suffix_drafter",
]
