"""The attention part of a layer."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from bass_jax.cache import append
from bass_jax.config import ModelConfig
from bass_jax.models import rotary
from bass_jax.models.norm import apply_norm, declare_norm
from bass_jax.models.tensors import declare, zeros
from kernels_pallas import ops


class Attention(nn.Module):
    """Grouped-query attention over a row's own cached prefix.

    Attributes:
        config: of the model.
        window: positions that a query sees, itself included; None for all.
    """

    config: ModelConfig
    window: int | None = None

    @nn.compact
    def __call__(self, x, positions, angles, keys, values):
        """Returns the attention's output ``[B, T, D]`` and the layer's cache with the new tokens in it.

        `angles` is None for a model without rotary positions.
        """
        config = self.config
        K, R, H, D = config.num_kv_heads, config.queries_per_kv_head, config.head_dim, config.width
        qkv = declare(self, "qkv", (D, K, R + 2, H), ("embed", "kv_heads", None, None))
        projected = jnp.einsum("btd,dkrh->btkrh", x, qkv)
        if config.has_attention_bias:
            projected += declare(self, "qkv_bias", (K, R + 2, H), ("kv_heads", None, None), zeros)
        scored = projected[:, :, :, : R + 1]
        if config.has_qk_norm:
            query_norm, key_norm = (declare_norm(self, f"{name}_norm", H) for name in ("query", "key"))
            queries, new_keys = scored[:, :, :, :R], scored[:, :, :, R:]
            normed = apply_norm(config, queries, query_norm), apply_norm(config, new_keys, key_norm)
            scored = jnp.concatenate(normed, axis=3)
        if angles is not None:
            scored = rotary.rotate(scored, *angles)
        new_keys, new_values = scored[:, :, :, R], projected[:, :, :, R + 1]
        if keys is None:  # A whole sequence, of which nothing was read before.
            keys, values = new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2)
        else:
            keys, values = append(keys, new_keys, positions), append(values, new_values, positions)

        is_real = positions < keys.shape[2]
        num_queries = is_real.sum(axis=1, dtype=jnp.int32)
        lengths = jnp.where(num_queries > 0, positions[:, 0], 0)
        B, T = positions.shape
        kernel: dict[str, Any] = {"implementation": "xla"} if config.attention == "xla" else {"form": config.attention}
        attended = ops.ragged_attention(
            scored[:, :, :, :R].reshape(B, T, K * R, H), keys, values, lengths, num_queries=num_queries,
            window=self.window, scale=config.attention_scale, soft_cap=config.attention_softcap,
            is_cache_finite=True, **kernel,
        )  # fmt: skip
        out = declare(self, "out", (K, R, H, D), ("kv_heads", None, None, "embed"))
        # One contracted axis: XLA's CPU product over three is ten times slower.
        y = jnp.einsum("btn,nd->btd", attended.reshape(B, T, K * R * H), out.reshape(K * R * H, D))
        if config.has_out_bias:
            y += declare(self, "out_bias", (D,), ("embed",), zeros)
        return y, keys, values
