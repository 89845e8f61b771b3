"""Lays prompts and their options out as the rows of a batch, on the host."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.acceptance.base import check_greedy
from bass_jax.config import SpecConfig, batch_bucket, capacity_bucket
from bass_jax.decoding.options import DecodeOptions
from bass_jax.decoding.pair import Pair, check_pair
from bass_jax.decoding.state import FinishReason, SpecState
from bass_jax.models.protocol import context_of
from bass_jax.runtime.checks import check_integer, check_kind, check_per_row, check_sequence, check_tokens
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from bass_jax.sampling.keys import check_key, row_keys, seed_keys
from bass_jax.typing import Array, Key


class PromptLayout(NamedTuple):
    """The rows of a batch, one per sample, followed by padding rows."""

    rows: SpecState  # on the host, without caches
    num_rows: int
    num_samples: int

    def row(self, index: int) -> SpecState:
        """Returns one row as a state with a batch of one."""
        return jax.tree.map(lambda leaf: leaf[index : index + 1], self.rows)


def encode_texts(pair: Pair, texts: Sequence[str], *, raw: bool) -> list[np.ndarray]:
    """Returns the token ids of texts, each ``[n]`` int32; see `DecodeOptions.raw`.

    Raises:
        ValueError: if the pair has no tokenizer.
    """
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise ValueError("prompts are texts: expected token ids, because the pair has no tokenizer")
    if raw or not getattr(tokenizer, "has_chat_template", False):
        return tokenizer.encode_batch(texts)
    return [tokenizer.encode_chat(text) for text in texts]


def lay_out_prompts(
    pair: Pair, prompts: Sequence[Sequence[int] | np.ndarray], spec: SpecConfig, options: DecodeOptions
) -> PromptLayout:
    """Checks the arguments of `bass_jax.prefill`, and lays out the rows, padded to their buckets.

    Raises:
        ValueError: as `bass_jax.prefill`.
    """
    check_pair(pair)
    check_kind("spec", spec, SpecConfig)
    sampling, num_samples = options.sampling or SamplingParams(), options.num_samples
    check_greedy(find_rule(spec.acceptance), sampling)
    checked = check_prompts(pair, prompts)
    num_rows = len(checked) * num_samples
    max_new_tokens = check_per_row("max_new_tokens", options.max_new_tokens, num_rows)
    for limit in np.unique(max_new_tokens):
        check_integer("max_new_tokens", limit, 1)
    prompt_lengths = np.repeat([len(prompt) for prompt in checked], num_samples).astype(np.int32)
    limits = prompt_lengths + max_new_tokens
    context = context_of(pair.target)
    if context is not None and limits.max() > context:
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

    fields: dict[str, Any] = {  # NumPy arrays, which the annotations of the state do not allow
        "tokens": tokens,
        "lengths": fill(prompt_lengths, 1),
        "prompt_lengths": fill(prompt_lengths, 1),
        "limits": fill(limits.astype(np.int32), 1),
        "finish": fill(np.full(num_rows, FinishReason.RUNNING, np.int32), FinishReason.INACTIVE),
        "keys": _row_keys(options, num_rows, num_padding),
        "num_steps": np.zeros(len(tokens), np.int32),
        "draft_lens": np.full(len(tokens), spec.num_drafts, np.int32),
        "sampling_arrays": sampling.sampling_arrays(num_rows, pair.target.vocab_size, num_padding),
        "stop_tokens": np.tile(stops, (len(tokens), 1)),
        "target_cache": None,
        "drafter_state": None,
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


def pad_stop_tokens(stop_tokens: Sequence[int]) -> np.ndarray:
    """Pads to a multiple of 4, so that another number of stop tokens rarely needs a compilation."""
    ids = check_tokens("stop_tokens", stop_tokens)
    padding = -len(ids) % 4 if len(ids) else 4
    return np.asarray([*ids, *[-1] * padding], np.int32)


def check_prompts(pair: Pair, prompts) -> list[np.ndarray]:
    """Returns `prompts` as arrays of valid token ids.

    Raises:
        ValueError: naming the wrong prompt.
    """
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(one, str) for one in prompts)):
        raise ValueError("prompts: expected token ids, not text; see tokenizer.encode_batch")
    check_sequence("prompts", prompts, "a sequence of prompts")
    if len(prompts) == 0:
        raise ValueError("prompts: the batch is empty; expected at least one prompt")
    vocab_size = pair.target.vocab_size
    rows = [check_tokens(f"prompts[{i}]", prompt, vocab_size) for i, prompt in enumerate(prompts)]
    for i, row in enumerate(rows):
        if row.size == 0:
            raise ValueError(f"prompts[{i}] is empty: expected at least one token")
    return rows
