"""Attention of a few new tokens per row over a KV cache with one length per row."""
