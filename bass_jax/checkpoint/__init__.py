"""Readers and writers of checkpoints: our own, Hugging Face, GGUF; tokenizers; directories that hold a pair.

Imports `bass_jax.drafters` and lower packages. Start with `load.py`, which recognizes a format, then `assemble.py`,
which turns stored tensors into our parameters.
"""

from bass_jax.checkpoint.convert import convert
from bass_jax.checkpoint.datastore_file import read_datastore, write_datastore
from bass_jax.checkpoint.detokenizer import IncrementalDecoder
from bass_jax.checkpoint.early_exit_adapter import is_early_exit, load_early_exit, save_early_exit
from bass_jax.checkpoint.inspect import Inspection, inspect_checkpoint, inspect_preset, why_not_a_pair
from bass_jax.checkpoint.load import load_model, load_tokenizer
from bass_jax.checkpoint.native_mtp import load_native_mtp
from bass_jax.checkpoint.other_vocabulary import load_other_vocabulary, match_vocabularies
from bass_jax.checkpoint.pair_directory import (
    OtherTokenizerError,
    checkpoints_of,
    datastore_of,
    is_pair,
    load_draft,
    load_target_and_draft,
)
from bass_jax.checkpoint.save import save_hugging_face, save_model
from bass_jax.checkpoint.speculators import is_speculator, load_speculator, save_speculator
from bass_jax.checkpoint.tokenizer import Tokenizer

__all__ = [
    "IncrementalDecoder",
    "Inspection",
    "OtherTokenizerError",
    "Tokenizer",
    "checkpoints_of",
    "convert",
    "datastore_of",
    "inspect_checkpoint",
    "inspect_preset",
    "is_early_exit",
    "is_pair",
    "is_speculator",
    "load_draft",
    "load_early_exit",
    "load_model",
    "load_native_mtp",
    "load_other_vocabulary",
    "load_speculator",
    "load_target_and_draft",
    "load_tokenizer",
    "match_vocabularies",
    "read_datastore",
    "save_early_exit",
    "save_hugging_face",
    "save_model",
    "save_speculator",
    "why_not_a_pair",
    "write_datastore",
]
