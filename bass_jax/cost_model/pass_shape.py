"""The bytes and FLOPs of one pass of a model, computed from its configuration."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from bass_jax.drafters import Drafter, Eagle3Drafter, EagleDrafter, ModelDrafter, OtherVocabularyDrafter
from bass_jax.drafters.eagle.mtp import MTPConfig
from bass_jax.models.flax_model import Model
from bass_jax.models.model_config import ModelConfig, MoEConfig


class PassShape(NamedTuple):
    """The work of a model's pass. Each query is counted as attending to the whole context."""

    weight_bytes: float = 0.0  # read once per pass, without experts
    cache_bytes: float = 0.0  # read and stored per committed token and row
    flops: float = 0.0  # per position, without attention over the context
    attention_flops: float = 0.0  # per position and committed token
    num_layers: float = 0.0
    expert_bytes: float = 0.0  # of all experts of all layers
    expert_share: float = 0.0  # of the experts of a layer that one token uses
    state_bytes: float = 0.0  # of recurrent layers, read and written in a pass per row

    def read_bytes(self, num_tokens: Any) -> Any:
        """Returns the expected bytes of weights that a pass over a number of tokens reads.

        Every expert that some token chose is read once, as grouped kernels do. The expectation is that of tokens that
        choose their experts independently, each expert with the same probability: n tokens that choose a share s each
        read a share ``1 - (1 - s)^n``. Routers of trained models choose unevenly, and tokens of one text choose similar
        experts, so a pass of a trained model reads fewer experts than this.
        """
        return self.weight_bytes + self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** num_tokens)


def pass_shape(config: ModelConfig) -> PassShape:
    """Counts the matrix products of `config`: two FLOPs per weight and position, of experts those of one token.

    A recurrent layer reads its state for the keys and for the queries and updates it, with six FLOPs per element and
    position.

    Norms, biases, activations, the scales of INT8 weights and the embedding lookup are not counted. An output
    projection with a reduced vocabulary counts the tokens that it scores.

    Raises:
        ValueError: if layers differ in the share of their experts that a token uses.
    """
    width, size = config.width, jnp.dtype(config.dtype).itemsize
    attentions, mlps = config.attentions, [layer.mlp for layer in config.layers]
    query = sum(attention.num_heads * attention.head_dim for attention in attentions)
    key_value = sum(num_heads * (key_dim + value_dim) for num_heads, key_dim, value_dim in config.cache_shapes)
    mixers = sum(layer.mixer.num_weights(width) for layer in config.layers)
    states = sum(one.num_value_heads * one.key_dim * one.value_dim for one in config.recurrences)
    moes = [mlp for mlp in mlps if isinstance(mlp, MoEConfig)]
    shares = {moe.num_active / moe.num_experts for moe in moes}
    if len(shares) > 1:
        raise ValueError(f"config: expected the same share of active experts in all layers, not {sorted(shares)}")
    share = shares.pop() if shares else 0.0
    experts = width * sum(3 * moe.num_experts * moe.width for moe in moes)
    routers = width * sum(moe.num_experts + moe.has_shared_gate for moe in moes)
    dense = [mlp.shared if isinstance(mlp, MoEConfig) else mlp for mlp in mlps]
    mlp = width * sum((3 if mlp.is_gated else 2) * mlp.width for mlp in dense if mlp is not None)
    embedding = config.embedding_width or width
    head_width = embedding if config.has_output_projection else width
    head = head_width * (config.output_vocab_size or config.vocab_size)
    projections = 0 if embedding == width else embedding * width * (2 if config.has_output_projection else 1)
    projections += 2 * (config.hidden_width or 0) * width + routers
    quantized = mixers + mlp + head
    stored_size = size if config.quantize is None else 1
    # An INT8 cache also holds one float32 scale per token and head.
    num_kv_heads = sum(attention.num_kv_heads for attention in attentions)
    row_bytes = key_value * size if config.cache_dtype is None else key_value + 8 * num_kv_heads
    return PassShape(
        weight_bytes=float(quantized * stored_size + projections * size),
        cache_bytes=float(row_bytes),
        flops=float(2 * (quantized + projections + experts * share) + 6 * states),
        attention_flops=float(4 * query),
        num_layers=float(config.num_layers),
        expert_bytes=float(experts * stored_size),
        expert_share=share,
        state_bytes=float(2 * 4 * states),
    )


def draft_pass_shape(drafter: Drafter) -> PassShape | None:
    """Returns the work of a pass of the draft model, or None for a drafter without a pass per draft of a model of ours.

    A `bass_jax.drafters.DFlashDrafter` has one pass per step, which a profile measures.
    """
    if isinstance(drafter, ModelDrafter | EagleDrafter) and isinstance(drafter.model, Model):
        return pass_shape(drafter.model.config)
    if isinstance(drafter, OtherVocabularyDrafter) and isinstance(drafter.model.model, Model):
        return pass_shape(drafter.model.model.config)
    if not isinstance(drafter, Eagle3Drafter):
        return None
    config, head = drafter.model.config, drafter.model.head
    shape = pass_shape(dataclasses.replace(config, hidden_width=None))
    attention = config.layers[0].attention
    if isinstance(head, MTPConfig):  # The embedding and the hidden state are projected to the width.
        num_weights = config.width * 2 * config.width
    else:
        # The first layer's attention reads twice the width, and the joined hidden states are projected.
        num_queries_and_keys = attention.num_heads + 2 * attention.num_kv_heads
        joined = len(head.hidden_layers) * head.target_width
        num_weights = config.width * (num_queries_and_keys * attention.head_dim + joined)
    return shape._replace(
        weight_bytes=shape.weight_bytes + num_weights * jnp.dtype(config.dtype).itemsize,
        flops=shape.flops + 2.0 * num_weights,
    )
