"""What one pass of a model computes and reads, from its configuration alone."""

from typing import NamedTuple

import jax.numpy as jnp

from bass_jax.models.model_config import ModelConfig


class PassShape(NamedTuple):
    """Of one model; attention counts every query of a pass against the whole context."""

    weight_bytes: float  # read once per pass
    cache_bytes: float  # read and held per committed token and row
    flops: float  # per position, without attention over the context
    attention_flops: float  # per position and committed token
    num_layers: float


def pass_shape(config: ModelConfig) -> PassShape:
    """Counts the products of `config`: two FLOPs per weight and position.

    Norms, biases, activations and the scales of INT8 weights are left out, as is the embedding's row. A trimmed head
    counts what it scores.
    """
    width, size = config.width, jnp.dtype(config.dtype).itemsize
    attentions, mlps = [layer.attention for layer in config.layers], [layer.mlp for layer in config.layers]
    query = sum(attention.num_heads * attention.head_dim for attention in attentions)
    key_value = sum(attention.num_kv_heads * attention.head_dim for attention in attentions)
    attention = width * (query + 2 * key_value) + query * width
    mlp = width * sum((3 if mlp.is_gated else 2) * mlp.width for mlp in mlps)
    embedding = config.embedding_width or width
    head_width = embedding if config.has_output_projection else width
    head = head_width * (config.output_vocab_size or config.vocab_size)
    projections = 0 if embedding == width else embedding * width * (2 if config.has_output_projection else 1)
    projections += 2 * (config.hidden_width or 0) * width
    quantized = attention + mlp + head
    weights = quantized + projections
    # An INT8 cache has a float32 scale per token and head beside it.
    num_kv_heads = sum(attention.num_kv_heads for attention in attentions)
    row_bytes = key_value * size if config.cache_dtype is None else key_value + 4 * num_kv_heads
    return PassShape(
        weight_bytes=float(quantized * (size if config.quantize is None else 1) + projections * size),
        cache_bytes=float(2 * row_bytes),
        flops=float(2 * weights),
        attention_flops=float(4 * query),
        num_layers=float(config.num_layers),
    )
