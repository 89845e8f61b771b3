"""The first state of a batch: prompts laid out in buckets, and read into the caches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.acceptance.base import check_greedy
from bass_jax.config import MAX_SAMPLES, SpecConfig, batch_bucket, capacity_bucket
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.state import FinishReason, SpecState
from bass_jax.drafters import reads_hidden_states
from bass_jax.models import kv_cache as kv
from bass_jax.models.kv_cache import KVCache
from bass_jax.models.mesh import mesh_of, place_whole, replicate
from bass_jax.models.prefill_cache import extend_cache, extend_with_hidden_states
from bass_jax.runtime.checks import check_integer, check_kind, check_per_row, check_sequence, check_tokens
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from bass_jax.sampling.keys import check_key, row_keys, seed_keys
from bass_jax.typing import Array, Key


def prefill(
    pair: Pair,
    prompts: Sequence[Sequence[int] | np.ndarray],
    spec: SpecConfig,
    *,
    key: Key[Array, ""] | None = None,
    seeds: Sequence[int] | None = None,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    num_samples: int = 1,
    stop_tokens: Sequence[int] | None = None,
) -> SpecState:
    """Reads ragged prompts into the caches of a new state.

    The batch is padded to its bucket with rows that are done from the start; prompts and capacity are padded
    to powers of two. Prompts are read once each, and their caches replicated over their samples.

    Args:
        pair: target and drafter.
        prompts: one sequence of token ids per prompt, of any lengths.
        spec: what the steps will run with.
        key: row i draws from ``fold_in(key, i)``; default ``jax.random.key(0)``.
        seeds: a seed per row instead: what a row draws then depends on its own seed alone.
        sampling: per row or one for all; default greedy.
        max_new_tokens: limit on emitted tokens, per row or one for all.
        num_samples: rows per prompt; rows of a prompt are neighbors.
        stop_tokens: a row ends with the first of these that it emits; default those of the pair's tokenizer.

    Returns:
        A state whose first ``len(prompts) * num_samples`` rows are the requests.

    Raises:
        ValueError: if the batch or a prompt is empty, a token is outside the vocabulary, a prompt with its
            new tokens exceeds the target's context, or a per-row argument has another number of rows.
    """
    layout = lay_out_prompts(
        pair, prompts, spec, key=key, seeds=seeds, sampling=sampling, max_new_tokens=max_new_tokens,
        num_samples=num_samples, stop_tokens=stop_tokens,
    )  # fmt: skip
    return read_prompts(pair, layout)


class PromptLayout(NamedTuple):
    """Prompts in their buckets, as the device will read them."""

    state: SpecState  # what `prefill` returns, without its caches
    tokens: np.ndarray  # [prompts, capacity] int32, right-padded
    lengths: np.ndarray  # [prompts] int32
    source: np.ndarray | None  # [batch] int32: the prompt of each row, where rows are not the prompts themselves


def lay_out_prompts(
    pair: Pair,
    prompts: Sequence[Sequence[int] | np.ndarray],
    spec: SpecConfig,
    *,
    key: Key[Array, ""] | None = None,
    seeds: Sequence[int] | None = None,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    num_samples: int = 1,
    stop_tokens: Sequence[int] | None = None,
) -> PromptLayout:
    """Checks what `prefill` is given, and pads it to its buckets; the pair's arrays can be `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: as `prefill`, whose arguments these are.
    """
    check_kind("pair", pair, Pair)
    check_kind("spec", spec, SpecConfig)
    check_kind("sampling", sampling, SamplingParams | None)
    sampling = sampling or SamplingParams()
    check_greedy(find_rule(spec.acceptance), sampling)
    rows = check_prompts(pair, prompts, num_samples)
    num_rows = len(rows) * num_samples
    limits = check_per_row("max_new_tokens", max_new_tokens, num_rows)
    for limit in np.unique(limits):
        check_integer("max_new_tokens", limit, 1)
    prompt_lengths = np.repeat([len(row) for row in rows], num_samples).astype(np.int32)
    limits = prompt_lengths + limits
    context = pair.target.config.context
    if limits.max() > context:
        row = int(limits.argmax())
        raise ValueError(
            f"prompts[{row // num_samples}] has {prompt_lengths[row]} tokens and may grow to {limits[row]}: "
            f"the target's context is {context}"
        )
    row_seeds: list[int] = [] if seeds is None else check_tokens("seeds", seeds).tolist()
    if seeds is not None and len(row_seeds) != num_rows:
        raise ValueError(f"seeds has {len(row_seeds)} values: expected {num_rows}, one per row")
    for seed in row_seeds:
        check_integer("seeds", seed, 0, 2**32 - 1)
    default_stops = () if pair.tokenizer is None else pair.tokenizer.stop_ids
    stops = pad_stop_tokens(default_stops if stop_tokens is None else stop_tokens)

    # Filler rows hold one token, like the shortest prompt there can be.
    num_padding = batch_bucket(num_rows) - num_rows
    prompt_padding = batch_bucket(len(rows)) - len(rows)
    capacity = capacity_bucket(int(limits.max()))
    padded = np.zeros((len(rows) + prompt_padding, capacity), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    read_lengths = np.ones(len(padded), np.int32)
    read_lengths[: len(rows)] = [len(row) for row in rows]
    source = np.concatenate([np.repeat(np.arange(len(rows)), num_samples), np.zeros(num_padding, int)]).astype(np.int32)
    if seeds is None:
        key = jax.random.key(0) if key is None else check_key(key)
        indices = np.arange(len(source), dtype=np.uint32)
        keys = JIT_CACHE.get(row_keys, key, indices)(key, indices)
    else:
        indices = np.asarray([*row_seeds, *[0] * num_padding], np.uint32)
        keys = JIT_CACHE.get(seed_keys, indices)(indices)

    def fill(values, value):
        return np.concatenate([values, np.full(num_padding, value, values.dtype)])

    sampling_arrays = sampling.sampling_arrays(num_rows, pair.target.config.vocab_size, num_padding)
    fields: dict[str, Any] = {
        "tokens": padded[source],
        "lengths": fill(prompt_lengths, 1),
        "prompt_lengths": fill(prompt_lengths, 1),
        "limits": fill(limits.astype(np.int32), 1),
        "finish": fill(np.full(num_rows, FinishReason.RUNNING, np.int32), FinishReason.INACTIVE),
        "keys": keys,
        "num_steps": np.zeros(len(source), np.int32),
        "draft_lens": np.full(len(source), spec.draft_len, np.int32),
        "sampling_arrays": sampling_arrays,
        "stop_tokens": np.tile(stops, (len(source), 1)),
        "target_cache": None,
        "drafter": None,
    }
    state = place_whole(SpecState(**fields), mesh_of(pair))
    is_spread = len(source) != len(padded) or num_samples > 1
    return PromptLayout(state, padded, read_lengths, source if is_spread else None)


def begin_reading(pair: Pair, layout: PromptLayout) -> SpecState | None:
    """Has what `read_prompts` will run compiled by another thread; the pair's arrays can be `jax.ShapeDtypeStruct`.

    Returns:
        The state that `read_prompts` will return, its caches as `jax.ShapeDtypeStruct`; None, and nothing is compiled,
        where the pair lies on a mesh.
    """
    if mesh_of(pair) is not None:
        return None
    target_cache, drafter = JIT_CACHE.begin(_fill_caches, pair, layout.tokens, layout.lengths)
    if layout.source is not None:
        target_cache, drafter = JIT_CACHE.begin(kv.gather_rows, (target_cache, drafter), layout.source)
    return layout.state._replace(target_cache=target_cache, drafter=drafter)


def read_prompts(pair: Pair, layout: PromptLayout) -> SpecState:
    """Fills the caches of both models; returns the state that the first step takes."""
    reading = (pair, layout.tokens, layout.lengths)
    caches = JIT_CACHE.get(_fill_caches, *reading)(*reading)
    if layout.source is not None:
        caches = JIT_CACHE.get(kv.gather_rows, caches, layout.source)(caches, layout.source)
    target_cache, drafter = place_whole(caches, mesh_of(pair))
    return layout.state._replace(target_cache=target_cache, drafter=drafter)


def _fill_caches(pair: Pair, tokens: Array, lengths: Array) -> tuple[KVCache, Any]:
    """Fills both caches with all but the last token of each prompt."""
    cache = pair.target.init_cache(tokens.shape[0], tokens.shape[1])
    drafter: Any = pair.drafter
    if reads_hidden_states(drafter):
        cache, hidden_states = extend_with_hidden_states(pair.target, tokens, lengths - 1, cache)
        return replicate((cache, drafter.init(tokens, lengths, hidden_states)))
    return replicate((extend_cache(pair.target, tokens, lengths - 1, cache), drafter.init(tokens, lengths)))


def pad_stop_tokens(stop_tokens: Sequence[int]) -> np.ndarray:
    """Pads to a multiple of 4, so that another stop token seldom is another shape."""
    ids = check_tokens("stop_tokens", stop_tokens)
    padding = -len(ids) % 4 if len(ids) else 4
    return np.asarray([*ids, *[-1] * padding], np.int32)


def check_prompts(pair: Pair, prompts, num_samples: int = 1) -> list[np.ndarray]:
    """Returns `prompts` as arrays, each of valid token ids.

    Raises:
        ValueError: naming the prompt that is none.
    """
    check_integer("num_samples", num_samples, 1, MAX_SAMPLES)
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(one, str) for one in prompts)):
        raise ValueError("prompts: expected token ids, not text; see tokenizer.encode_batch")
    check_sequence("prompts", prompts, "a sequence of prompts")
    if len(prompts) == 0:
        raise ValueError("prompts: the batch is empty; expected at least one prompt")
    vocab_size = pair.target.config.vocab_size
    rows = [check_tokens(f"prompts[{i}]", prompt, vocab_size) for i, prompt in enumerate(prompts)]
    for i, row in enumerate(rows):
        if row.size == 0:
            raise ValueError(f"prompts[{i}] is empty: expected at least one token")
    return rows
