"""Named realistic arguments of the ops, for the tests and the benchmark."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.acceptance.types import KernelSampling
from kernels_pallas.attention.quantize import quantize_kv


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Shapes of one call of ragged attention in a verification pass of a named model."""

    name: str
    batch: int
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    dtype: str = "bfloat16"
    window: int | None = None
    is_quantized: bool = False
    soft_cap: float | None = None
    page_size: int | None = None
    """Positions per page of a paged cache, which has as many positions as a dense one; None for a dense cache."""
    chunk: int | None = None
    has_sinks: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The op's static arguments that the model determines."""
        return {"window": self.window, "soft_cap": self.soft_cap, "chunk": self.chunk}

    def reduced(self) -> "AttentionSpec":
        """Returns the same grouping, head size, tokens and dtype with few rows, few kv heads and a short cache.

        Interpreters, for which this is made, are thousands of times slower than a GPU. The capacity is no multiple of
        any block.
        """
        num_kv_heads = min(self.num_kv_heads, 2)
        return dataclasses.replace(
            self,
            batch=min(self.batch, 4),
            num_heads=self.num_heads // self.num_kv_heads * num_kv_heads,
            num_kv_heads=num_kv_heads,
            capacity=min(self.capacity, 168 if self.page_size is None else 3 * self.page_size),
            window=None if self.window is None else min(self.window, 21),
            chunk=None if self.chunk is None else min(self.chunk, 55),
        )

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the op's array arguments by name."""
        cache = (self.batch, self.num_kv_heads, self.capacity, self.head_dim)
        dtype = jnp.dtype(self.dtype)
        cache_dtype = jnp.dtype(jnp.int8) if self.is_quantized else dtype
        shapes = {
            "q": jax.ShapeDtypeStruct((self.batch, self.num_tokens, self.num_heads, self.head_dim), dtype),
            "k_cache": jax.ShapeDtypeStruct(cache, cache_dtype),
            "v_cache": jax.ShapeDtypeStruct(cache, cache_dtype),
            "lengths": jax.ShapeDtypeStruct((self.batch,), jnp.int32),
            "num_queries": jax.ShapeDtypeStruct((self.batch,), jnp.int32),
        }
        if self.page_size is not None:
            num_pages = self.capacity // self.page_size
            pages = (self.batch * num_pages, self.num_kv_heads, self.page_size, self.head_dim)
            shapes["k_cache"] = shapes["v_cache"] = jax.ShapeDtypeStruct(pages, cache_dtype)
            shapes["tables"] = jax.ShapeDtypeStruct((self.batch, num_pages), jnp.int32)
        if self.has_sinks:
            shapes["sinks"] = jax.ShapeDtypeStruct((self.num_heads,), dtype)
        if self.is_quantized:
            shapes["k_scale"] = shapes["v_scale"] = jax.ShapeDtypeStruct(cache[:3], jnp.float32)
        return shapes

    def cache_bytes(self, lengths: np.ndarray) -> int:
        """Returns the bytes of K and V, scales included, that rows of these lengths read once."""
        element = 1 if self.is_quantized else jnp.dtype(self.dtype).itemsize
        per_position = self.num_kv_heads * (self.head_dim * element + (4 if self.is_quantized else 0))
        return 2 * per_position * int((lengths + self.num_tokens).sum())


SPREADS = ("equal", "uniform", "one_long")
"""The distributions of lengths in a batch that the benchmark measures."""


def spread_lengths(spread: str, batch: int, mean: int, longest: int) -> np.ndarray:
    """Returns `[batch]` int32 lengths whose mean is about `mean` and whose maximum is at most `longest`.

    `"one_long"` has one row 8 times as long as each of the others, the worst case for padding.

    Raises:
        ValueError: `spread` is not in `SPREADS`.
    """
    if spread == "equal":
        values = np.full(batch, mean)
    elif spread == "uniform":
        values = np.linspace(0, 2 * mean, batch + 2)[1:-1]
    elif spread == "one_long":
        short = max(1, round(mean * batch / (batch + 7)))
        values = np.full(batch, short)
        values[batch // 2] = 8 * short
    else:
        raise ValueError(f"spread is {spread!r}; expected one of {SPREADS}")
    return np.minimum(values, longest).astype(np.int32)


ATTENTION_SPECS = (
    AttentionSpec("smollm2_135m", 8, 5, 9, 3, 64, 2048),
    AttentionSpec("smollm2_135m_f32", 8, 5, 9, 3, 64, 2048, "float32"),
    AttentionSpec("qwen3_0_6b", 16, 9, 16, 8, 128, 8192),
    AttentionSpec("llama3_8b", 8, 5, 32, 8, 128, 8192),
    AttentionSpec("llama3_8b_decode", 16, 1, 32, 8, 128, 8192),
    AttentionSpec("llama3_8b_long_draft", 4, 33, 32, 8, 128, 8192),
    AttentionSpec("llama3_8b_f16", 8, 5, 32, 8, 128, 8192, "float16"),
    AttentionSpec("llama3_8b_int8", 8, 5, 32, 8, 128, 8192, "bfloat16", None, True),
    AttentionSpec("qwen2_7b", 8, 5, 28, 4, 128, 8192),
    AttentionSpec("mistral_7b", 8, 5, 32, 8, 128, 8192, "bfloat16", 4096),
    AttentionSpec("starcoder2_3b", 8, 9, 24, 2, 128, 4096),
    AttentionSpec("opt_13b", 4, 5, 40, 40, 128, 2048),
    AttentionSpec("phi2", 8, 5, 32, 32, 80, 2048),
    AttentionSpec("phi2_f32", 8, 5, 32, 32, 80, 2048, "float32"),
    AttentionSpec("phi3_mini", 8, 5, 32, 32, 96, 4096),
    AttentionSpec("gemma2_2b", 8, 5, 8, 4, 256, 4096, "bfloat16", 2048, soft_cap=50.0),
    AttentionSpec("gemma_2b_f32", 2, 5, 8, 1, 256, 2048, "float32"),
    AttentionSpec("llama3_8b_paged", 8, 5, 32, 8, 128, 8192, page_size=64),
    AttentionSpec("mistral_7b_paged", 8, 5, 32, 8, 128, 8192, "bfloat16", 4096, page_size=128),
    AttentionSpec("smollm2_135m_f32_paged", 8, 5, 9, 3, 64, 2048, "float32", page_size=64),
    AttentionSpec("gpt_oss_20b", 8, 5, 64, 8, 64, 8192, has_sinks=True),
    AttentionSpec("gpt_oss_20b_window", 16, 5, 64, 8, 64, 8192, "bfloat16", 128, has_sinks=True),
    AttentionSpec("gpt_oss_20b_f32", 4, 5, 64, 8, 64, 2048, "float32", 128, has_sinks=True),
    AttentionSpec("llama4_scout", 4, 5, 40, 8, 128, 16384, chunk=8192),
)
"""Every grouping, head size and dtype that ragged attention supports, as named models use them."""


_quantize_kv = jax.jit(quantize_kv)


def attention_arguments(
    spec: AttentionSpec, *, seed: int = 0, lengths: np.ndarray | None = None
) -> dict[str, jax.Array]:
    """Returns arrays of `spec.shapes()` by name, with standard normal queries, keys and values.

    `num_queries` has rows with all, none and half of the queries.

    Args:
        spec: The shapes.
        seed: Seed of the generator.
        lengths: `[B]` lengths; by default spread evenly from 0 to the capacity minus the new tokens.
    """
    rng, keys = np.random.default_rng(seed), iter(jax.random.split(jax.random.key(seed), 4))
    if lengths is None:
        lengths = np.linspace(0, spec.capacity - spec.num_tokens, spec.batch).astype(np.int32)
    shapes = spec.shapes()
    num_queries = np.full(spec.batch, spec.num_tokens, np.int32)
    num_queries[1::3] = 0
    num_queries[2::3] = (spec.num_tokens + 1) // 2

    def normal(shape):  # on the device, because a host takes half a minute for a large cache
        return jax.random.normal(next(keys), shape, jnp.float32).astype(spec.dtype)

    arguments = {"q": normal(shapes["q"].shape)}
    if spec.has_sinks:
        # As large as the scores that they compete with.
        arguments["sinks"] = 3.0 * normal(shapes["sinks"].shape)
    for cache, scale in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        arguments[cache] = normal(shapes[cache].shape)
        if spec.is_quantized:
            arguments[cache], arguments[scale] = _quantize_kv(arguments[cache])
    if spec.page_size is not None:
        # Rows use pages in random order.
        tables = rng.permutation(shapes["k_cache"].shape[0]).reshape(shapes["tables"].shape)
        arguments["tables"] = jnp.asarray(tables, jnp.int32)
    return arguments | {"lengths": jnp.asarray(lengths), "num_queries": jnp.asarray(num_queries)}


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """Shapes of one grouped product in the experts of a named model."""

    name: str
    num_rows: int
    """Tokens of a pass times experts per token."""
    num_groups: int
    num_columns: int
    depth: int
    dtype: str = "bfloat16"
    is_quantized: bool = False

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the op's array arguments by name."""
        dtype = jnp.dtype(self.dtype)
        weights = (self.num_groups, self.num_columns, self.depth)
        return {
            "rows": jax.ShapeDtypeStruct((self.num_rows, self.depth), dtype),
            "weights": jax.ShapeDtypeStruct(weights, jnp.dtype(jnp.int8) if self.is_quantized else dtype),
            "groups": jax.ShapeDtypeStruct((self.num_rows,), jnp.int32),
        }

    def touched_bytes(self, groups: np.ndarray) -> int:
        """Returns the bytes of the matrices of groups with rows, and of the rows and the result once."""
        shapes = self.shapes()
        matrix = self.num_columns * self.depth * shapes["weights"].dtype.itemsize
        row = self.depth * shapes["rows"].dtype.itemsize + self.num_columns * 4
        return len(np.unique(groups)) * matrix + self.num_rows * row


GROUPED_SPECS = (
    GroupedSpec("qwen3_30b_gate_up", 40, 128, 1536, 2048),
    GroupedSpec("qwen3_30b_down", 40, 128, 2048, 768),
    GroupedSpec("qwen3_30b_gate_up_batch_16", 640, 128, 1536, 2048),
    GroupedSpec("qwen3_30b_down_batch_16", 640, 128, 2048, 768),
    GroupedSpec("qwen3_30b_gate_up_batch_64", 2560, 128, 1536, 2048),
    GroupedSpec("qwen3_30b_gate_up_prefill", 16384, 128, 1536, 2048),
    GroupedSpec("qwen3_30b_gate_up_int8", 640, 128, 1536, 2048, is_quantized=True),
    GroupedSpec("qwen3_30b_down_f32", 40, 128, 2048, 768, "float32"),
    GroupedSpec("qwen3_next_80b_gate_up", 50, 512, 1024, 2048),
    GroupedSpec("gpt_oss_20b_gate_up", 160, 32, 5760, 2880),
    GroupedSpec("mixtral_8x7b_down_f16", 10, 8, 4096, 14336, "float16"),
)
"""Grouped products as the experts of named models use them: 5 tokens per row of a batch, and a prefill."""


@functools.partial(jax.jit, static_argnames="spec")
def grouped_arguments(spec: GroupedSpec, *, seed: int = 0) -> dict[str, jax.Array]:
    """Returns arrays of `spec.shapes()` by name; every row is of a random group."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = spec.shapes()
    weights = shapes["weights"]
    if spec.is_quantized:
        values = jax.random.randint(keys[2], weights.shape, -3, 4, jnp.int8)
    else:
        values = jax.random.normal(keys[2], weights.shape, weights.dtype)
    return {
        "rows": jax.random.normal(keys[1], shapes["rows"].shape, shapes["rows"].dtype),
        "weights": values,
        "groups": jax.random.randint(keys[0], (spec.num_rows,), 0, spec.num_groups),
    }


@dataclasses.dataclass(frozen=True)
class AcceptanceSpec:
    """Shapes of one call of masked acceptance in a verification pass of a named model."""

    name: str
    batch: int
    draft_len: int
    vocab_size: int
    dtype: str = "float32"
    is_deterministic: bool = False
    """Whether the drafter is deterministic and returns no distribution."""

    def reduced(self) -> "AcceptanceSpec":
        """Returns the same draft length and dtype with a small vocabulary, for interpreters."""
        return dataclasses.replace(self, batch=8, vocab_size=min(self.vocab_size, 1003))

    def shapes(self) -> dict[str, Any]:
        """Returns the shapes of the op's arguments by name."""
        batch, draft_len = self.batch, self.draft_len
        row: Any = jax.ShapeDtypeStruct((batch,), jnp.float32)
        count: Any = jax.ShapeDtypeStruct((batch,), jnp.int32)
        key = jax.ShapeDtypeStruct((batch, 2), jnp.uint32)
        distribution = jax.ShapeDtypeStruct((batch, draft_len, self.vocab_size), jnp.float32)
        logits = jax.ShapeDtypeStruct((batch, draft_len + 1, self.vocab_size), jnp.dtype(self.dtype))
        return {
            "draft_tokens": jax.ShapeDtypeStruct((batch, draft_len), jnp.int32),
            "num_drafted": count,
            "target_logits": logits,
            "draft_probs": None if self.is_deterministic else distribution,
            "accept_keys": key,
            "residual_keys": key,
            "sampling": KernelSampling(temperature=row, top_k=count, top_p=row, min_p=row),
        }


ACCEPTANCE_SPECS = (
    AcceptanceSpec("smollm2_135m", 8, 4, 49152),
    AcceptanceSpec("llama3_8b", 16, 8, 128256),
    AcceptanceSpec("llama3_8b_decode", 16, 0, 128256),
    AcceptanceSpec("qwen3_8b", 16, 8, 151936),
    AcceptanceSpec("qwen3_8b_bf16", 16, 8, 151936, "bfloat16"),
    AcceptanceSpec("qwen3_8b_ngram", 16, 8, 151936, "bfloat16", True),
    AcceptanceSpec("gpt2_f16", 4, 3, 50257, "float16"),
)
"""Masked acceptance as named models use it."""

# No filter, each filter alone, several filters, and greedy rows: (temperature, top_k, top_p, min_p).
_SAMPLINGS = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.5, 0, 1.0, 0.1),
    (0.6, 20, 0.95, 0.05),
    (0.0, 5, 0.5, 0.5),
    (1.2, 10**6, 0.999, 0.0),
)


@functools.partial(jax.jit, static_argnames="spec")
def acceptance_arguments(spec: AcceptanceSpec, *, seed: int = 0) -> dict[str, Any]:
    """Returns arrays of `spec.shapes()` by name; the draft distribution is close to the target's.

    Rows have from 0 to all of their drafts, and every kind of sampling parameters.
    """
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = spec.shapes()
    logits = 3.0 * jax.random.normal(keys[0], shapes["target_logits"].shape)
    probs_shape = (spec.batch, spec.draft_len, spec.vocab_size)
    draft_probs = jax.nn.softmax(logits[:, : spec.draft_len] + 0.3 * jax.random.normal(keys[1], probs_shape), axis=-1)
    if spec.is_deterministic:
        draft_tokens = jnp.argmax(draft_probs, axis=-1)
    else:
        draft_tokens = jax.random.categorical(keys[2], jnp.log(draft_probs), axis=-1)
    sampling = zip(*(_SAMPLINGS[row % len(_SAMPLINGS)] for row in range(spec.batch)), strict=True)
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    return {
        "draft_tokens": draft_tokens.astype(jnp.int32),
        "num_drafted": spec.draft_len - jnp.arange(spec.batch, dtype=jnp.int32) // 2 % (spec.draft_len + 1),
        "target_logits": logits.astype(spec.dtype),
        "draft_probs": None if spec.is_deterministic else draft_probs,
        "accept_keys": jax.random.key_data(jax.random.split(keys[3], spec.batch)),
        "residual_keys": jax.random.key_data(jax.random.split(keys[4], spec.batch)),
        "sampling": KernelSampling(*(jnp.asarray(v, dtype) for v, dtype in zip(sampling, dtypes, strict=True))),
    }
