"""The device functions of the engine: read a prompt, insert a row, regroup rows. They are pure and not jitted."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.acceptance.base import check_greedy
from bass_jax.config import SpecConfig
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.prefill import PromptState, finish_prompts, read_chunk, reads_in_chunks, start_prompts
from bass_jax.decoding.state import FinishReason, SpecState
from bass_jax.drafters.protocols import FinishedTextDrafter, remember_rows
from bass_jax.engine.request import Request
from bass_jax.models.kv_cache import as_paged, gather_rows, is_paged, pages_of, with_pages
from bass_jax.models.mesh import replicate_on_mesh
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from bass_jax.sampling.keys import seed_keys
from bass_jax.sampling.params import Penalties, ProcessorArrays
from bass_jax.typing import Array, Bool, Int


def make_row(request: Request, capacity: int, vocab_size: int, num_stop_tokens: int, is_processed: bool) -> SpecState:
    """Returns the row of a request, on the host: a state with a batch of one and without caches.

    Args:
        request: the request.
        capacity: C.
        vocab_size: V of the target.
        num_stop_tokens: the width of the stop-token array.
        is_processed: whether the rows have logit bias, penalties, minimum lengths and grammars.
    """
    tokens = np.zeros((1, capacity), np.int32)
    tokens[0, : len(request.prompt)] = request.prompt
    stops = np.full((1, num_stop_tokens), -1, np.int32)
    stops[0, : len(request.stop_tokens)] = request.stop_tokens
    sampling_arrays = request.sampling.sampling_arrays(1, vocab_size)
    if is_processed:
        sampling_arrays = sampling_arrays._replace(
            processor_arrays=filled(sampling_arrays.processor_arrays, vocab_size)
        )
    length, seed = np.full(1, len(request.prompt), np.int32), np.full(1, request.seed, np.uint32)
    fields: dict[str, Any] = {  # NumPy arrays, which the annotations of the state do not allow
        "tokens": tokens,
        "lengths": length,
        "prompt_lengths": length,
        "limits": np.full(1, request.limit, np.int32),
        "finish": np.full(1, FinishReason.RUNNING, np.int32),
        "keys": JIT_CACHE.get(seed_keys, seed)(seed),
        "num_steps": np.zeros(1, np.int32),
        "draft_lens": np.zeros(1, np.int32),
        "sampling_arrays": sampling_arrays,
        "stop_tokens": stops,
        "target_cache": None,
        "drafter_state": None,
    }
    return SpecState(**fields)


def filled(processor_arrays: ProcessorArrays | None, vocab_size: int) -> ProcessorArrays:
    """Returns the arrays of one row, in which the fields that the request does not set have no effect."""
    bias, penalties, min_new_tokens, grammars = processor_arrays or ProcessorArrays()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    return ProcessorArrays(
        bias=np.zeros((1, vocab_size), np.float32) if bias is None else bias,
        penalties=Penalties(one, zero, zero) if penalties is None else penalties,
        min_new_tokens=np.zeros(1, np.int32) if min_new_tokens is None else min_new_tokens,
        grammars=np.full(1, -1, np.int32) if grammars is None else grammars,
    )


class Pages(NamedTuple):
    """The sizes of paged caches."""

    num_pages: int
    page_size: int


def empty_state(pair: Pair, row: SpecState, num_rows: Int[Array, "B"], pages: Pages | None = None) -> SpecState:
    """Returns a batch of free rows with the shapes of `row`. Their number is the size of `num_rows`."""
    batch, (_, capacity) = num_rows.shape[0], row.tokens.shape
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape[1:])), row)
    prompts = start_prompts(pair, batch, capacity)
    prompts = finish_prompts(pair, prompts, jnp.zeros((batch, capacity), jnp.int32), jnp.ones(batch, jnp.int32))
    target_cache, drafter_state = prompts.target_cache, prompts.drafter_state
    if pages is not None:
        tables = jnp.full((batch, capacity // pages.page_size), pages.num_pages, jnp.int32)
        target_cache = as_paged(target_cache, pages.num_pages, pages.page_size, tables)
        if reads_in_chunks(pair):  # A whole prompt is read into a dense cache, because the pages stay with the batch.
            drafter_state = as_paged(drafter_state, pages.num_pages, pages.page_size, tables)
    finish = jnp.full(batch, int(FinishReason.INACTIVE), jnp.int32)  # An enum would make the type weak.
    return replicate_on_mesh(state._replace(finish=finish, target_cache=target_cache, drafter_state=drafter_state))


def empty_prompt(pair: Pair, tokens: Int[Array, "1 C"], table: Int[Array, "1 M"] | None = None) -> PromptState:
    """Returns fresh caches for one prompt; with a `table`, caches of those pages, which stay with the batch.

    Dense caches are zeroed for every prompt and inserted whole, so that a NaN of an earlier row is never read.
    """
    prompt = start_prompts(pair, *tokens.shape)
    return replicate_on_mesh(prompt if table is None else as_paged(prompt, 0, tokens.shape[1] // table.shape[1], table))


def read_prompt_chunk(
    pair: Pair,
    pages: tuple,
    prompt: PromptState,
    tokens: Int[Array, "1 T"],
    start: Array,
    num: Array,
    capacity: Array,
) -> tuple[tuple, PromptState]:
    """Reads `num` tokens of the prompt, those from position `start` on.

    Args:
        pair: target and drafter.
        pages: `pages_of` the batch, which the prompt's table points into; () for dense caches.
        prompt: from `empty_prompt` or the last call.
        tokens: the chunk.
        start: position of its first token.
        num: number of tokens in it.
        capacity: C, the position of padding.

    Returns:
        ``(pages, prompt)``.
    """
    prompt = with_pages(prompt, pages)
    slots = jnp.arange(tokens.shape[1])
    positions = jnp.where(slots < num, start + slots, capacity)[None]
    prompt = replicate_on_mesh(read_chunk(pair, prompt, tokens, positions))
    return pages_of(prompt), with_pages(prompt, None)


def finish_prompt(pair: Pair, prompt: PromptState, row: SpecState) -> PromptState:
    """Gives the whole prompt to a drafter that does not read chunks."""
    return replicate_on_mesh(finish_prompts(pair, prompt, row.tokens, row.lengths))


def insert_row(state: SpecState, prompt: PromptState, new: SpecState, row: Array) -> SpecState:
    """Moves the prompt that was read into `row`.

    Until the next plan its draft length is the largest one of the last plan; without a policy all rows have the same.
    """
    one = new._replace(
        draft_lens=state.draft_lens.max()[None],
        target_cache=prompt.target_cache,
        drafter_state=prompt.drafter_state,
        min_confidence=None if state.min_confidence is None else state.min_confidence.max()[None],
    )

    def put(all_, own):
        if is_paged(all_):
            tables, states = jax.tree.map(put, (all_.tables, all_.states), (own.tables, own.states))
            return all_._replace(tables=tables, states=states)
        return jax.lax.dynamic_update_slice_in_dim(all_, own, row, axis=0)  # is traced faster than `all_.at[row]`

    return replicate_on_mesh(jax.tree.map(put, state, one, is_leaf=is_paged))


def regroup_rows(state: SpecState, sources: Int[Array, "B"], finish: Int[Array, "B"]) -> SpecState:
    """Makes a batch of the rows `sources`; `finish` belongs to the new rows."""
    return replicate_on_mesh(gather_rows(state, sources)._replace(finish=finish))


def planned_rows(rows: tuple[Array, ...]) -> Int[Array, "4 B"]:
    """Copies `rows_of` a state, which the next step overwrites, into one array."""
    return replicate_on_mesh(jnp.stack(rows))


def remember_finished(
    drafter: FinishedTextDrafter, tokens: Int[Array, "B C"], lengths: Int[Array, "B"], is_finished: Bool[Array, "B"]
) -> Any:
    """Gives the texts of requests that have ended to a drafter; see `remember_rows`."""
    return replicate_on_mesh(remember_rows(drafter, tokens, lengths, is_finished))


def check_sampling(sampling: SamplingParams, spec: SpecConfig, vocab_size: int) -> bool:
    """Checks that the engine supports the sampling parameters; returns whether they process logits.

    Raises:
        ValueError: naming the parameter.
    """
    check_greedy(find_rule(spec.acceptance), sampling)
    return sampling.sampling_arrays(1, vocab_size).processor_arrays is not None
