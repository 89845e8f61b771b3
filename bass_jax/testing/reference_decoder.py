"""Batched speculative decoding in the most obvious way: plain Python and NumPy, no cache, one token list per row.

The tests compare the real decoder with it token by token. Read it first to learn what the real decoder computes.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models.protocol import TargetModel
from bass_jax.sampling.keys import Role, draw_keys, gumbel, position_keys, row_keys, step_draft_keys, uniform
from bass_jax.testing.enumeration import reference_distribution
from bass_jax.typing import Array, Key

type LogitsFunction = Callable[[list[int]], np.ndarray]
"""Returns the logits ``[V]`` of the token after a list of tokens."""


def logits_function(model: TargetModel, capacity: int = 64) -> LogitsFunction:
    """Returns a function that runs `model` on all tokens, with an empty cache, each time that it is called."""
    forward = jax.jit(lambda tokens, positions: model.forward(tokens, positions, model.init_cache(1, capacity)).logits)

    def logits(tokens: list[int]) -> np.ndarray:
        slots = np.arange(capacity)
        padded = np.zeros((1, capacity), np.int32)
        padded[0, : len(tokens)] = tokens
        positions = np.where(slots < len(tokens), slots, capacity)[None].astype(np.int32)
        return np.asarray(forward(padded, positions)[0, len(tokens) - 1], np.float64)

    return logits


def reference_decode(
    target: LogitsFunction,
    draft: LogitsFunction,
    prompts: Sequence[Sequence[int]],
    *,
    draft_len: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    key: Key[Array, ""] | None = None,
    stop_tokens: Sequence[int] = (),
) -> list[list[int]]:
    """Decodes with the token rule; every row runs its own steps, because rows do not depend on each other.

    With the same key the tokens are those of `bass_jax.generate` with ``SpecConfig(draft_len, "token")``, a
    `ModelDrafter` and one temperature for all rows.

    Args:
        target: the target model.
        draft: the draft model, with the same vocabulary.
        prompts: token ids.
        draft_len: largest number of drafts per step; 0 is regular decoding.
        max_new_tokens: limit of each row.
        temperature: 0 is greedy.
        key: default ``jax.random.key(0)``.
        stop_tokens: a row ends with the first of these tokens.

    Returns:
        The new tokens of each row.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
    """
    keys = row_keys(jax.random.key(0) if key is None else key, jnp.arange(len(prompts), dtype=jnp.uint32))
    outputs = []
    for row, prompt in enumerate(prompts):
        tokens, step = list(prompt), 0
        while not _has_finished(tokens[len(prompt) :], max_new_tokens, stop_tokens):
            if draft_len == 0:
                position = position_keys(keys[row : row + 1], jnp.array([len(tokens)], jnp.int32), 1)[:, 0]
                emitted = [_sample(_distribution(target(tokens), temperature), position)]
            else:  # A step emits one token more than it accepts.
                num_drafts = min(draft_len, len(prompt) + max_new_tokens - len(tokens) - 1)
                emitted = _speculate(target, draft, tokens, num_drafts, temperature, keys[row : row + 1], step)
            for token in emitted:
                tokens.append(token)
                if token in stop_tokens:
                    break
            step += 1
        outputs.append(tokens[len(prompt) :])
    return outputs


def _has_finished(output: list[int], max_new_tokens: int, stop_tokens: Sequence[int]) -> bool:
    return len(output) >= max_new_tokens or (bool(output) and output[-1] in stop_tokens)


def _speculate(
    target: LogitsFunction,
    draft: LogitsFunction,
    tokens: list[int],
    num_drafts: int,
    temperature: float,
    key: Key[Array, "1"],
    step: int,
) -> list[int]:
    """Returns the tokens that one step emits: the accepted drafts, and one more token."""
    counter = jnp.array([step], jnp.int32)
    drafts: list[int] = []
    draft_probs: list[np.ndarray] = []
    for draft_key in step_draft_keys(key, counter, num_drafts)[0]:
        probs = _distribution(draft(tokens + drafts), temperature)
        drafts.append(_sample(probs, draft_key[None]))
        draft_probs.append(probs)
    target_probs = [_distribution(target(tokens + drafts[:i]), temperature) for i in range(num_drafts + 1)]

    uniforms = np.asarray(uniform(draw_keys(key, counter, Role.ACCEPT), num_drafts), np.float64)[0]
    residual_key = draw_keys(key, counter, Role.RESIDUAL)
    for i, token in enumerate(drafts):
        if uniforms[i] * draft_probs[i][token] > target_probs[i][token] or target_probs[i][token] == 0:
            residual = np.maximum(target_probs[i] - draft_probs[i], 0)
            return [*drafts[:i], _sample(residual if residual.any() else target_probs[i], residual_key)]
    return [*drafts, _sample(target_probs[num_drafts], residual_key)]


def _distribution(logits: np.ndarray, temperature: float) -> np.ndarray:
    return reference_distribution(logits, temperature=temperature)


def _sample(probs: np.ndarray, key: Key[Array, "1"]) -> int:
    """Samples with the Gumbel-max trick."""
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(probs) + np.asarray(gumbel(key, len(probs)), np.float64)[0]))
