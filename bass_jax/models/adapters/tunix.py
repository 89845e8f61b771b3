"""Tunix models. They write a pass at one offset of the cache, so each row runs as a batch of one under `jax.vmap`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.models.adapters.flax_nnx import Structure, split_module
from bass_jax.models.adapters.function import FunctionModel
from bass_jax.typing import Array

MARGIN = 64  # slots past the capacity, where padding is written; longer passes are split


@dataclasses.dataclass(frozen=True)
class _EmptyCache:
    layers: tuple[tuple[str, tuple[int, ...], Any], ...]  # name, shape of a slot and dtype

    def __call__(self, batch: int, capacity: int) -> dict[str, dict[str, Array]]:
        empty = {name: jnp.zeros((batch, capacity + MARGIN, *slot), dtype) for name, slot, dtype in self.layers}
        return {name: {"k": one, "v": one, "end_index": jnp.zeros(batch, jnp.int32)} for name, one in empty.items()}


@dataclasses.dataclass(frozen=True)
class _Rows:
    structure: Structure

    def __call__(self, state: Any, tokens: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
        logits, run = [], jax.vmap(self._run_row, in_axes=(None, 0, 0, 0))
        for start in range(0, tokens.shape[1], MARGIN):
            part = slice(start, start + MARGIN)
            new, cache = run(state, tokens[:, part], positions[:, part], cache)
            logits.append(new)
        return jnp.concatenate(logits, axis=1), cache

    def _run_row(self, state: Any, tokens: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
        num_slots = next(iter(cache.values()))["k"].shape[0]
        start = jnp.minimum(positions[0], num_slots - MARGIN)
        batch = jax.tree.map(lambda leaf: leaf[None], {name: cache[name] | {"end_index": start} for name in cache})
        mask = jnp.arange(num_slots) <= positions[:, None]
        logits, batch = self.structure.merge(state)(tokens[None], positions[None], batch, mask[None])
        return logits[0], jax.tree.map(lambda leaf: leaf[0], batch)


def from_tunix(model: Any) -> FunctionModel:
    """Makes a model of a Tunix model, without hidden states. It must not use flash attention, which ignores the mask.

    Raises:
        ValueError: if it does, or if its cache has another layout than ``[B, S, K, H]``.
    """
    if getattr(model.config, "use_flash_attention", False):
        raise ValueError("model.config.use_flash_attention=True: expected False, because it ignores the mask")
    cache = jax.eval_shape(lambda: model.init_cache(1, 8, getattr(model.config, "dtype", jnp.float32)))
    if not all({*layer} == {"k", "v", "end_index"} and layer["k"].shape[:2] == (1, 8) for layer in cache.values()):
        raise ValueError(f"{type(model).__name__}.init_cache: expected k, v [B, S, K, H] and end_index of each layer")
    structure, state = split_module(model)
    make_cache = _EmptyCache(tuple((name, layer["k"].shape[2:], layer["k"].dtype) for name, layer in cache.items()))
    vocab_size = getattr(model.config, "vocab_size", None) or model.config.num_embed
    return FunctionModel(state, _Rows(structure), make_cache, vocab_size)
