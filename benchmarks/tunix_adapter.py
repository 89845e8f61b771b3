"""Compares a pass of a Tunix model behind `from_tunix`, row by row under `jax.vmap`, with the model's own batched pass.

Also times a weight swap of `SpeculativeRollout`, a plain copy of the same parameters, and a decoding step.
Run it with google-tunix installed: ``python -m benchmarks.tunix_adapter``.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bass_jax as bass
from bass_jax.models.adapters import from_tunix

SIZES = {"num_layers": 4, "embed_dim": 256, "hidden_dim": 768, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
VOCAB, CAPACITY, PREFIX, REPEATS = 8192, 256, 100, 40


def main() -> None:
    """Prints the median time of a pass for several shapes."""
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = ModelConfig(vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, **SIZES)
    module = Qwen3(config, rngs=nnx.Rngs(0))
    model, (graphdef, state) = from_tunix(module), nnx.split(module)

    @jax.jit
    def batched(state, tokens, positions, cache):
        mask = jnp.arange(CAPACITY) <= positions[..., None]
        return nnx.merge(graphdef, state)(tokens, positions, cache, mask)

    adapted = jax.jit(lambda model, *arguments: tuple(model.forward(*arguments))[:2])
    for batch, num_tokens in [(1, 1), (8, 1), (1, 5), (8, 5)]:
        tokens = np.ones((batch, num_tokens), np.int32)
        positions = np.broadcast_to(PREFIX + np.arange(num_tokens, dtype=np.int32), tokens.shape)
        own, cache = module.init_cache(batch, CAPACITY, jnp.float32), model.init_cache(batch, CAPACITY)
        own = {name: layer | {"end_index": layer["end_index"] + PREFIX} for name, layer in own.items()}
        passes = {
            "own": lambda: batched(state, tokens, positions, own),  # noqa: B023
            "adapted": lambda: adapted(model, tokens, positions, cache),  # noqa: B023
        }
        medians = milliseconds(passes)
        print(f"{batch} rows, {num_tokens} tokens: own {medians['own']:.2f} ms, adapted {medians['adapted']:.2f} ms")
    measure_swap(module, state)


def milliseconds(functions: dict[str, Callable]) -> dict[str, float]:
    """Calls the functions in turns, and returns the median time of each."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(REPEATS + 2):
        for name, run in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repeat > 1:  # The first calls compile.
                seconds[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}


def measure_swap(module: Any, state: Any) -> None:
    """Prints the time of a weight swap, of a copy of the parameters alone, and of a decoding step with 8 rows."""
    from bass_jax.integrations.tunix import SpeculativeRollout

    rollout = SpeculativeRollout(module, NoTokenizer())

    def swap():
        rollout.update_params(state)
        return rollout.pair.target

    medians = milliseconds({"swap": swap, "copy": lambda: jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)})
    output = bass.generate(rollout.pair, [[1, 2, 3]] * 8, step="decode", max_new_tokens=REPEATS)
    step = 1000 * statistics.median(output.timings.steps)
    print(f"weight swap {medians['swap']:.2f} ms, copy {medians['copy']:.2f} ms, decoding step {step:.2f} ms")


class NoTokenizer:
    """The ids that a rollout worker asks for."""

    def encode(self, text: str) -> list[int]:
        """Returns no tokens."""
        return []

    decode = bos_id = eos_id = pad_id = encode


if __name__ == "__main__":
    main()
