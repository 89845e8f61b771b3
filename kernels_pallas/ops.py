"""The public functions: each checks its arguments and runs the best implementation that supports them."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from kernels_pallas.acceptance.arguments import check_acceptance_inputs
from kernels_pallas.acceptance.types import AcceptanceInputs, KernelAcceptance, KernelSampling
from kernels_pallas.acceptance.xla import masked_acceptance_xla
from kernels_pallas.attention.arguments import DTYPES, AttentionInputs, ScoreOptions, check_attention_inputs
from kernels_pallas.attention.xla import ragged_attention_xla
from kernels_pallas.grouped.xla import grouped_product_xla
from kernels_pallas.targets import Target, current_target
from kernels_pallas.tuning import acceptance_tiles, attention_tiles, grouped_tiles

Form = Literal["pad", "split", "ragged"]
Implementation = Literal["mosaic_gpu", "triton", "xla"]

MAX_KERNEL_TOKENS = 33
"""Largest number of query tokens that the GPU kernels support; longer passes (prefill) run in XLA."""

MAX_KERNEL_HEAD_DIM = 256
"""Largest head size that the GPU kernels support; tiles of larger heads (latent attention) do not fit on a core."""


def ragged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    form: Form = "ragged",
    num_queries: jax.Array | None = None,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    is_cache_finite: bool = False,
    tables: jax.Array | None = None,
) -> jax.Array:
    """Attends from T new tokens per row to a cache whose rows have different lengths.

    The caches already contain the new tokens at `lengths[b] ... lengths[b] + T - 1`. Query t of row b sees positions up
    to `lengths[b] + t`. Cache positions past a row's last real query are never used, even if they hold NaN.

    Args:
        q: `[B, T, N, H]` float32, bfloat16 or float16 queries.
        k_cache: `[B, K, S, H]` keys in q's dtype, or int8 with `k_scale`. Query head n reads kv head `n // (N / K)`.
        v_cache: `[B, K, S, H]` values, like `k_cache`.
        lengths: `[B]` integer number of cached tokens before the new ones, clipped to `0 ... S`. The real queries'
            positions must be in the cache: `lengths[b] + num_queries[b] <= S`.
        form: `"pad"`: one launch in which every row walks to the end of the longest row. `"split"`: one launch per row.
            (These are the two forms of BASS, Qian et al. 2024, figure 4.) `"ragged"`: one launch in which every program
            walks its own row only. XLA has one form and ignores this.
        num_queries: `[B]` integer number of real queries among the T; all T by default. Outputs of the others are 0.
        window: Number of positions that a query sees, itself included; None for all.
        chunk: c: a query at position p sees positions from `p // c * c` on (Llama 4); None for all.
        scale: Factor on the scores; `H ** -0.5` by default.
        soft_cap: c: a scaled score x becomes `c tanh(x / c)` before masking (Gemma 2); None for no cap.
        sinks: `[N]` float: one more score per head, whose weight is dropped (gpt-oss); None for none.
        implementation: `"mosaic_gpu"`, `"triton"` or `"xla"`; by default the best one that supports the arguments.
        interpret: Run kernels in jax's interpreter, on any device; for tests.
        k_scale: `[B, K, S]` float32 scale per (head, token) of an int8 `k_cache`.
        v_scale: `[B, K, S]` float32 scale per (head, token) of an int8 `v_cache`.
        is_cache_finite: The caller guarantees that no position of the caches holds NaN or infinity, written or not
            (for example because the caches were initialized with zeros). XLA then does not mask V.
        tables: `[B, M]` integer pages of each row, if the caches are pages `[P, K, page, H]` shared by all rows:
            position s of row b is in page `tables[b, s // page]` at `s % page`, and S is `M * page`. Entries past a
            row's last real query are never followed. None for a dense cache.

    Returns:
        `[B, T, N, H]` in q's dtype.

    Raises:
        ValueError: An argument has another shape, dtype or value than described.
        NotImplementedError: The named `implementation` does not support the arguments.
    """
    inputs = AttentionInputs(q, k_cache, v_cache, lengths, num_queries, k_scale, v_scale, tables, sinks)  # type: ignore[arg-type]
    check_attention_inputs(
        inputs, form=form, window=window, chunk=chunk, soft_cap=soft_cap, implementation=implementation
    )
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1], inputs.capacity
    if num_queries is None:
        num_queries = jnp.full((batch,), num_tokens, jnp.int32)
    # Finished rows may have any length, and unused entries of tables any page. Clipping keeps kernels in bounds.
    inputs = inputs._replace(
        lengths=jnp.clip(lengths.astype(jnp.int32), 0, capacity),
        num_queries=jnp.clip(num_queries.astype(jnp.int32), 0, num_tokens),
        tables=None if tables is None else jnp.clip(tables.astype(jnp.int32), 0, k_cache.shape[0] - 1),
    )
    options = ScoreOptions(window, head_dim**-0.5 if scale is None else scale, soft_cap, chunk)
    target = current_target()

    def run(name: str) -> jax.Array:
        if name == "xla":
            # A prefill materializes all weights at once, so it multiplies one rounded term of each.
            splits_weights = num_tokens <= MAX_KERNEL_TOKENS
            return ragged_attention_xla(inputs, options, is_cache_finite=is_cache_finite, splits_weights=splits_weights)
        if chunk is not None and chunk < num_tokens:
            raise NotImplementedError(f"the kernels have chunks of at least the {num_tokens} query tokens, not {chunk}")
        if head_dim > MAX_KERNEL_HEAD_DIM:
            raise NotImplementedError(f"the kernels have heads of at most {MAX_KERNEL_HEAD_DIM}, not {head_dim}")
        if tables is not None and k_scale is not None:
            raise NotImplementedError("the kernels read no pages of INT8")
        if num_tokens > MAX_KERNEL_TOKENS:
            raise NotImplementedError(f"the kernels serve at most {MAX_KERNEL_TOKENS} query tokens, not {num_tokens}")
        tiles = attention_tiles(
            target,
            batch=1 if form == "split" else batch,
            num_rows=num_tokens * num_heads // num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            capacity=capacity,
            dtype=q.dtype.name,
            cache_itemsize=k_cache.dtype.itemsize,
            implementation=name,
        )
        if tables is not None:
            tiles = tiles._replace(block_k=min(tiles.block_k, k_cache.shape[2]))
        # Imported here, because importing Pallas would add a quarter to the start-up time on a CPU.
        if name == "mosaic_gpu":
            from kernels_pallas.attention.mosaic_gpu import ragged_attention_mosaic_gpu as kernel
        else:
            from kernels_pallas.attention.triton import ragged_attention_triton as kernel
        return kernel(inputs, options, form=form, tiles=tiles, interpret=interpret)

    return _run_first_supported(implementation, _fallback_order(target, target.is_hopper), run)


def masked_acceptance(
    draft_tokens: jax.Array,
    num_drafted: jax.Array,
    target_logits: jax.Array,
    draft_probs: jax.Array | None,
    accept_keys: jax.Array,
    residual_keys: jax.Array,
    sampling: KernelSampling,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> KernelAcceptance:
    """Accepts drafts by the token rule and samples the next token, both under the target's warped distribution.

    The emitted tokens follow the target's warped distribution exactly (Leviathan et al. 2023, algorithm 1), provided
    that `draft_probs` is the distribution that the drafts were sampled from. On a GPU nothing of the vocabulary's size
    is written.

    Args:
        draft_tokens: `[B, G]` integer drafts; G may be 0.
        num_drafted: `[B]` integer number of real drafts among the G; the others are never accepted.
        target_logits: `[B, G + 1, V]` float32, bfloat16 or float16; position g is given the drafts before it.
        draft_probs: `[B, G, V]` probabilities of the distribution that each draft was sampled from; None for a
            deterministic drafter, whose distributions are one-hot.
        accept_keys: `[B, 2]` uint32 threefry key data per row; consumed. The uniform numbers are
            `1 - jax.random.uniform(key, (G,))`, in (0, 1].
        residual_keys: `[B, 2]` uint32 likewise, independent of `accept_keys`; consumed. The next token is the argmax of
            `log distribution + jax.random.gumbel(key, (V,))`.
        sampling: Sampling parameters per row, or any tuple of the same four arrays.
        implementation: `"mosaic_gpu"`, `"triton"` or `"xla"`; by default the best one that supports the arguments.
        interpret: Run kernels in jax's interpreter, on any device; for tests.

    Raises:
        ValueError: An argument has another shape, dtype or value than described.
        NotImplementedError: The named `implementation` does not support the arguments.
    """
    sampling = KernelSampling(*sampling)
    inputs = AcceptanceInputs(
        draft_tokens, num_drafted, target_logits, draft_probs, accept_keys, residual_keys, sampling
    )
    check_acceptance_inputs(inputs, implementation)
    inputs = inputs._replace(
        draft_tokens=draft_tokens.astype(jnp.int32),
        num_drafted=jnp.clip(num_drafted.astype(jnp.int32), 0, draft_tokens.shape[1]),
        sampling=KernelSampling(
            sampling.temperature.astype(jnp.float32),
            sampling.top_k.astype(jnp.int32),
            sampling.top_p.astype(jnp.float32),
            sampling.min_p.astype(jnp.float32),
        ),
    )
    target = current_target()

    def run(name: str) -> KernelAcceptance:
        if name == "xla":
            return masked_acceptance_xla(inputs)
        tiles = acceptance_tiles(target, vocab_size=target_logits.shape[2], implementation=name)
        if name == "mosaic_gpu":
            from kernels_pallas.acceptance.mosaic_gpu import masked_acceptance_mosaic_gpu as kernel
        else:
            from kernels_pallas.acceptance.triton import masked_acceptance_triton as kernel
        return kernel(inputs, tiles=tiles, interpret=interpret)

    # On Hopper, Triton's kernels are faster and are traced in less time; see docs/concepts/kernels.md.
    return _run_first_supported(implementation, _fallback_order(target, target.is_blackwell), run)


def grouped_product(
    rows: jax.Array,
    weights: jax.Array,
    groups: jax.Array,
    *,
    implementation: Literal["triton", "xla"] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies every row by the matrices of one or several groups, summing in float32.

    The bits of a result do not depend on the values of other rows. On a GPU only the matrices of groups with rows are
    read.

    Args:
        rows: `[M, D]` float32, bfloat16 or float16.
        weights: `[G, C, D]`, a matrix per group, of any dtype. Elements are converted to rows' dtype.
        groups: `[N]` integer group of each result, where N is a multiple of M: result n is row `n // (N / M)` times
            the matrix of group `groups[n]`. It is zero if that is not in 0 ... G - 1.
        implementation: `"triton"` or `"xla"`; by default the best one that supports the arguments.
        interpret: Run the kernel in jax's interpreter, on any device; for tests.

    Returns:
        `[N, C]` float32.

    Raises:
        ValueError: An argument has another shape or dtype than described.
        NotImplementedError: The named `implementation` does not support the arguments.
    """
    if rows.ndim != 2 or rows.dtype not in DTYPES:
        raise ValueError(f"rows has shape {rows.shape}, {rows.dtype}; expected floats of 16 or 32 bits [M, D]")
    if weights.ndim != 3 or weights.shape[2] != rows.shape[1]:
        raise ValueError(f"weights has shape {weights.shape}; expected [G, C, {rows.shape[1]}]")
    if groups.ndim != 1 or groups.shape[0] % rows.shape[0] or not jnp.issubdtype(groups.dtype, jnp.integer):
        expected = f"integers, a multiple of {rows.shape[0]}"
        raise ValueError(f"groups has shape {groups.shape}, {groups.dtype}; expected {expected}")
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation is {implementation!r}; expected 'triton', 'xla' or None")
    num_groups = weights.shape[0]
    groups = jnp.where((groups >= 0) & (groups < num_groups), groups, num_groups).astype(jnp.int32)

    def run(name: str) -> jax.Array:
        if name == "xla":
            return grouped_product_xla(rows, weights, groups)
        from kernels_pallas.grouped.triton import grouped_product_triton

        tiles = grouped_tiles(groups.shape[0], weights.shape, rows.dtype.name)  # type: ignore[arg-type]
        return grouped_product_triton(rows, weights, groups, tiles, interpret)

    return _run_first_supported(implementation, _fallback_order(current_target(), False), run)


def _fallback_order(target: Target, has_mosaic_gpu: bool) -> tuple[Implementation, ...]:
    """Returns the implementations to try on a device, best first; XLA supports everything."""
    if has_mosaic_gpu:
        return ("mosaic_gpu", "triton", "xla")
    return ("triton", "xla") if target.platform == "gpu" else ("xla",)


def _run_first_supported(implementation: Implementation | None, order: tuple[Implementation, ...], run: Callable):
    """Runs the named implementation, or else the first in `order` that does not raise `NotImplementedError`."""
    if implementation is not None:
        return run(implementation)
    for name in order[:-1]:
        try:
            return run(name)
        except NotImplementedError:
            continue
    return run(order[-1])
