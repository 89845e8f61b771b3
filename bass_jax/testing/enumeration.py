"""Enumerates the distribution of all continuations of a prompt over a small vocabulary, in float64.

It shares no code with the decoder's sampling functions, so that it can be compared with them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bass_jax.models.protocol import TargetModel, forward
from bass_jax.sampling.grammar import Grammar

CAPACITY = 64
"""Capacity of the caches."""


def continuation_distribution(
    target: TargetModel,
    prompt: Sequence[int],
    setting: Mapping[str, Any],
    num_tokens: int,
    stop_tokens: Sequence[int] = (),
    logits_processors: Sequence[Callable] = (),
) -> np.ndarray:
    """Returns the probability of every sequence of `num_tokens` tokens after `prompt`, ``[V ** num_tokens]``.

    Args:
        target: the model.
        prompt: token ids.
        setting: fields of `bass_jax.SamplingParams`, one value each.
        num_tokens: length of the sequences, at least 2.
        stop_tokens: all tokens after one of these are counted as token 0.
        logits_processors: as in `bass_jax.SpecConfig`.
    """
    vocab_size = target.vocab_size
    prefixes = np.array(list(itertools.product(range(vocab_size), repeat=num_tokens - 1)))
    logits = _teacher_forced(target, prompt, prefixes)
    joint = np.ones((len(prefixes), 1))
    for i in range(num_tokens):
        processed = _processed(logits[:, i], prompt, prefixes[:, :i], setting, stop_tokens)
        for processor in logits_processors:
            processed = _with_processor(processor, processed, prompt, prefixes[:, :i])
        warps = {name: setting[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in setting}
        distribution = reference_distribution(processed, **warps)
        has_ended = np.isin(prefixes[:, :i], stop_tokens).any(axis=1)
        distribution[has_ended] = np.eye(vocab_size)[0]
        joint = joint * (
            distribution if i == num_tokens - 1 else distribution[np.arange(len(distribution)), prefixes[:, i]][:, None]
        )
    return joint.reshape(-1)


def reference_distribution(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Returns what `bass_jax.sampling.token_distribution` computes for `logits` ``[..., V]``, by sorting in float64.

    All tokens that are equal at a threshold are kept.
    """
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(logits.shape[-1])[logits.argmax(axis=-1)]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    if top_k:
        smallest = np.sort(scaled, axis=-1)[..., -min(int(top_k), scaled.shape[-1]), None]
        scaled = np.where(scaled >= smallest, scaled, -np.inf)
    probs = np.exp(scaled)
    probs /= probs.sum(axis=-1, keepdims=True)
    if top_p < 1:
        descending = -np.sort(-probs, axis=-1)
        is_reached = descending.cumsum(axis=-1) >= top_p - 1e-12
        smallest = np.take_along_axis(descending, is_reached.argmax(axis=-1)[..., None], axis=-1)
        probs = np.where(probs >= smallest, probs, 0)
    probs = np.where(probs >= min_p * probs.max(axis=-1, keepdims=True), probs, 0)
    return probs / probs.sum(axis=-1, keepdims=True)


def _processed(
    logits: np.ndarray, prompt: Sequence[int], outputs: np.ndarray, setting: Mapping[str, Any], stop_tokens
) -> np.ndarray:
    """Applies bias, bans, penalties and minimum length to ``[prefixes, V]`` after `outputs` ``[prefixes, i]``."""
    logits = np.array(logits, np.float64)
    vocab_size = logits.shape[-1]
    for token, bias in (setting.get("logit_bias") or {}).items():
        logits[:, token] += bias
    if (allowed := setting.get("allowed_tokens")) is not None:
        logits[:, np.setdiff1d(np.arange(vocab_size), allowed)] = -np.inf
    if (banned := setting.get("banned_tokens")) is not None:
        logits[:, list(banned)] = -np.inf
    num_emitted = (outputs[:, :, None] == np.arange(vocab_size)).sum(axis=1)
    is_seen = (num_emitted > 0) | np.isin(np.arange(vocab_size), prompt)
    penalty = setting.get("repetition_penalty", 1.0)
    logits = np.where(is_seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)
    logits -= setting.get("frequency_penalty", 0.0) * num_emitted
    logits -= setting.get("presence_penalty", 0.0) * (num_emitted > 0)
    if outputs.shape[1] < setting.get("min_new_tokens", 0):
        logits[:, list(stop_tokens)] = -np.inf
    if (grammar := setting.get("grammar")) is not None:
        logits = np.where([_allowed(grammar, output, vocab_size) for output in outputs.tolist()], logits, -np.inf)
    return logits


def _allowed(grammar: Grammar, output: list[int], vocab_size: int) -> np.ndarray:
    """Returns which tokens may follow; all of them if the grammar does not allow `output`, which has probability 0."""
    matcher = grammar.new_matcher()
    if matcher.try_consume_tokens(output) != len(output) or matcher.stop_reason() == "EndOfSentence":
        return np.ones(vocab_size, bool)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.pad(bits, (0, max(0, vocab_size - len(bits))))[:vocab_size].astype(bool)


def _with_processor(processor: Callable, logits: np.ndarray, prompt: Sequence[int], outputs: np.ndarray) -> np.ndarray:
    position = len(prompt) + outputs.shape[1]
    tokens = np.full((len(outputs), CAPACITY), -1, np.int32)
    tokens[:, : len(prompt)] = prompt
    tokens[:, len(prompt) : position] = outputs
    process = jax.vmap(processor, in_axes=(0, 0, None))
    return np.asarray(process(logits.astype(np.float32), tokens, position), np.float64)


def _teacher_forced(target: TargetModel, prompt: Sequence[int], prefixes: np.ndarray) -> np.ndarray:
    """Returns the target's logits at every token, ``[prefixes, num_tokens, V]``, in one pass with an empty cache."""
    num_read = len(prompt) + prefixes.shape[1]
    tokens = np.zeros((len(prefixes), CAPACITY), np.int32)
    tokens[:, : len(prompt)] = prompt
    tokens[:, len(prompt) : num_read] = prefixes
    slots = np.arange(CAPACITY)
    positions = np.broadcast_to(np.where(slots < num_read, slots, CAPACITY).astype(np.int32), tokens.shape)
    output = jax.jit(forward)(target, tokens, positions, target.init_cache(len(tokens), CAPACITY))
    return np.asarray(output.logits)[:, len(prompt) - 1 : num_read]
