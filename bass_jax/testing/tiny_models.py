"""Tiny random models for tests, with distributions that depend on the whole prefix."""

import flax.linen as nn
import jax
import numpy as np

from bass_jax.models import Model, abstract_params
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig


def tiny_target(vocab_size: int = 5, seed: int = 1) -> Model:
    """Returns a random decoder with one layer. Its distributions are uneven and depend on the whole prefix."""
    config = ModelConfig(vocab_size, 8, 64, (LayerConfig(AttentionConfig(1, 1, 8), DenseMLP(16)),))
    random = np.random.default_rng(seed)

    def fill(leaf):
        # With large weights, attention and MLP change the logits as much as the last token does.
        size = np.ones(leaf.shape) if leaf.ndim == 1 else 0.4 * random.normal(size=leaf.shape)
        return jax.device_put(size.astype(leaf.dtype))  # `jnp.asarray` compiles a function per shape

    return Model(jax.tree.map(fill, nn.meta.unbox(abstract_params(config))), config)
