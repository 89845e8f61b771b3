"""Latent attention (DeepSeek-AI, arXiv 2405.04434): keys and values are made of one compressed vector per token.

The matrix that makes a head's key of the compressed vector is applied to the query instead, and the one that makes its
value is applied to the result (section 2.1.2 of the paper, "absorbed"). All heads then attend to the compressed vectors
themselves, as in multi-query attention. This is the same function up to rounding, and neither keys nor values of heads
are computed or stored.
"""

import flax.linen as nn
import jax.numpy as jnp

from bass_jax.models import rotary
from bass_jax.models.attention import LayerOutput, write_and_attend
from bass_jax.models.model_config import AttentionConfig, ModelConfig
from bass_jax.models.norm import apply_norm, declare_norm, norm_for_projections, project
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.weights import Weight, declare_weight, multiply
from bass_jax.typing import Array, Float


class LatentAttention(nn.Module):
    """Latent attention over a row's own cached prefix.

    A cached key is a rotated part of ``P = rope.rotary_dim`` lanes, which all heads share, and the compressed vector of
    ``C = H - P`` lanes. The parameters are, with A the `LatentConfig.key_dim` and V the `LatentConfig.value_dim`:

    * ``query_down [Q, D]`` and ``query_norm [Q]``, if queries are compressed to Q lanes;
    * ``query_up [N, P + A, Q]``, or ``[N, P + A, D]`` if they are not;
    * ``latent [P + C, D]``, the rotated part of the keys and the compressed vector, whose norm is ``latent_norm [C]``;
    * ``kv_up [N, A + V, C]``, each head's key and value;
    * ``out [D, N, 1, V]``.

    Attributes:
        config: of the model.
        attention: of the layer.
    """

    config: ModelConfig
    attention: AttentionConfig

    @nn.compact
    def __call__(self, x, positions, angles, keys, values, num_candidates=1) -> LayerOutput:
        """Attends from the tokens of this pass, and writes their keys to the cache; see `Attention`."""
        config, attention = self.config, self.attention
        latent, rope = attention.latent, attention.rope
        assert latent is not None and rope is not None and rope.rotary_dim is not None
        N, H, D, P = attention.num_heads, attention.head_dim, config.width, rope.rotary_dim
        A, V, Q = latent.key_dim, latent.value_dim, latent.query_rank
        compressed = x
        if Q is not None:
            down = project(x, declare_weight(self, "query_down", (Q, D), (None, "embed")), rounds_to=config.rounds_to)
            if attention.has_bias:
                down += declare(self, "query_down_bias", (Q,), (None,), zeros)
            query_norm = declare_norm(self, "query_norm", latent.norm, Q, axis=None)
            compressed = norm_for_projections(latent.norm, down, query_norm)
        query_up = declare_weight(self, "query_up", (N, P + A, Q or D), ("kv_heads", None, None if Q else "embed"))
        queries = project(compressed, query_up, rounds_to=config.rounds_to)
        new = project(x, declare_weight(self, "latent", (H, D), (None, "embed")), rounds_to=config.rounds_to)
        if attention.has_bias:
            new += declare(self, "latent_bias", (H,), (None,), zeros)
        normed = apply_norm(latent.norm, new[..., P:], declare_norm(self, "latent_norm", latent.norm, H - P, axis=None))
        new_keys = jnp.concatenate([new[..., :P], normed], axis=-1)[:, :, None]
        kv_up = declare_weight(self, "kv_up", (N, A + V, H - P), ("kv_heads", None, None))
        key_up, value_up = (_lanes(kv_up, lanes) for lanes in (slice(A), slice(A, None)))
        queries = jnp.concatenate([queries[..., :P], _absorb(queries[..., P:], key_up)], axis=-1)
        queries, new_keys = rotary.rotate(queries, *angles), rotary.rotate(new_keys, *angles)
        new_values = new_keys[..., :0]
        attended, keys, values = write_and_attend(
            config, attention, queries, (new_keys, new_values), keys, values, positions, None, num_candidates
        )
        attended = _expand(attended[..., P:], value_up).reshape(*positions.shape, N * V)
        out = declare_weight(self, "out", (D, N, 1, V), ("embed", "kv_heads", None, None))
        out = Weight(out.values.reshape(D, N * V), out.scale)
        y = multiply(attended, out, rounds_to=config.rounds_to).astype(attended.dtype)
        if attention.has_out_bias:
            y += declare(self, "out_bias", (D,), ("embed",), zeros)
        return LayerOutput(y, keys, values, new_keys, new_values)


def _lanes(weight: Weight, lanes: slice) -> Weight:
    return Weight(weight.values[:, lanes], None if weight.scale is None else weight.scale[:, lanes])


def _absorb(queries: Float[Array, "B T N A"], key_up: Weight) -> Float[Array, "B T N C"]:
    """Multiplies each head's queries by the transpose of its matrix ``[A, C]``, summing in float32."""
    if key_up.scale is not None:
        queries = (queries * key_up.scale).astype(queries.dtype)
    matrices = key_up.values.astype(queries.dtype)
    return jnp.einsum("btna,nac->btnc", queries, matrices, preferred_element_type=jnp.float32).astype(queries.dtype)


def _expand(attended: Float[Array, "B T N C"], value_up: Weight) -> Float[Array, "B T N V"]:
    """Multiplies each head's vectors by its matrix ``[V, C]``, summing in float32."""
    matrices = value_up.values.astype(attended.dtype)
    y = jnp.einsum("btnc,nvc->btnv", attended, matrices, preferred_element_type=jnp.float32)
    return (y if value_up.scale is None else y * value_up.scale).astype(attended.dtype)
