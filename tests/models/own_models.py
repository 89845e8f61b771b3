"""A user's model in plain JAX, Equinox, Flax Linen and NNX, with a cache in its own layout, and a tiny Tunix model.

The cache is one array of keys and values per layer, ``[B, S, 2, D]``, unlike those of this package.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bass_jax.models import TargetModel
from bass_jax.models.adapters import from_flax_linen, from_flax_nnx, from_function, from_tunix

WIDTH = 16
SHAPES = {"embedding": WIDTH, "query": WIDTH, "key_value": 2 * WIDTH, "output": WIDTH, "up": 24, "down": WIDTH}


def random_params(vocab_size: int, seed: int) -> dict[str, Any]:
    """Returns weights that are large enough for uneven distributions."""
    random = np.random.default_rng(seed)
    rows = dict.fromkeys(SHAPES, WIDTH) | {"embedding": vocab_size, "down": 24}
    shapes = {name: (rows[name], columns) for name, columns in SHAPES.items()} | {"head": (WIDTH, vocab_size)}
    weights = {name: 0.4 * random.normal(size=shape) for name, shape in shapes.items()}
    return {name: jax.device_put(weight.astype(np.float32)) for name, weight in weights.items()}


def forward(params, tokens, positions, cache):
    """One layer of attention with rotating positions, and an MLP."""
    angles = positions[..., None] * jnp.exp(-0.4 * jnp.arange(WIDTH))
    x = params["embedding"][tokens] + jnp.sin(angles)
    new = (x @ params["key_value"]).reshape(*tokens.shape, 2, WIDTH)
    rows = jnp.arange(tokens.shape[0])[:, None]
    cache = cache.at[rows, positions].set(new, mode="drop")
    scores = jnp.einsum("btd,bsd->bts", x @ params["query"], cache[:, :, 0]) / WIDTH**0.5
    is_visible = jnp.arange(cache.shape[1]) <= positions[..., None]
    weights = jax.nn.softmax(jnp.where(is_visible, scores, -jnp.inf))
    x = x + jnp.einsum("bts,bsd->btd", weights, cache[:, :, 1]) @ params["output"]
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return x @ params["head"], cache


def init_cache(batch, capacity):
    return jnp.zeros((batch, capacity, 2, WIDTH))


class LinenModel(nn.Module):
    vocab_size: int

    @nn.compact
    def __call__(self, tokens, positions, cache):
        params = random_params(self.vocab_size, 0)
        params = {name: self.param(name, lambda _, value=value: value) for name, value in params.items()}
        return forward(params, tokens, positions, cache)


class NnxModel(nnx.Module):
    def __init__(self, params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, tokens, positions, cache):
        params = {name: getattr(self, name)[...] for name in (*SHAPES, "head")}
        return forward(params, tokens, positions, cache)


class EquinoxModel(eqx.Module):
    params: dict[str, jax.Array]
    name: str = "a leaf that is not an array"

    def __call__(self, tokens, positions, cache):
        return forward(self.params, tokens, positions, cache)


def plain_model(vocab_size: int, seed: int) -> TargetModel:
    return from_function(forward, random_params(vocab_size, seed), init_cache=init_cache, vocab_size=vocab_size)


def equinox_model(vocab_size: int, seed: int) -> TargetModel:
    arrays, _ = eqx.partition(EquinoxModel(random_params(vocab_size, seed)), eqx.is_array)
    return from_function(equinox_forward(), arrays, init_cache=init_cache, vocab_size=vocab_size)


@functools.cache
def equinox_forward() -> Callable:
    """Returns one function object for all parameters."""
    _, static = eqx.partition(EquinoxModel(random_params(1, 0)), eqx.is_array)
    return lambda arrays, *inputs: eqx.combine(arrays, static)(*inputs)


def linen_model(vocab_size: int, seed: int) -> TargetModel:
    variables = {"params": random_params(vocab_size, seed)}
    return from_flax_linen(LinenModel(vocab_size), variables, init_cache=init_cache, vocab_size=vocab_size)


def nnx_model(vocab_size: int, seed: int) -> TargetModel:
    return from_flax_nnx(NnxModel(random_params(vocab_size, seed)), init_cache=init_cache, vocab_size=vocab_size)


def tunix_model(vocab_size: int, seed: int) -> TargetModel:
    return from_tunix(tunix_module(vocab_size, seed))


def tunix_module(vocab_size: int, seed: int, scale: float = 4.0, **changes: Any) -> Any:
    """Returns a Tunix Qwen3 with one layer and large weights."""
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    sizes: dict[str, Any] = {"num_layers": 1, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 8, "rope_theta": 10_000, "norm_eps": 1e-6} | changes
    module = Qwen3(ModelConfig(vocab_size=vocab_size, **sizes), rngs=nnx.Rngs(seed))
    nnx.update(module, jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else scale * leaf, nnx.state(module)))
    return module
