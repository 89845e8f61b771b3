"""Batched regular decoding of many prompts, with the distribution that every token came from.

Rows of a wave start together and keep one cache, which grows with them and is compacted as they finish:
attention over unused slots is what a large batch on a CPU would spend its time on.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models import Model
from bass_jax.models.kv_cache import KVCache, gather_rows
from bass_jax.typing import Array, Float, Int, Key

_BLOCK = 128
_GRAIN = 128
_CHUNK_GRAIN = 64
_CHECK_EVERY = 8


class Rollout(NamedTuple):
    """What the target wrote after one prompt.

    Attributes:
        prompt: ``[p]`` int32.
        response: ``[n]`` int32, the stop token included.
        distribution_ids: ``[n, top]`` int32, most likely first: the distribution that each response token was drawn
            from.
        distribution_logprobs: ``[n, top]`` float32, natural logarithms, at temperature 1.
        temperature: 0 for greedy.
        hidden states: ``[p + n - 1, D]`` float16: the target's final hidden state at every position but the last; None
        where
            they were not kept.
    """

    prompt: np.ndarray
    response: np.ndarray
    distribution_ids: np.ndarray
    distribution_logprobs: np.ndarray
    temperature: float
    hidden_states: np.ndarray | None = None


def top_distribution(logits: Float[Array, "B V"], top: int) -> tuple[Int[Array, "B k"], Float[Array, "B k"]]:
    """Returns ids and log-probabilities of the `top` most probable tokens, exactly.

    Taken over the best `top` blocks of the vocabulary: XLA's own top-k sorts the whole of it, which on a
    CPU costs as much as the model.
    """
    batch, vocab = logits.shape
    logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(batch, -1, _BLOCK)
    count = min(top, blocks.shape[1])
    _, best = jax.lax.top_k(blocks.max(axis=-1), count)
    candidates = jnp.take_along_axis(blocks, best[..., None], axis=1).reshape(batch, -1)
    values, where = jax.lax.top_k(candidates, top)
    ids = jnp.take_along_axis(best, where // _BLOCK, axis=1) * _BLOCK + where % _BLOCK
    return ids.astype(jnp.int32), values - normalizer


@functools.partial(jax.jit, donate_argnums=3)
def _extend(model: Model, tokens, positions, cache) -> tuple[Float[Array, "B T D"], Any]:
    output = model.hidden_states(tokens, positions, cache)
    return output.hidden.astype(jnp.float16), output.cache


@functools.partial(jax.jit, static_argnames="top", donate_argnums=3)
def _step(model: Model, tokens, positions, cache, keys, temperatures, *, top: int):
    """One token of every row: ``(tokens [B], distribution_ids [B, top], distribution_logprobs [B, top], hidden states
    [B, D], cache)``.
    """
    _, cache, hidden_states, _ = model.hidden_states(tokens[:, None], positions[:, None], cache)
    ids, logprobs = top_distribution(model.logits(hidden_states)[:, 0], top)
    # Sampling inside the distribution's top costs nothing; over the whole vocabulary the noise alone would.
    noise = jax.vmap(lambda key, position: jax.random.gumbel(jax.random.fold_in(key, position), (top,)))(
        keys, positions
    )
    scores = logprobs / jnp.maximum(temperatures, 1e-3)[:, None] + noise
    drawn = jnp.where(temperatures > 0, jnp.argmax(scores, axis=-1), 0)
    if model.output_ids is not None:
        ids = jnp.take(model.output_ids, ids)
    tokens = jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
    return tokens, ids, logprobs, hidden_states[:, 0].astype(jnp.float16), cache


def roll_out(
    model: Model,
    prompts: Sequence[np.ndarray],
    *,
    temperatures: Sequence[float],
    key: Key[Array, ""],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    top: int,
    keep_hidden_states: bool = False,
) -> list[Rollout]:
    """Decodes one wave of prompts together.

    Args:
        model: the target.
        prompts: each ``[p]`` int32, ``p >= 1``; of similar length, for a small cache.
        temperatures: one per prompt; 0 is greedy, others sample among the `top` most probable.
        key: of the wave; row `i` uses ``fold_in(key, i)``, so its neighbors do not matter.
        max_new_tokens: per row.
        stop_ids: tokens that end a row.
        top: tokens of the distribution that are kept.
        keep_hidden_states: also return the target's final hidden states, which a draft may read.

    Returns:
        A rollout per prompt, in order.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    read, cache = _prefill(model, prompts, lengths)
    alive = np.arange(len(prompts))
    last = jnp.asarray([prompt[-1] for prompt in prompts], jnp.int32)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(prompts)))
    warmth = jnp.asarray(temperatures, jnp.float32)
    positions = jnp.asarray(lengths - 1, jnp.int32)
    rows: list[list[tuple]] = [[] for _ in prompts]
    stops = np.asarray(stop_ids)
    done = np.zeros(len(prompts), bool)
    for start in range(0, max_new_tokens, _CHECK_EVERY):
        count = min(_CHECK_EVERY, max_new_tokens - start)
        cache = _grown(cache, _rounded(int(lengths[alive].max()) + start + count, _GRAIN))
        steps = []
        for _ in range(count):
            last, *described, hidden_states, cache = _step(model, last, positions, cache, keys, warmth, top=top)
            positions = positions + 1
            steps.append((last, *described, *([hidden_states] if keep_hidden_states else [])))
        parts = [np.stack(part) for part in zip(*jax.device_get(steps), strict=True)]
        tokens = parts[0]
        for slot, row in enumerate(alive):
            if done[row]:
                continue
            ends = np.flatnonzero(np.isin(tokens[:, slot], stops))
            done[row] = ends.size > 0
            kept = ends[0] + 1 if ends.size else count
            rows[row].append(tuple(part[:kept, slot] for part in parts))
        if done.all():
            break
        slots = _compacted(done[alive])
        if slots is not None:
            alive, taken = alive[slots], jnp.asarray(slots)
            cache = gather_rows(cache, taken)
            last, keys, warmth, positions = (jnp.take(x, taken, axis=0) for x in (last, keys, warmth, positions))
    rollouts = []
    for index, (prompt, row, warm) in enumerate(zip(prompts, rows, temperatures, strict=True)):
        response, ids, logprobs, *written = map(np.concatenate, zip(*row, strict=True))
        hidden_states = np.concatenate([*read(index), *written]) if keep_hidden_states else None
        rollouts.append(Rollout(np.asarray(prompt, np.int32), response, ids, logprobs, warm, hidden_states))
    return rollouts


def waves(lengths: Sequence[int], batch: int, window: int) -> Iterator[list[int]]:
    """Groups rows into batches of similar length.

    Args:
        lengths: of all rows, in order.
        batch: rows per wave.
        window: waves that are sorted among each other; the order is kept beyond.

    Yields:
        Indices of one wave.
    """
    for start in range(0, len(lengths), batch * window):
        chunk = range(start, min(start + batch * window, len(lengths)))
        ordered = sorted(chunk, key=lambda index: (lengths[index], index))
        yield from (ordered[i : i + batch] for i in range(0, len(ordered), batch))


def _prefill(model: Model, prompts, lengths) -> tuple[Callable[[int], list[np.ndarray]], KVCache]:
    """Fills the cache with every token but the last, which the first step reads.

    What all prompts begin with, a chat template's system message above all, is read once. Also returns a function that
    gives a row's hidden states at those tokens, in pieces.
    """
    shared = _common_prefix(prompts)
    capacity = _rounded(int(lengths.max()), _GRAIN)
    cache = model.init_cache(1, capacity)
    of_shared = of_rest = None
    if shared:
        of_shared, cache = _extend(model, prompts[0][None, :shared], np.arange(shared, dtype=np.int32)[None], cache)
    cache = gather_rows(cache, jnp.zeros(len(prompts), jnp.int32))
    rest = _rounded(int(lengths.max()) - 1 - shared, _CHUNK_GRAIN)
    if rest:
        tokens = np.zeros((len(prompts), rest), np.int32)
        positions = np.full((len(prompts), rest), capacity, np.int32)
        for row, prompt in enumerate(prompts):
            own = len(prompt) - 1 - shared
            tokens[row, :own] = prompt[shared:-1]
            positions[row, :own] = np.arange(shared, shared + own)
        of_rest, cache = _extend(model, tokens, positions, cache)

    def read(row: int) -> list[np.ndarray]:
        own = int(lengths[row]) - 1 - shared
        chunks = [] if of_shared is None else [np.asarray(of_shared[0])]
        return chunks if of_rest is None else [*chunks, np.asarray(of_rest[row, :own])]

    return read, cache


def _common_prefix(prompts) -> int:
    """Length of what all prompts share, short of any one's last token."""
    shortest = min(len(prompt) for prompt in prompts) - 1
    stacked = np.stack([prompt[:shortest] for prompt in prompts])
    same = (stacked == stacked[0]).all(axis=0)
    return int(shortest if same.all() else np.argmin(same))


def _rounded(length: int, grain: int) -> int:
    return -(-length // grain) * grain


def _grown(cache: KVCache, capacity: int) -> KVCache:
    extra = capacity - cache.capacity
    if extra <= 0:
        return cache
    return jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, extra if axis == 2 else 0) for axis in range(leaf.ndim)]), cache
    )


def _compacted(done: np.ndarray) -> np.ndarray | None:
    """Slots to keep when a quarter or more of the batch can be dropped, else None."""
    batch = len(done)
    wanted = max(1, int((~done).sum()))
    unit = max(1, batch // 4)
    target = -(-wanted // unit) * unit
    if target >= batch:
        return None
    # Finished rows fill up the last unit.
    return np.concatenate([np.flatnonzero(~done), np.flatnonzero(done)])[:target]
