"""A new draft for a target: shape, shared embedding, initial parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models import Model, init_params
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig, RopeConfig
from bass_jax.training.distill_config import DraftConfig
from bass_jax.typing import Array, Float, Int, Key, Params

_HEAD_SCALE = 0.02

_RIDGE = 1e-3
"""Of the least squares for new columns of a head, relative to the mean energy of a direction."""

_WRITERS = ("out", "out_bias", "down", "down_bias")
"""Parameters of a layer whose products are added to the residual stream."""


def draft_config(shape: DraftConfig, target: ModelConfig, dtype: str = "float32") -> ModelConfig:
    """Completes a draft's shape with what it has from its target.

    Raises:
        ValueError: if the target lacks one of the layers.
    """
    if shape.target_layers:
        return _pruned_config(shape, target, dtype)
    layer = next((layer for layer in target.layers if layer.attention.window is None), target.layers[0])
    rope = layer.attention.rope or RopeConfig()
    rope = RopeConfig(rope.base, scaling=rope.scaling)
    norm = NormConfig(eps=layer.norm.eps)
    attention = AttentionConfig(shape.num_heads, shape.num_kv_heads, shape.head_dim, rope)
    return ModelConfig(
        vocab_size=target.vocab_size,
        width=shape.width,
        context=target.context,
        layers=(LayerConfig(attention, DenseMLP(shape.mlp_width), norm),) * shape.num_layers,
        final_norm=norm,
        is_tied=False,
        embedding_width=target.embedding_width or target.width,
        output_vocab_size=shape.output_vocab_size,
        hidden_width=target.width if shape.reads_hidden else None,
        dtype=dtype,
    )


def _pruned_config(shape: DraftConfig, target: ModelConfig, dtype: str) -> ModelConfig:
    """The target with the chosen layers alone."""
    for layer in shape.target_layers:
        if not 0 <= layer < target.num_layers:
            raise ValueError(f"target_layers: {layer}: the target has layers 0 to {target.num_layers - 1}")
    return dataclasses.replace(
        target,
        layers=tuple(target.layers[layer] for layer in shape.target_layers),
        is_tied=target.is_tied and shape.output_vocab_size is None,
        output_vocab_size=shape.output_vocab_size,
        hidden_width=target.width if shape.reads_hidden else None,
        dtype=dtype,
    )


def init_draft(shape: DraftConfig, target: Model, output_ids: Int[np.ndarray, "O"], key: Key[Array, ""]) -> Model:
    """Makes a draft that shares the target's embedding.

    The projection starts as the principal directions of the proposed tokens' embeddings, scaled to a
    root mean square of 1; the head starts as the projected embeddings themselves, small. With `target_layers` all that
    the draft and the target have in common starts as the target's.
    A hidden-state draft starts with the target's own way of scoring what it predicts.

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
    has_all = config.output_vocab_size is None
    if shape.target_layers:
        params |= _pruned_params(shape, target, params, output_ids)
        return Model(jax.tree.map(jnp.asarray, params), config, None if has_all else jnp.asarray(output_ids))
    chosen = np.asarray(embedding)[:, output_ids]
    directions = principal_directions(chosen, config.width)
    projected = directions.T @ chosen
    scale = 1 / max(float(np.sqrt((projected**2).mean())), 1e-9)
    params["embedding"] = embedding
    params["embedding_projection"] = jnp.asarray(directions * scale)
    params["head"] = jnp.asarray(projected * scale * _HEAD_SCALE)
    if shape.reads_hidden and config.embedding_width == config.hidden_width:
        params |= _hidden_params(target, directions, projected)
    return Model(jax.tree.map(jnp.asarray, params), config, None if has_all else jnp.asarray(output_ids))


def _hidden_params(target: Model, directions: Float[np.ndarray, "E D"], projected: Float[np.ndarray, "D O"]) -> Params:
    """Where a hidden-state draft starts: it reads and predicts in the same directions, and scores as its target does.

    A predicted hidden state that is right then has the target's logits, but for what the directions leave out.
    """
    found = {"hidden_projection": directions, "hidden_output": directions.T, "head": projected}
    if (scale := target.params.get("final_norm")) is not None:
        size = float(np.sqrt((np.asarray(scale, np.float32) ** 2).mean()))
        found["final_norm"] = np.full(directions.shape[1], size, np.float32)
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in found.items()}


def with_hidden(draft: Model, target: ModelConfig) -> Model:
    """Lets a draft that reads tokens alone read its target's hidden states too.

    What reads and predicts them starts at zero: the draft says what it said before, and learns from there.
    """
    config = dataclasses.replace(draft.config, hidden_width=target.width)
    params = dict(init_params(config, jax.random.key(0))) | dict(draft.params)
    for name in ("hidden_projection", "hidden_output"):
        params[name] = jnp.zeros_like(params[name])
    return Model(params, config, draft.output_ids)


def with_layers(draft: Model, num_layers: int) -> Model:
    """Gives a draft more layers, spread evenly: it says what it said before, and learns from there.

    A new layer is a copy of the one below, but for what writes to the residual stream: that starts at zero (block
    expansion, Wu et al. 2024).

    Raises:
        ValueError: if the draft has more layers already.
    """
    have = draft.config.num_layers
    if num_layers < have:
        raise ValueError(f"num_layers={num_layers}: the draft has {have}")
    params = {name: leaf for name, leaf in draft.params.items() if not name.startswith("layer_")}
    sources = [place * have // num_layers for place in range(num_layers)]
    for place, source in enumerate(sources):
        layer = draft.params[f"layer_{source}"]
        is_new = place > 0 and source == sources[place - 1]
        params[f"layer_{place}"] = _silenced(layer) if is_new else layer
    layers = tuple(draft.config.layers[source] for source in sources)
    return Model(params, dataclasses.replace(draft.config, layers=layers), draft.output_ids)


def with_output_ids(draft: Model, output_ids: Int[np.ndarray, "O"]) -> Model:
    """Lets a draft propose other tokens: it scores those that it had as before, and learns the rest from there.

    A new token's column is what its embedding is to the columns that are there: a linear map of embeddings, by least
    squares.

    Args:
        draft: with a trimmed head and no bias in it.
        output_ids: ``[O]`` distinct tokens.
    """
    have = np.asarray(draft.output_ids)
    embedding, head = (np.asarray(draft.params[name], np.float32) for name in ("embedding", "head"))
    known = embedding[:, have]
    # Solved through the few by few products: the columns are many.
    energy = known @ known.T
    ridge = _RIDGE * np.trace(energy) / len(energy) * np.eye(len(energy), dtype=np.float32)
    mapped = np.linalg.solve(energy + ridge, known @ head.T)
    columns = mapped.T @ embedding[:, output_ids]
    place = {int(token): column for column, token in enumerate(have)}
    kept = np.array([place.get(int(token), -1) for token in output_ids])
    columns[:, kept >= 0] = head[:, kept[kept >= 0]]
    config = dataclasses.replace(draft.config, output_vocab_size=len(output_ids))
    return Model(dict(draft.params) | {"head": jnp.asarray(columns)}, config, jnp.asarray(output_ids))


def _silenced(layer: Params) -> Params:
    """The layer with nothing to add to the residual stream."""

    def leaf(path, value):
        return jnp.zeros_like(value) if path[-1].key in _WRITERS else value

    return jax.tree_util.tree_map_with_path(leaf, layer)


def _pruned_params(shape: DraftConfig, target: Model, params: Params, output_ids: Int[np.ndarray, "O"]) -> Params:
    """The target's parameters that have a place in `params`."""
    found = {name: leaf for name, leaf in target.params.items() if name in params and not name.startswith("layer_")}
    found |= {f"layer_{place}": target.params[f"layer_{layer}"] for place, layer in enumerate(shape.target_layers)}
    if "head" in params:
        full = target.params["embedding" if target.config.is_tied else "head"]
        found["head"] = full if shape.output_vocab_size is None else full[:, output_ids]
    if "head_bias" in params:
        found["head_bias"] = target.params["head_bias"][output_ids]
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), found)


def principal_directions(columns: Float[np.ndarray, "E O"], width: int) -> Float[np.ndarray, "E D"]:
    """Returns the `width` orthonormal directions that hold most of the columns' energy.

    Not centred: the mean is a direction like others, and the residual stream can use it. A width above E
    is filled with zeros.
    """
    _, vectors = np.linalg.eigh(columns @ columns.T)
    directions = vectors[:, ::-1][:, :width]
    missing = width - directions.shape[1]
    return np.pad(directions, ((0, 0), (0, missing))).astype(np.float32)
