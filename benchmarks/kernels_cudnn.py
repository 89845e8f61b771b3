"""The benchmark of the kernels with cuDNN as a second baseline: `python -m benchmarks.kernels_cudnn`.

cuDNN's causal mask is aligned with the top left corner, so it cannot place T new queries at the end of a longer prefix.
The baseline therefore computes the prefix without the new tokens in cuDNN, computes the causal part of the T new tokens
in XLA, and merges the two by their log-sum-exp. cuDNN reads caches ``[B, S, K, H]``; they are transposed before the
timing starts.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from kernels_pallas import benchmark
from kernels_pallas.arg_specs import AttentionSpec


@functools.partial(jax.jit, static_argnames="implementation")
def prefix_and_merge(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Computes ragged attention as a padded prefix and a dense causal part.

    Args:
        q: ``[B, T, N, H]`` queries.
        k_cache: ``[B, S, K, H]`` keys, all finite.
        v_cache: ``[B, S, K, H]`` values, all finite.
        lengths: ``[B]`` int32 number of tokens before the new ones.
        implementation: What `jax.nn.dot_product_attention` computes the prefix with.

    Returns:
        ``[B, T, N, H]`` in q's dtype.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    capacity, num_kv_heads = k_cache.shape[1:3]
    scale = head_dim**-0.5
    prefix, prefix_norm = jax.nn.dot_product_attention(
        q,
        k_cache,
        v_cache,
        scale=scale,
        query_seq_lengths=jnp.full((batch,), num_tokens, jnp.int32),
        # The softmax over an empty prefix is undefined: it reads one position and gets no weight below.
        key_value_seq_lengths=jnp.maximum(lengths, 1),
        implementation=implementation,
        return_residual=True,
    )
    position = jnp.minimum(lengths[:, None] + jnp.arange(num_tokens), capacity - 1)[:, :, None, None]
    keys, values = (jnp.take_along_axis(cache, position, axis=1) for cache in (k_cache, v_cache))
    grouped = q.reshape(batch, num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkrh,bskh->bkrts", grouped, keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(jnp.tril(jnp.ones((num_tokens, num_tokens), bool)), scores, -jnp.inf)
    norm = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - norm).astype(values.dtype)
    causal = jnp.einsum("bkrts,bskh->btkrh", weights, values).reshape(q.shape)
    causal_norm = norm[..., 0].transpose(0, 3, 1, 2).reshape(batch, num_tokens, num_heads)
    share = jnp.where((lengths > 0)[:, None, None], jax.nn.sigmoid(prefix_norm - causal_norm), 0.0)[..., None]
    return (prefix * share + causal * (1.0 - share)).astype(q.dtype)


def cudnn_baseline(spec: AttentionSpec, arguments: dict[str, jax.Array], is_smoke: bool):
    """Returns the function and its operands for `kernels_pallas.benchmark`; a smoke run uses XLA in cuDNN's place.

    Raises:
        NotImplementedError: The spec has a window, a cap, pages or an INT8 cache, or cuDNN does not support the shapes.
    """
    if any(value is not None for value in spec.options.values()) or spec.is_quantized or spec.page_size is not None:
        raise NotImplementedError("cuDNN's prefix is computed without a window, a cap, chunks, pages or an INT8 cache")
    if spec.has_sinks:
        raise NotImplementedError("cuDNN's prefix is computed without sinks")
    caches = (jnp.swapaxes(arguments[name], 1, 2) for name in ("k_cache", "v_cache"))
    operands = (arguments["q"], *caches, arguments["lengths"])
    function = functools.partial(prefix_and_merge, implementation="xla" if is_smoke else "cudnn")
    try:
        jax.block_until_ready(function(*operands))
    except RuntimeError as error:  # jax raises it if cuDNN is missing or does not support the shapes.
        raise NotImplementedError(f"cuDNN: {error}") from error
    return function, operands


if __name__ == "__main__":
    benchmark.BASELINES["cudnn"] = cudnn_baseline
    benchmark.main()
