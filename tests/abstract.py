"""Pairs and states of shapes without values, which can be compiled but not run."""

import dataclasses

import jax
import jax.numpy as jnp

import bass_jax as bass
from bass_jax.decoding.state import SpecState
from bass_jax.drafters import ModelDrafter, NgramDrafter
from bass_jax.models import abstract_params
from bass_jax.sampling import SamplingArrays


def abstract_model(config: bass.models.ModelConfig) -> bass.models.Model:
    params = jax.tree.map(lambda box: box.value, abstract_params(config), is_leaf=lambda node: hasattr(node, "names"))
    return bass.models.Model(params, config)


def abstract_pair(target: bass.models.ModelConfig, draft: bass.models.ModelConfig | None) -> bass.Pair:
    """Returns a pair with a draft model, or with prompt lookup if `draft` is None."""
    drafter = NgramDrafter() if draft is None else ModelDrafter(abstract_model(draft), target.vocab_size)
    return bass.Pair(abstract_model(target), drafter)


def abstract_state(pair: bass.Pair, batch: int, capacity: int) -> SpecState:
    def build(pair):
        def per_row(dtype):
            return jnp.zeros(batch, dtype)

        tokens, lengths, numbers = jnp.zeros((batch, capacity), jnp.int32), per_row(jnp.int32), per_row(jnp.float32)
        return SpecState(
            tokens=tokens,
            lengths=lengths,
            prompt_lengths=lengths,
            limits=lengths,
            finish=lengths,
            keys=jax.vmap(jax.random.key)(per_row(jnp.uint32)),
            num_steps=lengths,
            draft_lens=lengths,
            sampling_arrays=SamplingArrays(numbers, lengths, numbers, numbers),
            stop_tokens=jnp.zeros((batch, 2), jnp.int32),
            target_cache=pair.target.init_cache(batch, capacity),
            drafter_state=pair.drafter.init(tokens, lengths),
        )

    return jax.eval_shape(build, pair)


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if leaf.dtype != "key<fry>")


def of_depth(config: bass.models.ModelConfig, num_layers: int) -> bass.models.ModelConfig:
    """Returns the configuration with its first layers only."""
    return dataclasses.replace(config, layers=config.layers[:num_layers])
