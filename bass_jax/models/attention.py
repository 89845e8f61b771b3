"""The attention part of a layer."""

import contextlib
import functools

import flax.linen as nn
import jax.numpy as jnp

from bass_jax.cache import append
from bass_jax.config import ModelConfig
from bass_jax.models import rotary
from bass_jax.models.norm import apply_norm, declare_norm, project
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
    def __call__(self, x, positions, angles, keys, values, num_chains=1):
        """Returns the attention's output ``[B, T, D]`` and the layer's cache with the new tokens in it.

        `x` is a `Normed` input; `angles` is None for a model without rotary positions. With `num_chains` the tokens
        are that many chains, one after the other, that follow the same prefix: the cache is left with the last one's
        tokens in it, and the new keys and values of all, ``[B, T, K, H]``, are returned behind it.
        """
        config = self.config
        K, R, H, D = config.num_kv_heads, config.queries_per_kv_head, config.head_dim, config.width
        qkv = declare(self, "qkv", (D, K, R + 2, H), ("embed", "kv_heads", None, None))
        projected = project("btd,dkrh->btkrh", x, qkv)
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
        is_whole = keys is None
        if is_whole:  # A whole sequence, of which nothing was read before.
            keys, values = new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2)
        B, T = positions.shape
        queries = scored[:, :, :, :R].reshape(B, T, K * R, H)
        parts = []
        # Chains take turns in the same slots: each attends as if it were alone, and the weights are read once for all.
        for part in range(num_chains):
            chain = slice(part * T // num_chains, (part + 1) * T // num_chains)
            slots = positions[:, chain]
            if not is_whole:
                keys, values = append(keys, new_keys[:, chain], slots), append(values, new_values[:, chain], slots)
            parts.append(self._attend(queries[:, chain], keys, values, slots))
        attended = parts[0] if num_chains == 1 else jnp.concatenate(parts, axis=1)
        out = declare(self, "out", (K, R, H, D), ("kv_heads", None, None, "embed"))
        # One contracted axis: XLA's CPU product over three is ten times slower.
        y = jnp.einsum("btn,nd->btd", attended.reshape(B, T, K * R * H), out.reshape(K * R * H, D))
        if config.has_out_bias:
            y += declare(self, "out_bias", (D,), ("embed",), zeros)
        return (y, keys, values) if num_chains == 1 else (y, keys, values, new_keys, new_values)

    def _attend(self, queries, keys, values, positions):
        """Scores the cache for one chain's queries ``[B, T, N, H]``."""
        config = self.config
        num_queries = (positions < keys.shape[2]).sum(axis=1, dtype=jnp.int32)
        lengths = jnp.where(num_queries > 0, positions[:, 0], 0)
        attend = functools.partial(
            ops.ragged_attention, queries, keys, values, lengths, num_queries=num_queries, window=self.window,
            scale=config.attention_scale, soft_cap=config.attention_softcap, is_cache_finite=True,
        )  # fmt: skip
        if config.attention in ("pad", "split"):
            return attend(form=config.attention)
        if config.attention == "cudnn":
            with contextlib.suppress(NotImplementedError):
                return attend(implementation="cudnn")
        return attend(implementation="xla" if config.attention == "xla" else None)
