"""The inputs of ragged attention, and their checks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
FORMS = ("pad", "split", "ragged")
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")


class AttentionInputs(NamedTuple):
    """The arrays of one call, checked and with counts in range; see `kernels_pallas.ops.ragged_attention`."""

    q: jax.Array
    """`[B, T, N, H]` float32, bfloat16 or float16."""
    k_cache: jax.Array
    """`[B, K, S, H]` in q's dtype, or int8 with `k_scale`; with `tables` pages `[P, K, page, H]`."""
    v_cache: jax.Array
    """Like `k_cache`."""
    lengths: jax.Array
    """`[B]` int32 in `0 ... S`."""
    num_queries: jax.Array
    """`[B]` int32 in `0 ... T`."""
    k_scale: jax.Array | None = None
    """`[B, K, S]` float32 scales of an int8 `k_cache`."""
    v_scale: jax.Array | None = None
    """`[B, K, S]` float32 scales of an int8 `v_cache`."""
    tables: jax.Array | None = None
    """`[B, M]` int32 in `0 ... P - 1`: the pages of each row, in order."""
    sinks: jax.Array | None = None
    """`[N]` float: one more score per head, whose weight is dropped."""

    @property
    def capacity(self) -> int:
        """S, the number of cache positions of a row."""
        return self.k_cache.shape[2] * (1 if self.tables is None else self.tables.shape[1])


class ScoreOptions(NamedTuple):
    """How scores are computed from products of queries and keys; static."""

    window: int | None
    """Number of positions that a query sees, itself included; None for all."""
    scale: float
    """Factor on the products."""
    soft_cap: float | None
    """c: a scaled score x becomes `c tanh(x / c)` before masking (Gemma 2); None for no cap."""
    chunk: int | None = None
    """c: a query at position p sees positions from `p // c * c` on (Llama 4); None for all."""


def check_attention_inputs(
    inputs: AttentionInputs,
    *,
    form: str,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    implementation: str | None,
) -> None:
    """Checks the arguments of `kernels_pallas.ops.ragged_attention`; here `num_queries` may be None.

    Raises:
        ValueError: An argument has another shape, dtype or value than expected.
    """
    q, k_cache, v_cache, lengths, num_queries, k_scale, v_scale, tables, sinks = inputs
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}; expected [B, T, N, H]")
    batch, num_tokens, num_heads, head_dim = q.shape
    if tables is not None:
        if tables.ndim != 2 or tables.shape[0] != batch or not jnp.issubdtype(tables.dtype, jnp.integer):
            raise ValueError(f"tables has shape {tables.shape}, {tables.dtype}; expected integers [{batch}, M]")
        if k_cache.ndim != 4 or k_cache.shape[3] != head_dim:
            raise ValueError(f"k_cache has shape {k_cache.shape}; expected pages [P, K, page, {head_dim}]")
    elif k_cache.ndim != 4 or k_cache.shape[0] != batch or k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache has shape {k_cache.shape}; expected [{batch}, K, S, {head_dim}]")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache has shape {v_cache.shape}; expected k_cache's {k_cache.shape}")
    if num_heads % k_cache.shape[1]:
        raise ValueError(f"q has {num_heads} heads; expected a multiple of k_cache's {k_cache.shape[1]}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}: expected ({num_heads},), one per query head")
    if num_tokens > inputs.capacity:
        raise ValueError(f"q has {num_tokens} new tokens; expected at most the cache's capacity {inputs.capacity}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; expected float32, bfloat16 or float16")
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache has dtype {v_cache.dtype}; expected k_cache's {k_cache.dtype}")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale go together; one of them is None")
    expected_dtype = q.dtype if k_scale is None else jnp.int8
    if k_cache.dtype != expected_dtype:
        raise ValueError(f"k_cache has dtype {k_cache.dtype}; expected {jnp.dtype(expected_dtype).name}")
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None and scales.shape != k_cache.shape[:3]:
            raise ValueError(f"{name} has shape {scales.shape}; expected {k_cache.shape[:3]}")
    for name, counts in (("lengths", lengths), ("num_queries", num_queries)):
        if counts is None:
            continue
        if counts.shape != (batch,):
            raise ValueError(f"{name} has shape {counts.shape}; expected [{batch}]")
        if not jnp.issubdtype(counts.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {counts.dtype}; expected an integer type")
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; expected one of {FORMS}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected a positive number of positions")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected a positive number of positions")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; expected a positive number")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation is {implementation!r}; expected one of {IMPLEMENTATIONS} or None")


def check_page_size(inputs: AttentionInputs, block_k: int) -> None:
    """Raises `NotImplementedError` if a block of `block_k` positions could cross the end of a page."""
    page_size = inputs.k_cache.shape[2]
    if inputs.tables is not None and page_size % block_k:
        raise NotImplementedError(f"the kernel needs pages that its block of {block_k} divides, not of {page_size}")
