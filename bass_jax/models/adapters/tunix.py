"""Tunix models (Qwen2, Qwen3, Llama 3, Gemma) as models.

Tunix writes a pass at one offset of the cache for the whole batch. The rows of a speculative batch have different
lengths, so the adapter runs every row as a batch of one under `jax.vmap`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.models.adapters.flax_nnx import Structure, split_module
from bass_jax.models.adapters.function import FunctionModel
from bass_jax.typing import Array

MARGIN = 64
"""Slots past the capacity, where padding is written: Tunix cannot leave out a write. Longer passes are split."""


@dataclasses.dataclass(frozen=True)
class _Rows:
    structure: Structure

    def __call__(self, state: Any, tokens: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
        logits = []
        for start in range(0, tokens.shape[1], MARGIN):
            part = slice(start, start + MARGIN)
            run = jax.vmap(lambda *row: self._run_row(state, *row))
            new, cache = run(tokens[:, part], positions[:, part], cache)
            logits.append(new)
        return jnp.concatenate(logits, axis=1), cache

    def _run_row(self, state: Any, tokens: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
        num_slots = next(iter(cache.values()))["k"].shape[0]
        start = jnp.minimum(positions[0], num_slots - MARGIN)
        batch = {name: layer | {"end_index": start} for name, layer in cache.items()}
        batch = jax.tree.map(lambda leaf: leaf[None], batch)
        mask = jnp.arange(num_slots) <= positions[:, None]
        logits, batch = self.structure.merge(state)(tokens[None], positions[None], batch, mask[None])
        return logits[0], jax.tree.map(lambda leaf: leaf[0], batch)


@dataclasses.dataclass(frozen=True)
class _EmptyCache:
    layers: tuple[tuple[str, tuple[int, ...], Any], ...]

    def __call__(self, batch: int, capacity: int) -> dict[str, dict[str, Array]]:
        def zeros(size, dtype):
            return jnp.zeros((batch, capacity + MARGIN, *size), dtype)

        end = jnp.zeros(batch, jnp.int32)
        return {name: {"k": zeros(*of), "v": zeros(*of), "end_index": end} for name, *of in self.layers}


def from_tunix(model: Any) -> FunctionModel:
    """Makes a model of a Tunix model; its hidden states cannot be read.

    Raises:
        ValueError: if the model uses flash attention, which ignores the mask, or its cache has another layout.
    """
    if getattr(model.config, "use_flash_attention", False):
        raise ValueError("model.config.use_flash_attention=True: expected False, because it ignores the mask")
    dtype = getattr(model.config, "dtype", jnp.float32)
    layers = jax.eval_shape(lambda: model.init_cache(1, 8, dtype))
    if not all(set(layer) == {"k", "v", "end_index"} and layer["k"].shape[:2] == (1, 8) for layer in layers.values()):
        raise ValueError(
            f"{type(model).__name__}.init_cache: expected k, v [B, S, K, H] and end_index [B] of each layer"
        )
    structure, state = split_module(model)
    vocab_size = getattr(model.config, "vocab_size", None) or model.config.num_embed
    sizes = tuple((name, layer["k"].shape[2:], layer["k"].dtype) for name, layer in layers.items())
    return FunctionModel(state, _Rows(structure), _EmptyCache(sizes), vocab_size)
