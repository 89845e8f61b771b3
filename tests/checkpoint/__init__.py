"""Checkpoints, tokenizers, pairs."""
