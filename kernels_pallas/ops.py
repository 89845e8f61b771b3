"""One facade per op: validate, choose an implementation, fall through where one cannot."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from kernels_pallas.acceptance.arguments import check_acceptance
from kernels_pallas.acceptance.verdict import KernelAcceptance, KernelSampling
from kernels_pallas.acceptance.xla import masked_acceptance_xla
from kernels_pallas.attention.arguments import capacity_of, check_attention
from kernels_pallas.attention.cudnn import ragged_attention_cudnn
from kernels_pallas.attention.xla import ragged_attention_xla
from kernels_pallas.targets import Target, current_target
from kernels_pallas.tuning import acceptance_tiles, attention_tiles

Form = Literal["pad", "split", "ragged"]
Implementation = Literal["mosaic_gpu", "triton", "xla", "cudnn"]

MAX_KERNEL_TOKENS = 33
"""Query tokens of a verification pass that the GPU kernels serve; more (prefill) are XLA's."""


def ragged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    form: Form = "ragged",
    num_queries: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    is_cache_finite: bool = False,
    tables: jax.Array | None = None,
) -> jax.Array:
    """Attention of T new tokens per row over a cache whose rows have different lengths.

    The caches already hold the new tokens at `lengths[b] ... lengths[b] + T - 1`; query t of row b sees
    positions up to `lengths[b] + t`. Cache positions past a row's last real query are never used, whatever
    bits they hold.

    Args:
        q: `[B, T, N, H]` float32, bfloat16 or float16 queries.
        k_cache: `[B, K, S, H]` keys in q's dtype, or int8 with `k_scale`. Query head n reads kv head `n // (N
            / K)`.
        v_cache: `[B, K, S, H]` values, like `k_cache`.
        lengths: `[B]` integer tokens in the cache before the new ones, clipped to `0 ... S`. The real
            queries' own positions must lie in the cache: `lengths[b] + num_queries[b] <= S`.
        form: `"pad"`: one launch, every row walks to the longest row's end; `"split"`: one launch per row,
            each its own length (the two of BASS, Qian et al. 2024, figure 4); `"ragged"`: one launch, every
            program walks its own row only. XLA has one form and ignores this.
        num_queries: `[B]` integer number of real queries among the T, all T where None; outputs of the others
            are zero.
        window: Number of positions a query sees, itself included; None for all.
        scale: Factor on the scores; `H ** -0.5` where None.
        soft_cap: c, where a scaled score x becomes `c tanh(x / c)` before masking (Gemma 2); None for no cap.
        implementation: `"mosaic_gpu"`, `"triton"`, `"xla"` or `"cudnn"`; None takes the best of the first three that
            can.
        interpret: Run the kernel's interpreter, on any device; for tests.
        k_scale: `[B, K, S]` float32 scale per (head, token) of an int8 `k_cache`.
        v_scale: `[B, K, S]` float32 scale per (head, token) of an int8 `v_cache`.
        is_cache_finite: The caller vouches that no position of its caches holds NaN or infinity, written or
            not, as after zeroing them when they were made; XLA then skips masking V.
        tables: `[B, M]` integer page of each stretch of a row, where the caches are pages shared by all rows,
            `[P, K, page, H]`: position s of row b lies in page `tables[b, s // page]` at `s % page`, and S is
            `M * page`. Entries past a row's last real query are never followed. None for a dense cache.

    Returns:
        `[B, T, N, H]` in q's dtype.

    Raises:
        ValueError: An argument's shape, dtype or value is not as above.
        NotImplementedError: `implementation` was named and cannot run these shapes.
    """
    check_attention(
        q,
        k_cache,
        v_cache,
        lengths,
        num_queries,
        k_scale,
        v_scale,
        tables,
        form=form,
        window=window,
        soft_cap=soft_cap,
        implementation=implementation,
    )
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1], capacity_of(k_cache, tables)
    # A finished row may carry any length; clipped, it cannot send a kernel outside its cache.
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, capacity)
    if num_queries is None:
        num_queries = jnp.full((batch,), num_tokens, jnp.int32)
    num_queries = jnp.clip(num_queries.astype(jnp.int32), 0, num_tokens)
    arrays = (q, k_cache, v_cache, lengths, num_queries)
    options = {
        "window": window,
        "scale": head_dim**-0.5 if scale is None else scale,
        "soft_cap": soft_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if tables is not None:
        # What no query sees may point anywhere; clipped, it cannot send a kernel outside the pages.
        options["tables"] = jnp.clip(tables.astype(jnp.int32), 0, k_cache.shape[0] - 1)
    target = current_target()

    def run(name: str) -> jax.Array:
        if name == "xla":
            # A prefill holds all its weights at once: one term of each, not two.
            splits_weights = num_tokens <= MAX_KERNEL_TOKENS
            return ragged_attention_xla(
                *arrays, is_cache_finite=is_cache_finite, splits_weights=splits_weights, **options
            )
        if name == "cudnn":
            if tables is not None:
                raise NotImplementedError("cuDNN's interface reads no pages")
            return ragged_attention_cudnn(*arrays, is_cache_finite=is_cache_finite, interpret=interpret, **options)
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
        # Imported when wanted: Pallas alone would be a quarter of a start on a CPU.
        if name == "mosaic_gpu":
            from kernels_pallas.attention.mosaic_gpu import ragged_attention_mosaic_gpu as kernel
        else:
            from kernels_pallas.attention.triton import ragged_attention_triton as kernel
        return kernel(*arrays, form=form, tiles=tiles, interpret=interpret, **options)

    return _first_that_can(implementation, _ladder(target, target.is_hopper), run)


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
    """Warps the target's distribution, accepts drafts by the token rule and draws the token that follows them.

    The emitted tokens follow the warped target distribution exactly, whatever the draft's distribution is (Leviathan et
    al. 2023, algorithm 1), provided that `draft_probs` is the distribution that the drafts were drawn from. On a GPU
    nothing of the vocabulary's size is written.

    Args:
        draft_tokens: `[B, G]` integer drafts; G may be 0.
        num_drafted: `[B]` integer number of real drafts among the G; the others never stand.
        target_logits: `[B, G + 1, V]` float32, bfloat16 or float16: position g is given the drafts before it.
        draft_probs: `[B, G, V]` probabilities of the distribution that each draft was drawn from, or None for a
            deterministic drafter, whose distribution is one-hot.
        accept_keys: `[B, 2]` uint32 threefry key data per row; consumed. The uniforms are
            `1 - jax.random.uniform(key, (G,))`, in (0, 1].
        residual_keys: `[B, 2]` uint32 likewise, independent of `accept_keys`; consumed. The next token is the
            argmax of `log distribution + jax.random.gumbel(key, (V,))`.
        sampling: The warping of each row's target distribution, or any tuple of the same four arrays.
        implementation: `"mosaic_gpu"`, `"triton"` or `"xla"`; None takes the best that can.
        interpret: Run the kernel's interpreter, on any device; for tests.

    Returns:
        The result; see `Acceptance`.

    Raises:
        ValueError: An argument's shape, dtype or value is not as above.
    """
    sampling = KernelSampling(*sampling)
    check_acceptance(
        draft_tokens,
        num_drafted,
        target_logits,
        draft_probs,
        accept_keys,
        residual_keys,
        sampling,
        implementation=implementation,
    )
    target = current_target()
    arrays = (
        draft_tokens.astype(jnp.int32),
        jnp.clip(num_drafted.astype(jnp.int32), 0, draft_tokens.shape[1]),
        target_logits,
        draft_probs,
        accept_keys,
        residual_keys,
        KernelSampling(
            sampling.temperature.astype(jnp.float32),
            sampling.top_k.astype(jnp.int32),
            sampling.top_p.astype(jnp.float32),
            sampling.min_p.astype(jnp.float32),
        ),
    )

    def run(name: str) -> KernelAcceptance:
        if name == "xla":
            return masked_acceptance_xla(*arrays)
        tiles = acceptance_tiles(target, vocab_size=target_logits.shape[2], implementation=name)
        if name == "mosaic_gpu":
            from kernels_pallas.acceptance.mosaic_gpu import masked_acceptance_mosaic_gpu as kernel
        else:
            from kernels_pallas.acceptance.triton import masked_acceptance_triton as kernel
        return kernel(*arrays, tiles=tiles, interpret=interpret)

    return _first_that_can(implementation, _ladder(target, target.is_hopper or target.is_blackwell), run)


def _ladder(target: Target, has_mosaic_gpu: bool) -> tuple[Implementation, ...]:
    """The implementations to try on a device, best first; XLA can always."""
    if has_mosaic_gpu:
        return ("mosaic_gpu", "triton", "xla")
    return ("triton", "xla") if target.platform == "gpu" else ("xla",)


def _first_that_can(implementation: Implementation | None, ladder: tuple[Implementation, ...], run: Callable):
    """Runs the named implementation, or the first of the ladder that does not raise `NotImplementedError`."""
    if implementation is not None:
        return run(implementation)
    for name in ladder[:-1]:
        try:
            return run(name)
        except NotImplementedError:
            continue
    return run(ladder[-1])
