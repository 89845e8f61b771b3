"""Batched regular decoding of many prompts that also returns the target's distributions.

The rows of a batch start together and share one cache. On a CPU it grows with them and is compacted as rows finish,
because a large batch would otherwise spend most of its time on attention over unused slots. On a GPU, where attention
reads only what a row holds and every shape takes seconds to compile, it keeps its size.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models import Model
from bass_jax.models.kv_cache import KVCache, gather_rows
from bass_jax.models.protocol import read_tokens
from bass_jax.typing import Array, Float, Int, Key

_BLOCK = 128
_CAPACITY_GRAIN = 128
_PREFILL_GRAIN = 64
_FIXED_GRAIN = 256  # instead of both, if the cache keeps its size
_CHECK_EVERY = 8


class Rollout(NamedTuple):
    """The target's answer to one prompt."""

    prompt: np.ndarray  # [p] int32
    response: np.ndarray  # [n] int32, with the stop token
    distribution_ids: np.ndarray  # [n, top] int32, the most probable tokens in descending order
    distribution_logprobs: np.ndarray  # [n, top] float32, their natural logarithms at temperature 1
    temperature: float  # 0: greedy
    hidden: np.ndarray | None = None  # [p + n - 1, E], hidden states of the target; in a corpus float16, its final ones

    @property
    def inputs(self) -> np.ndarray:
        """Prompt and response without the last token, ``[p + n - 1]``."""
        return np.concatenate([self.prompt, self.response[:-1]])


def top_distribution(logits: Float[Array, "B V"], top: int) -> tuple[Int[Array, "B k"], Float[Array, "B k"]]:
    """Returns ids and log-probabilities of the `top` most probable tokens, exactly.

    Only the `top` blocks of the vocabulary with the largest maxima are searched. XLA's top-k sorts the whole
    vocabulary, which takes as long as the model on a CPU.
    """
    batch, vocab = logits.shape
    logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(batch, -1, _BLOCK)
    _, best = jax.lax.top_k(blocks.max(axis=-1), min(top, blocks.shape[1]))
    candidates = jnp.take_along_axis(blocks, best[..., None], axis=1).reshape(batch, -1)
    values, where = jax.lax.top_k(candidates, top)
    ids = jnp.take_along_axis(best, where // _BLOCK, axis=1) * _BLOCK + where % _BLOCK
    return ids.astype(jnp.int32), values - normalizer


@functools.partial(jax.jit, donate_argnums=3)
def _extend(model: Model, tokens, positions, cache) -> tuple[Float[Array, "B T D"], Any]:
    hidden, cache = read_tokens(model, tokens, positions, cache)
    return hidden.astype(jnp.float16), cache


@functools.partial(jax.jit, static_argnames="top", donate_argnums=3)
def _step(model: Model, tokens, positions, cache, keys, temperatures, *, top: int):
    """Decodes one token per row.

    Returns:
        ``(tokens [B], ids [B, top], logprobs [B, top], hidden [B, D], cache)``.
    """
    hidden, cache = read_tokens(model, tokens[:, None], positions[:, None], cache)
    ids, logprobs = top_distribution(model.logits(hidden)[:, 0], top)
    # Sampled among the top tokens: random numbers for the whole vocabulary would take longer than the model.
    noise = jax.vmap(lambda key, position: jax.random.gumbel(jax.random.fold_in(key, position), (top,)))(
        keys, positions
    )
    scores = logprobs / jnp.maximum(temperatures, 1e-3)[:, None] + noise
    rank = jnp.where(temperatures > 0, jnp.argmax(scores, axis=-1), 0)
    if model.output_ids is not None:
        ids = jnp.take(model.output_ids, ids)
    tokens = jnp.take_along_axis(ids, rank[:, None], axis=1)[:, 0]
    return tokens, ids, logprobs, hidden[:, 0].astype(jnp.float16), cache


def roll_out(
    model: Model,
    prompts: Sequence[np.ndarray],
    *,
    temperatures: Sequence[float],
    key: Key[Array, ""],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    top: int,
    keep_hidden: bool = False,
) -> list[Rollout]:
    """Decodes one batch of prompts.

    Args:
        model: the target.
        prompts: each ``[p]`` int32, ``p >= 1``. Prompts of similar length need a smaller cache.
        temperatures: one per prompt. 0 is greedy; other rows are sampled among the `top` most probable tokens.
        key: of the batch. Row `i` uses ``fold_in(key, i)``, so it does not depend on the other rows.
        max_new_tokens: per row.
        stop_ids: tokens that end a row.
        top: number of most probable tokens that are returned.
        keep_hidden: also return the target's final hidden states.

    Returns:
        One rollout per prompt, in order.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    longest, is_resized = int(lengths.max()), _is_resized()
    if is_resized:
        capacity, grain = _round_up(longest, _CAPACITY_GRAIN), _PREFILL_GRAIN
    else:
        capacity, grain = _round_up(longest + max_new_tokens, _FIXED_GRAIN), _FIXED_GRAIN
    prompt_hidden, cache = _prefill(model, prompts, lengths, capacity, grain)
    alive = np.arange(len(prompts))
    last = jnp.asarray([prompt[-1] for prompt in prompts], jnp.int32)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(prompts)))
    row_temperatures = jnp.asarray(temperatures, jnp.float32)
    positions = jnp.asarray(lengths - 1, jnp.int32)
    rows: list[list[tuple]] = [[] for _ in prompts]
    stops = np.asarray(stop_ids)
    done = np.zeros(len(prompts), bool)
    for start in range(0, max_new_tokens, _CHECK_EVERY):
        count = min(_CHECK_EVERY, max_new_tokens - start)
        cache = _grow(cache, _round_up(int(lengths[alive].max()) + start + count, _CAPACITY_GRAIN))
        steps = []
        for _ in range(count):
            last, ids, logprobs, hidden, cache = _step(model, last, positions, cache, keys, row_temperatures, top=top)
            positions = positions + 1
            steps.append((last, ids, logprobs, *([hidden] if keep_hidden else [])))
        parts = [np.stack(part) for part in zip(*jax.device_get(steps), strict=True)]
        for slot, row in enumerate(alive):
            if done[row]:
                continue
            ends = np.flatnonzero(np.isin(parts[0][:, slot], stops))
            done[row] = ends.size > 0
            kept = ends[0] + 1 if ends.size else count
            rows[row].append(tuple(part[:kept, slot] for part in parts))
        if done.all():
            break
        slots = _slots_to_keep(done[alive]) if is_resized else None
        if slots is not None:
            alive, taken = alive[slots], jnp.asarray(slots)
            cache = gather_rows(cache, taken)
            last, keys, row_temperatures, positions = (
                jnp.take(x, taken, axis=0) for x in (last, keys, row_temperatures, positions)
            )
    rollouts = []
    for index, (prompt, row, temperature) in enumerate(zip(prompts, rows, temperatures, strict=True)):
        response, ids, logprobs, *written = map(np.concatenate, zip(*row, strict=True))
        hidden = np.concatenate([*prompt_hidden(index), *written]) if keep_hidden else None
        rollouts.append(Rollout(np.asarray(prompt, np.int32), response, ids, logprobs, temperature, hidden))
    return rollouts


@functools.partial(jax.jit, static_argnames="hidden_layers")
def sequence_hidden(
    target: Model, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], hidden_layers: tuple[int, ...] = ()
) -> Float[Array, "B T E"]:
    """Returns the target's hidden states, float32, at all positions of padded sequences.

    Args:
        target: the target.
        tokens: ``[B, T]`` int32.
        lengths: ``[B]`` int32.
        hidden_layers: as in `Model.forward`.
    """
    columns = jnp.arange(tokens.shape[1])
    positions = jnp.where(columns < lengths[:, None], columns, tokens.shape[1])
    cache = target.init_cache(*tokens.shape)
    output = target.hidden_states(tokens, positions, cache, hidden_layers=hidden_layers)
    return output.hidden.astype(jnp.float32)


def with_hidden(rollouts: Sequence[Rollout], target: Model, hidden_layers: tuple[int, ...]) -> list[Rollout]:
    """Returns rollouts with the target's hidden states, float32, of the given layers."""
    found = []
    for rollout in rollouts:
        inputs = rollout.inputs
        tokens = np.zeros((1, _round_up(len(inputs), _CAPACITY_GRAIN)), np.int32)
        tokens[0, : len(inputs)] = inputs
        hidden = sequence_hidden(target, tokens, np.array([len(inputs)]), hidden_layers=hidden_layers)
        found.append(rollout._replace(hidden=np.asarray(hidden[0, : len(inputs)])))
    return found


def batches_by_length(lengths: Sequence[int], batch: int, window: int) -> Iterator[list[int]]:
    """Groups rows into batches of similar length.

    Args:
        lengths: of all rows, in order.
        batch: rows per batch.
        window: rows are sorted by length within this many batches only, which keeps their order roughly.

    Yields:
        The indices of one batch.
    """
    for start in range(0, len(lengths), batch * window):
        chunk = range(start, min(start + batch * window, len(lengths)))
        ordered = sorted(chunk, key=lambda index: (lengths[index], index))
        yield from (ordered[i : i + batch] for i in range(0, len(ordered), batch))


def _prefill(
    model: Model, prompts: Sequence[np.ndarray], lengths: np.ndarray, capacity: int, grain: int
) -> tuple[Callable[[int], list[np.ndarray]], KVCache]:
    """Fills the cache with all tokens but the last, which the first step reads.

    The common prefix of all prompts, such as the system message, is read once. The rest is padded to a multiple of
    `grain`.

    Returns:
        A function that returns a row's hidden states at these tokens in pieces, and the cache.
    """
    shared = _common_prefix(prompts)
    cache = model.init_cache(1, capacity)
    shared_hidden = rest_hidden = None
    if shared:
        positions = np.arange(shared, dtype=np.int32)[None]
        shared_hidden, cache = _extend(model, prompts[0][None, :shared], positions, cache)
    cache = gather_rows(cache, jnp.zeros(len(prompts), jnp.int32))
    rest = _round_up(int(lengths.max()) - 1 - shared, grain)
    if rest:
        tokens = np.zeros((len(prompts), rest), np.int32)
        positions = np.full((len(prompts), rest), capacity, np.int32)
        for row, prompt in enumerate(prompts):
            own = len(prompt) - 1 - shared
            tokens[row, :own] = prompt[shared:-1]
            positions[row, :own] = np.arange(shared, shared + own)
        rest_hidden, cache = _extend(model, tokens, positions, cache)

    def hidden_of(row: int) -> list[np.ndarray]:
        own = int(lengths[row]) - 1 - shared
        pieces = [] if shared_hidden is None else [np.asarray(shared_hidden)[0]]
        # Sliced on the host: on the device every length would be compiled.
        return pieces if rest_hidden is None else [*pieces, np.asarray(rest_hidden)[row, :own]]

    return hidden_of, cache


def _is_resized() -> bool:
    """Returns whether the cache grows and is compacted; see above."""
    return jax.default_backend() == "cpu"


def _common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Returns how many first tokens all prompts share, without the last token of any."""
    shortest = min(len(prompt) for prompt in prompts) - 1
    stacked = np.stack([prompt[:shortest] for prompt in prompts])
    same = (stacked == stacked[0]).all(axis=0)
    return int(shortest if same.all() else np.argmin(same))


def _round_up(length: int, grain: int) -> int:
    return -(-length // grain) * grain


def _grow(cache: KVCache, capacity: int) -> KVCache:
    extra = capacity - cache.capacity
    if extra <= 0:
        return cache
    keys, values = jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, extra if axis == 2 else 0) for axis in range(leaf.ndim)]), cache[:2]
    )
    return cache._replace(keys=keys, values=values)


def _slots_to_keep(done: np.ndarray) -> np.ndarray | None:
    """Returns the slots that remain if a quarter of the batch or more can be dropped, else None."""
    batch = len(done)
    unit = max(1, batch // 4)
    target = _round_up(max(1, int((~done).sum())), unit)
    if target >= batch:
        return None
    # Finished rows fill the last unit.
    return np.concatenate([np.flatnonzero(~done), np.flatnonzero(done)])[:target]
