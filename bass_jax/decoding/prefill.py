"""Reads prompts into the caches: the first state of a batch, and prompts that the engine reads in chunks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import SpecConfig, batch_bucket
from bass_jax.decoding.options import DecodeOptions
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.prompt_layout import PromptLayout, lay_out_prompts
from bass_jax.decoding.state import FinishReason, SpecState
from bass_jax.drafters.protocols import hidden_layers_of, reads_chunks, reads_hidden_states
from bass_jax.models import kv_cache as kv
from bass_jax.models.mesh import mesh_of, place_whole, replicate_on_mesh
from bass_jax.models.prefill_cache import read_in_chunks
from bass_jax.models.protocol import Cache, check_cache, hidden_width_of, read_hidden, read_tokens
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from bass_jax.typing import Array, Float, Int, Key


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
    """Reads prompts of different lengths into the caches of a new state.

    The batch is padded to its bucket with inactive rows, and the capacity to a power of two. Each prompt is read once,
    and its caches are copied to all of its samples.

    Args:
        pair: target and drafter.
        prompts: token ids of each prompt.
        spec: the configuration of the steps.
        key: row i samples with ``fold_in(key, i)``; default ``jax.random.key(0)``.
        seeds: a seed per row, instead of `key`.
        sampling: for all rows or per row; default greedy.
        max_new_tokens: for all rows or per row.
        num_samples: rows per prompt; the rows of a prompt are adjacent.
        stop_tokens: a row ends with the first of these tokens; default the tokenizer's.

    Returns:
        The state of the batch. Its first ``len(prompts) * num_samples`` rows are the requests.

    Raises:
        ValueError: if there is no prompt, a prompt is empty, a token is outside the vocabulary, a prompt with its new
            tokens exceeds the target's context, or a per-row argument does not have one value per row.
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
    return FirstBatch(pair, layout, layout.num_rows).read()


class FirstBatch:
    """The first rows of a layout, padded to a batch bucket. Its prompts are read into the caches of target and drafter.

    Attributes:
        rows: the state without caches.
    """

    def __init__(self, pair: Pair, layout: PromptLayout, num_rows: int):
        """Selects the first `num_rows` rows; compiles nothing."""
        num_padding = batch_bucket(num_rows) - num_rows
        rows = layout.rows
        if num_rows < layout.num_rows:
            # Padding rows can have any content, because they are inactive.
            chosen = np.concatenate([np.arange(num_rows), np.full(num_padding, num_rows)])
            rows = jax.tree.map(lambda leaf: leaf[chosen], rows)
            rows.finish[num_rows:] = FinishReason.INACTIVE
        num_prompts = -(-num_rows // layout.num_samples)
        first = np.arange(num_prompts) * layout.num_samples
        tokens = np.zeros((batch_bucket(num_prompts), rows.tokens.shape[1]), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        tokens[:num_prompts], lengths[:num_prompts] = rows.tokens[first], rows.prompt_lengths[first]
        self._source = None
        if layout.num_samples > 1 or len(tokens) != num_rows + num_padding:
            source = np.concatenate([np.arange(num_rows) // layout.num_samples, np.zeros(num_padding)])
            self._source = source.astype(np.int32)
        self._mesh, self._arguments = mesh_of(pair), (pair, tokens, lengths)
        self.rows = place_whole(rows, self._mesh)

    def shapes(self) -> SpecState | None:
        """Returns the state with its caches as shapes; None on a mesh, where shapes do not tell the placement."""
        if self._mesh is not None:
            return None
        pair, _, _ = self._arguments

        def empty(tokens, lengths):
            return finish_prompts(pair, start_prompts(pair, *tokens.shape), tokens, lengths)

        caches = jax.eval_shape(empty, self.rows.tokens, self.rows.lengths)
        return self.rows._replace(target_cache=caches.target_cache, drafter_state=caches.drafter_state)

    def compile(self) -> None:
        """Begins to compile `read`, in a thread."""
        JIT_CACHE.get(_fill_caches, *self._arguments, in_background=True)

    def read(self) -> SpecState:
        """Reads the prompts; returns the state for the first step."""
        caches = JIT_CACHE.get(_fill_caches, *self._arguments)(*self._arguments)
        if self._source is not None:
            caches = JIT_CACHE.get(kv.gather_rows, caches, self._source)(caches, self._source)
        target_cache, drafter_state = place_whole(caches, self._mesh)
        return self.rows._replace(target_cache=target_cache, drafter_state=drafter_state)


class PromptState(NamedTuple):
    """The caches of prompts that are being read."""

    target_cache: Cache
    drafter_state: Any  # None until the prompts are read, for a drafter that does not read chunks
    hidden: Float[Array, "B C E"] | None  # of the target at the tokens read so far; None if the drafter keeps its own


def reads_in_chunks(pair: Pair) -> bool:
    """Returns whether the drafter reads prompts in chunks; otherwise `finish_prompts` gives it whole prompts."""
    return reads_chunks(pair.drafter)


def start_prompts(pair: Pair, num_rows: int, capacity: int) -> PromptState:
    """Returns empty caches. They are zeroed, because a NaN in an unread slot would spoil the attention output."""
    drafter: Any = pair.drafter
    cache, hidden = check_cache(pair.target, pair.target.init_cache(num_rows, capacity), num_rows), None
    if reads_hidden_states(pair.drafter) and not reads_in_chunks(pair):
        width, dtype = hidden_width_of(pair.target, hidden_layers_of(pair.drafter))
        hidden = jnp.zeros((num_rows, capacity, width), dtype)
    state = drafter.start(num_rows, capacity) if reads_in_chunks(pair) else None
    return PromptState(cache, state, hidden)


def read_chunk(
    pair: Pair, prompts: PromptState, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> PromptState:
    """Reads the next tokens of each prompt, all but its last token in the end.

    Args:
        pair: target and drafter.
        prompts: from `start_prompts` or the last call.
        tokens: ``[B, T]`` int32.
        positions: ``[B, T]`` int32; entries at or past the capacity C are padding.
    """
    drafter: Any = pair.drafter
    if not reads_hidden_states(pair.drafter):
        state = drafter.read(prompts.drafter_state, tokens, positions) if reads_in_chunks(pair) else None
        _, cache = read_tokens(pair.target, tokens, positions, prompts.target_cache)
        return PromptState(cache, state, None)
    layers = hidden_layers_of(pair.drafter)
    new, cache = read_hidden(pair.target, tokens, positions, prompts.target_cache, layers)
    if reads_in_chunks(pair):
        return PromptState(cache, drafter.read(prompts.drafter_state, tokens, positions, new), None)
    assert prompts.hidden is not None
    rows = jnp.arange(tokens.shape[0])[:, None]
    return PromptState(cache, None, prompts.hidden.at[rows, positions].set(new, mode="drop"))


def finish_prompts(
    pair: Pair, prompts: PromptState, tokens: Int[Array, "B C"], lengths: Int[Array, "B"]
) -> PromptState:
    """Gives the whole prompts to a drafter that does not read chunks."""
    if reads_in_chunks(pair):
        return prompts
    drafter: Any = pair.drafter
    hidden = () if prompts.hidden is None else (prompts.hidden,)
    return prompts._replace(drafter_state=drafter.init(tokens, lengths, *hidden), hidden=None)


def _fill_caches(pair: Pair, tokens: Int[Array, "B C"], lengths: Int[Array, "B"]) -> tuple[Cache, Any]:
    """Returns both caches with all but the last token of each prompt."""
    prompts = start_prompts(pair, *tokens.shape)

    def read(prompts, tokens, positions):
        return read_chunk(pair, prompts, tokens, positions)

    prompts = read_in_chunks(read, prompts, tokens, lengths - 1, tokens.shape[1])
    prompts = finish_prompts(pair, prompts, tokens, lengths)
    return replicate_on_mesh((prompts.target_cache, prompts.drafter_state))
