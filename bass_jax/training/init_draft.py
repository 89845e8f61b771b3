"""The initial parameters of a draft, and changes to a trained draft that do not change its predictions."""

import dataclasses
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.drafters import EarlyExitModel, early_exit_model
from bass_jax.drafters.eagle.eagle3 import Eagle3Config, Eagle3Model, init_eagle3_params
from bass_jax.models import Model, init_params
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig, NormConfig, RopeConfig
from bass_jax.training.distill_config import DraftConfig
from bass_jax.typing import Array, Float, Int, Key, Params

type Draft = Model | EarlyExitModel | Eagle3Model
"""What a distillation trains."""

_MASK_TOKEN = 0
"""What a P-EAGLE head reads at positions that are not drafted yet. Their hidden state tells them from this token."""

_HEAD_SCALE = 0.02

_RIDGE = 1e-3
"""Regularization of the least squares for new rows of a head, relative to the mean energy of a direction."""

_RESIDUAL_OUTPUTS = ("out", "out_bias", "down", "down_bias")
"""Parameters of a layer whose products are added to the residual stream."""


def reads_target(draft: Draft) -> TypeGuard[Model | Eagle3Model]:
    """Returns whether the draft reads hidden states of its target."""
    return isinstance(draft, Eagle3Model) or draft.config.hidden_width is not None


def draft_config(shape: DraftConfig, target: ModelConfig, dtype: str = "float32") -> ModelConfig:
    """Returns the configuration of a draft for a target.

    Raises:
        ValueError: if the target does not have one of `target_layers`.
    """
    common = {
        "output_vocab_size": shape.output_vocab_size,
        "hidden_width": target.width if shape.reads_hidden or shape.is_head else None,
        "dtype": dtype,
    }
    if shape.target_layers:
        for layer in shape.target_layers:
            if not 0 <= layer < target.num_layers:
                raise ValueError(f"target_layers: {layer}: the target has layers 0 to {target.num_layers - 1}")
        layers = tuple(target.layers[layer] for layer in shape.target_layers)
        if any(layer.is_recurrent for layer in layers):
            raise ValueError(f"target_layers: {shape.target_layers}: expected layers with attention")
        is_tied = target.is_tied and shape.output_vocab_size is None
        return dataclasses.replace(target, layers=layers, is_tied=is_tied, **common)
    attention = next((one for one in target.attentions if one.window is None), target.attentions[0])
    rope = attention.rope or RopeConfig()
    norm = NormConfig(eps=target.layers[0].norm.eps)
    attention = AttentionConfig(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, RopeConfig(rope.base, scaling=rope.scaling)
    )
    return ModelConfig(
        vocab_size=target.vocab_size,
        width=shape.width,
        context=target.context,
        layers=(LayerConfig(attention, DenseMLP(shape.mlp_width), norm),) * shape.num_layers,
        final_norm=norm,
        is_tied=False,
        embedding_width=target.embedding_width or target.width,
        **common,
    )


def init_draft(shape: DraftConfig, target: Model, output_ids: Int[np.ndarray, "O"], key: Key[Array, ""]) -> Model:
    """Returns an untrained draft that shares the target's embedding.

    The embedding projection is initialized with the principal directions of the proposed tokens' embeddings, scaled to
    a root mean square of 1. The head is initialized with the projected embeddings times a small factor. A draft that
    reads hidden states starts with the target's head; see `_hidden_params`. With `target_layers`, all parameters that
    the target has too start as the target's.

    Args:
        shape: of the draft.
        target: gives the embedding, in float32.
        output_ids: ``[O]``, tokens that the draft can propose.
        key: of the layers' parameters.
    """
    config = draft_config(shape, target.config)
    has_all = config.output_vocab_size is None
    if has_all:
        output_ids = np.arange(config.vocab_size, dtype=np.int32)
    params = dict(init_params(config, key))
    if shape.target_layers:
        params |= _target_params(shape, target, params, output_ids)
    else:
        embedding = jnp.asarray(target.params["embedding"], jnp.float32)
        proposed = np.asarray(embedding)[output_ids]
        directions = principal_directions(proposed, config.width)
        projected = proposed @ directions
        scale = 1 / max(float(np.sqrt((projected**2).mean())), 1e-9)
        params |= {
            "embedding": embedding,
            "embedding_projection": directions.T * scale,
            "head": projected * scale * _HEAD_SCALE,
        }
        if shape.reads_hidden and config.embedding_width == config.hidden_width:
            params |= _hidden_params(target, directions, projected)
    return Model(jax.tree.map(jnp.asarray, params), config, None if has_all else jnp.asarray(output_ids))


def init_eagle3(
    shape: DraftConfig, target: Model, output_ids: Int[np.ndarray, "O"], key: Key[Array, ""]
) -> Eagle3Model:
    """Returns an untrained EAGLE-3 or P-EAGLE head that shares the target's embedding.

    The final norm and the head start as the target's; everything else is random.

    Raises:
        ValueError: if `shape` has another width than the target, or the target does not have one of the layers.
    """
    config = target.config
    if shape.width != config.width:
        raise ValueError(
            f"draft.width={shape.width}: expected the target's width {config.width}, because a head reads its embedding"
        )
    layers = shape.hidden_layers or (2, config.num_layers // 2, config.num_layers - 3)
    if len(set(layers)) < len(layers) or not all(0 <= layer <= config.num_layers for layer in layers):
        raise ValueError(f"draft.hidden_layers={list(layers)}: expected different ids from 0 to {config.num_layers}")
    own = dataclasses.replace(draft_config(shape, config), embedding_width=None)
    head = Eagle3Config(layers, config.width, mask_token_id=_MASK_TOKEN if shape.kind == "peagle" else None)
    params = dict(init_eagle3_params(own, head, key))
    rows = target.params["embedding" if config.is_tied else "head"]
    params |= {
        "embedding": target.params["embedding"],
        "head": rows if own.output_vocab_size is None else rows[output_ids],
    }
    if isinstance(norm := target.params.get("final_norm"), jax.Array) and norm.shape == params["final_norm"].shape:
        params["final_norm"] = norm
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    return Eagle3Model(params, own, head, None if own.output_vocab_size is None else jnp.asarray(output_ids))


def init_early_exit(shape: DraftConfig, target: Model, key: Key[Array, ""]) -> EarlyExitModel:
    """Returns the target's first layers with an adapter that adds nothing yet.

    Raises:
        ValueError: naming ``num_layers``, if the target has fewer layers or recurrent ones.
    """
    width = target.config.width
    up = jax.random.normal(key, (2, shape.mlp_width, width)) / np.sqrt(width)
    adapter = {"gate_up": up, "down": jnp.zeros((width, shape.mlp_width))}
    return early_exit_model(target, shape.num_layers, {"adapter": adapter, "adapter_norm": jnp.ones(width)})


def _hidden_params(target: Model, directions: Float[np.ndarray, "E D"], projected: Float[np.ndarray, "O D"]) -> Params:
    """Returns parameters with which the draft scores a predicted hidden state as the target would score a true one.

    The draft reads and predicts hidden states in the same directions. A correct prediction then has the target's
    logits, up to what is outside these directions.
    """
    found = {"hidden_projection": directions.T, "hidden_output": directions, "head": projected}
    if (scale := target.params.get("final_norm")) is not None:
        size = float(np.sqrt((np.asarray(scale, np.float32) ** 2).mean()))
        found["final_norm"] = np.full(directions.shape[1], size, np.float32)
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in found.items()}


def _target_params(shape: DraftConfig, target: Model, params: Params, output_ids: Int[np.ndarray, "O"]) -> Params:
    """Returns the target's parameters that the draft has too."""
    found = {name: leaf for name, leaf in target.params.items() if name in params and not name.startswith("layer_")}
    found |= {f"layer_{place}": target.params[f"layer_{layer}"] for place, layer in enumerate(shape.target_layers)}
    if "head" in params:
        full = target.params["embedding" if target.config.is_tied else "head"]
        found["head"] = full if shape.output_vocab_size is None else full[output_ids]
    if "head_bias" in params:
        found["head_bias"] = target.params["head_bias"][output_ids]
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), found)


def principal_directions(rows: Float[np.ndarray, "O E"], width: int) -> Float[np.ndarray, "E D"]:
    """Returns the `width` orthonormal directions with most of the rows' energy; those past E are zeros.

    The mean is not subtracted, because the residual stream can use its direction like any other.
    """
    _, vectors = np.linalg.eigh(rows.T @ rows)
    directions = vectors[:, ::-1][:, :width]
    return np.pad(directions, ((0, 0), (0, width - directions.shape[1]))).astype(np.float32)


def add_hidden_input(draft: Model, target: ModelConfig) -> Model:
    """Lets a draft that reads only tokens read its target's hidden states too.

    The new parameters start at zero, so that the draft's predictions do not change at first.
    """
    config = dataclasses.replace(draft.config, hidden_width=target.width)
    params = dict(init_params(config, jax.random.key(0))) | dict(draft.params)
    for name in ("hidden_projection", "hidden_output"):
        params[name] = jnp.zeros_like(params[name])
    return Model(params, config, draft.output_ids)


def add_layers(draft: Model, num_layers: int) -> Model:
    """Adds layers to a draft, evenly spread, that do not change its predictions at first.

    A new layer is a copy of the one below, except for the matrices that write to the residual stream, which start at
    zero. Source: block expansion (Wu et al. 2024).

    Raises:
        ValueError: if the draft has more layers.
    """
    have = draft.config.num_layers
    if num_layers < have:
        raise ValueError(f"num_layers={num_layers}: the draft has {have}")
    params = {name: leaf for name, leaf in draft.params.items() if not name.startswith("layer_")}
    sources = [place * have // num_layers for place in range(num_layers)]
    for place, source in enumerate(sources):
        layer = draft.params[f"layer_{source}"]
        is_new = place > 0 and source == sources[place - 1]
        params[f"layer_{place}"] = _without_output(layer) if is_new else layer
    layers = tuple(draft.config.layers[source] for source in sources)
    return Model(params, dataclasses.replace(draft.config, layers=layers), draft.output_ids)


def _without_output(layer: Params) -> Params:
    def leaf(path, value):
        return jnp.zeros_like(value) if path[-1].key in _RESIDUAL_OUTPUTS else value

    return jax.tree_util.tree_map_with_path(leaf, layer)


def change_output_ids(draft: Model, output_ids: Int[np.ndarray, "O"]) -> Model:
    """Changes the output vocabulary of a draft. Tokens that it could propose before keep their rows of the head.

    The row of a new token is a linear map of its embedding, fitted to the old rows by least squares.

    Args:
        draft: with a reduced output vocabulary and no bias in its head.
        output_ids: ``[O]`` distinct tokens.
    """
    have = np.asarray(draft.output_ids)
    embedding, head = (np.asarray(draft.params[name], np.float32) for name in ("embedding", "head"))
    known = embedding[have]
    energy = known.T @ known  # [E, E], much smaller than the number of rows.
    ridge = _RIDGE * np.trace(energy) / len(energy) * np.eye(len(energy), dtype=np.float32)
    linear_map = np.linalg.solve(energy + ridge, known.T @ head)
    rows = embedding[output_ids] @ linear_map
    place = {int(token): row for row, token in enumerate(have)}
    kept = np.array([place.get(int(token), -1) for token in output_ids])
    rows[kept >= 0] = head[kept[kept >= 0]]
    config = dataclasses.replace(draft.config, output_vocab_size=len(output_ids))
    return Model(dict(draft.params) | {"head": jnp.asarray(rows)}, config, jnp.asarray(output_ids))
