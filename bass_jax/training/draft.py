"""A new draft for a target: shape, shared embedding, initial parameters."""

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import ModelConfig
from bass_jax.models import Model, init_params
from bass_jax.training.config import DraftConfig
from bass_jax.typing import Array, Float, Int, Key

_HEAD_SCALE = 0.02


def draft_config(shape: DraftConfig, target: ModelConfig, dtype: str = "float32") -> ModelConfig:
    """Completes a draft's shape with what it has from its target."""
    return ModelConfig(
        vocab_size=target.vocab_size,
        width=shape.width,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        mlp_width=shape.mlp_width,
        context=target.context,
        rope_base=target.rope_base,
        rope_scaling=target.rope_scaling,
        norm_eps=target.norm_eps,
        is_tied=False,
        embedding_width=target.embedding_width or target.width,
        output_vocab_size=shape.output_vocab_size,
        dtype=dtype,
    )


def init_draft(shape: DraftConfig, target: Model, output_ids: Int[np.ndarray, "O"], key: Key[Array, ""]) -> Model:
    """Makes a draft that shares the target's embedding.

    The projection starts as the principal directions of the proposed tokens' embeddings, scaled to a
    root mean square of 1; the head starts as the projected embeddings themselves, small.

    Args:
        shape: of the draft.
        target: gives the embedding, in float32.
        output_ids: ``[O]`` tokens that the draft proposes.
        key: of the layers' parameters.
    """
    config = draft_config(shape, target.config)
    if config.output_vocab_size is None:
        output_ids = np.arange(config.vocab_size, dtype=np.int32)
    params = dict(init_params(config, key))
    embedding = jnp.asarray(target.params["embedding"], jnp.float32)
    chosen = np.asarray(embedding)[:, output_ids]
    directions = principal_directions(chosen, config.width)
    projected = directions.T @ chosen
    scale = 1 / max(float(np.sqrt((projected**2).mean())), 1e-9)
    params["embedding"] = embedding
    params["embedding_projection"] = jnp.asarray(directions * scale)
    params["head"] = jnp.asarray(projected * scale * _HEAD_SCALE)
    has_all = config.output_vocab_size is None
    return Model(jax.tree.map(jnp.asarray, params), config, None if has_all else jnp.asarray(output_ids))


def principal_directions(columns: Float[np.ndarray, "E O"], width: int) -> Float[np.ndarray, "E D"]:
    """Returns the `width` orthonormal directions that hold most of the columns' energy.

    Not centred: the mean is a direction like others, and the residual stream can use it. A width above E
    is filled with zeros.
    """
    _, vectors = np.linalg.eigh(columns @ columns.T)
    directions = vectors[:, ::-1][:, :width]
    missing = width - directions.shape[1]
    return np.pad(directions, ((0, 0), (0, missing))).astype(np.float32)
