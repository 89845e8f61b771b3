"""The first state of a batch: prompts laid out in buckets, and read into the caches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.acceptance.base import check_greedy
from bass_jax.config import SpecConfig, batch_bucket, capacity_bucket
from bass_jax.decoding.options import DecodeOptions
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
    options = DecodeOptions(
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        key=key,
        seeds=seeds,
        stop_tokens=stop_tokens,
    )
    layout = lay_out_prompts(pair, prompts, spec, options)
    return read_prompts(pair, layout, layout.num_rows)


class PromptLayout(NamedTuple):
    """Prompts and their settings as arrays, one row per sample, with padding rows behind them."""

    rows: SpecState  # on the host, without caches; rows past `num_rows` are padding
    num_rows: int
    num_samples: int

    def row(self, index: int) -> SpecState:
        """Returns one row as a state with a batch of one."""
        return jax.tree.map(lambda leaf: leaf[index : index + 1], self.rows)


def lay_out_prompts(
    pair: Pair, prompts: Sequence[Sequence[int] | np.ndarray], spec: SpecConfig, options: DecodeOptions
) -> PromptLayout:
    """Checks the arguments of `prefill`, and lays the rows out in buckets.

    Raises:
        ValueError: as `prefill`.
    """
    check_kind("pair", pair, Pair)
    check_kind("spec", spec, SpecConfig)
    sampling, num_samples = options.sampling or SamplingParams(), options.num_samples
    check_greedy(find_rule(spec.acceptance), sampling)
    checked = check_prompts(pair, prompts)
    num_rows = len(checked) * num_samples
    limits = check_per_row("max_new_tokens", options.max_new_tokens, num_rows)
    for limit in np.unique(limits):
        check_integer("max_new_tokens", limit, 1)
    prompt_lengths = np.repeat([len(prompt) for prompt in checked], num_samples).astype(np.int32)
    limits = prompt_lengths + limits
    context = pair.target.config.context
    if limits.max() > context:
        row = int(limits.argmax())
        raise ValueError(
            f"prompts[{row // num_samples}] has {prompt_lengths[row]} tokens and may grow to {limits[row]}: "
            f"the target's context is {context}"
        )
    default_stops = () if pair.tokenizer is None else pair.tokenizer.stop_ids
    stops = pad_stop_tokens(default_stops if options.stop_tokens is None else options.stop_tokens)

    num_padding = batch_bucket(num_rows) - num_rows
    tokens = np.zeros((num_rows + num_padding, capacity_bucket(int(limits.max()))), np.int32)
    for row in range(num_rows):
        tokens[row, : prompt_lengths[row]] = checked[row // num_samples]

    def fill(values, value):
        return np.concatenate([values, np.full(num_padding, value, values.dtype)])

    fields: dict[str, Any] = {
        "tokens": tokens,
        "lengths": fill(prompt_lengths, 1),
        "prompt_lengths": fill(prompt_lengths, 1),
        "limits": fill(limits.astype(np.int32), 1),
        "finish": fill(np.full(num_rows, FinishReason.RUNNING, np.int32), FinishReason.INACTIVE),
        "keys": _row_keys(options, num_rows, num_padding),
        "num_steps": np.zeros(len(tokens), np.int32),
        "draft_lens": np.full(len(tokens), spec.draft_len, np.int32),
        "sampling_arrays": sampling.sampling_arrays(num_rows, pair.target.config.vocab_size, num_padding),
        "stop_tokens": np.tile(stops, (len(tokens), 1)),
        "target_cache": None,
        "drafter": None,
    }
    return PromptLayout(SpecState(**fields), num_rows, num_samples)


def _row_keys(options: DecodeOptions, num_rows: int, num_padding: int) -> Key[Array, "B"]:
    if options.seeds is None:
        key = jax.random.key(0) if options.key is None else check_key(options.key)
        indices = np.arange(num_rows + num_padding, dtype=np.uint32)
        return JIT_CACHE.get(row_keys, key, indices)(key, indices)
    seeds: list[int] = check_tokens("seeds", options.seeds).tolist()
    if len(seeds) != num_rows:
        raise ValueError(f"seeds has {len(seeds)} values: expected {num_rows}, one per row")
    for seed in seeds:
        check_integer("seeds", seed, 0, 2**32 - 1)
    indices = np.asarray([*seeds, *[0] * num_padding], np.uint32)
    return JIT_CACHE.get(seed_keys, indices)(indices)


def read_prompts(pair: Pair, layout: PromptLayout, num_rows: int) -> SpecState:
    """Reads the prompts of the first `num_rows` rows into the caches of both models.

    Each prompt is read once, and its caches are copied to all of its rows.

    Returns:
        The state that the first step takes, padded to its batch bucket.
    """
    num_padding = batch_bucket(num_rows) - num_rows
    state = layout.rows
    if num_rows < layout.num_rows:
        # The last padding row of the layout, or any row: `finish` decides.
        chosen = np.concatenate([np.arange(num_rows), np.full(num_padding, num_rows)])
        state = jax.tree.map(lambda leaf: leaf[chosen], state)
        state.finish[num_rows:] = FinishReason.INACTIVE
    num_prompts = -(-num_rows // layout.num_samples)
    first = np.arange(num_prompts) * layout.num_samples
    tokens = np.zeros((batch_bucket(num_prompts), state.tokens.shape[1]), np.int32)
    lengths = np.ones(len(tokens), np.int32)
    tokens[:num_prompts], lengths[:num_prompts] = state.tokens[first], state.prompt_lengths[first]
    caches = JIT_CACHE.get(_fill_caches, pair, tokens, lengths)(pair, tokens, lengths)
    if layout.num_samples > 1 or len(tokens) != num_rows + num_padding:
        source = np.concatenate([np.arange(num_rows) // layout.num_samples, np.zeros(num_padding)]).astype(np.int32)
        caches = JIT_CACHE.get(kv.gather_rows, caches, source)(caches, source)
    mesh = mesh_of(pair)
    target_cache, drafter = place_whole(caches, mesh)
    return place_whole(state, mesh)._replace(target_cache=target_cache, drafter=drafter)


def _fill_caches(pair: Pair, tokens: Array, lengths: Array) -> tuple[KVCache, Any]:
    """Fills both caches with all but the last token of each prompt."""
    cache = pair.target.init_cache(tokens.shape[0], tokens.shape[1])
    drafter: Any = pair.drafter
    if reads_hidden_states(drafter):
        cache, hidden_states = extend_with_hidden_states(pair.target, tokens, lengths - 1, cache)
        return replicate((cache, drafter.init(tokens, lengths, hidden_states)))
    return replicate((extend_cache(pair.target, tokens, lengths - 1, cache), drafter.init(tokens, lengths)))


def pad_stop_tokens(stop_tokens: Sequence[int]) -> np.ndarray:
    """Pads to a multiple of 4, so that few numbers of stop tokens need a new compilation."""
    ids = check_tokens("stop_tokens", stop_tokens)
    padding = -len(ids) % 4 if len(ids) else 4
    return np.asarray([*ids, *[-1] * padding], np.int32)


def check_prompts(pair: Pair, prompts) -> list[np.ndarray]:
    """Returns `prompts` as arrays, each of valid token ids.

    Raises:
        ValueError: naming the prompt that is none.
    """
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
