"""Sampling settings: `SamplingParams` is what a user sets, `SamplingArrays` its traced arrays, one value per row."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bass_jax.runtime.checks import check_kind, check_per_row, check_sequence, check_tokens
from bass_jax.sampling.grammar import Grammar, check_grammars
from bass_jax.typing import Array

Setting = float | int | Sequence[float | int] | np.ndarray
"""One value for all rows, or one per row."""

TokenSet = Sequence[int] | np.ndarray | Sequence[Sequence[int] | np.ndarray | None] | None
"""Token ids for all rows, or a sequence of them (or None) per row."""


class Penalties(NamedTuple):
    """Penalties on tokens that occurred before, one value per row."""

    repetition: Array | np.ndarray  # [B] float32, 1 = off
    frequency: Array | np.ndarray  # [B] float32, 0 = off
    presence: Array | np.ndarray  # [B] float32, 0 = off


class ProcessorArrays(NamedTuple):
    """Settings of `bass_jax.sampling.logits_processors.LogitsProcessors`; None for one that no row uses."""

    bias: Array | np.ndarray | None = None  # [B, V] float32, -inf = banned
    penalties: Penalties | None = None
    min_new_tokens: Array | np.ndarray | None = (
        None  # [B] int32, tokens that a row emits before a stop token is allowed
    )
    grammars: Array | np.ndarray | None = None  # [B] int32, `Grammar.index`; -1 = none


class SamplingArrays(NamedTuple):
    """Settings of the sampled distribution, one value per row. Changing a value does not recompile."""

    temperature: Array | np.ndarray  # [B] float32, 0 = greedy
    top_k: Array | np.ndarray  # [B] int32, 0 = off
    top_p: Array | np.ndarray  # [B] float32, 1 = off
    min_p: Array | np.ndarray  # [B] float32, 0 = off
    processor_arrays: ProcessorArrays | None = None


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled.

    Each setting is one value for all rows, or a sequence with one value per row. Bias, bans, penalties, the minimum
    length and the grammar are applied to the logits first, then temperature, top-k, top-p and min-p. Settings have the
    meaning that they have in `transformers`; frequency and presence penalties have that of OpenAI's API.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keeps the k most probable tokens; 0 keeps all.
        top_p: keeps the smallest set of most probable tokens whose probabilities add up to this; 1 keeps all.
        min_p: keeps tokens with at least this fraction of the largest probability; 0 keeps all.
        repetition_penalty: above 0. Divides the positive logits of tokens in prompt or output, and multiplies the
            negative ones. 1 is off.
        frequency_penalty: subtracted from a token's logit for each time the row has emitted it; 0 is off.
        presence_penalty: subtracted from the logits of tokens that the row has emitted; 0 is off.
        logit_bias: token id → number that is added to its logit; ``-inf`` bans the token.
        allowed_tokens: token ids; all others are banned. None allows all.
        banned_tokens: token ids.
        min_new_tokens: number of tokens that a row emits before a stop token is allowed. Stop strings can still end it.
        grammar: what the output must be, such as JSON of a schema; see `bass_jax.sampling.Grammar`.
    """

    temperature: Setting = 0.0
    top_k: Setting = 0
    top_p: Setting = 1.0
    min_p: Setting = 0.0
    repetition_penalty: Setting = 1.0
    frequency_penalty: Setting = 0.0
    presence_penalty: Setting = 0.0
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None
    allowed_tokens: TokenSet = None
    banned_tokens: TokenSet = None
    min_new_tokens: Setting = 0
    grammar: Grammar | Sequence[Grammar | None] | None = None

    def __post_init__(self):
        checks = {
            "temperature": (lambda x: x >= 0 and math.isfinite(x), "a finite number of at least 0"),
            "top_k": (lambda x: x >= 0 and float(x).is_integer(), "a whole number of at least 0"),
            "top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
            "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
            "repetition_penalty": (lambda x: x > 0 and math.isfinite(x), "a finite number above 0"),
            "frequency_penalty": (math.isfinite, "a finite number"),
            "presence_penalty": (math.isfinite, "a finite number"),
            "min_new_tokens": (lambda x: x >= 0 and float(x).is_integer(), "a whole number of at least 0"),
        }
        for name, (is_valid, expected) in checks.items():
            for value in np.ravel(check_per_row(name, getattr(self, name))):
                if not is_valid(value):
                    raise ValueError(f"{name}={value}: expected {expected}")
        bias: Any = self.logit_bias
        rows: Any = bias if isinstance(bias, list | tuple) and bias else [bias]
        for row in rows:
            check_kind("logit_bias", row, Mapping | None, "a mapping of token ids to numbers, or one per row")
            for value in (row or {}).values():
                if not isinstance(value, int | float) or math.isnan(value) or value == math.inf:
                    raise ValueError(f"logit_bias={value!r}: expected a finite number or -inf")
        for name in ("allowed_tokens", "banned_tokens"):
            if getattr(self, name) is not None:
                check_sequence(name, getattr(self, name), "token ids, or token ids per row")

    @property
    def is_greedy(self) -> bool:
        """Whether all temperatures are 0."""
        return not np.any(np.asarray(self.temperature))

    def sampling_arrays(self, num_rows: int, vocab_size: int, num_padding: int = 0) -> SamplingArrays:
        """Returns the settings as arrays with one value per row.

        Args:
            num_rows: number of requests.
            vocab_size: V of the target.
            num_padding: number of padding rows after them, for which every setting is off.

        Raises:
            ValueError: if a setting has another number of values than `num_rows`, a token is outside the vocabulary, or
                all tokens are banned in a row.
        """

        def spread(name: str, dtype, off: float | int) -> np.ndarray:
            value = check_per_row(name, getattr(self, name), num_rows).astype(dtype)
            return np.concatenate([np.broadcast_to(value, (num_rows,)), np.full(num_padding, off, dtype)])

        penalties = Penalties(
            repetition=spread("repetition_penalty", np.float32, 1),
            frequency=spread("frequency_penalty", np.float32, 0),
            presence=spread("presence_penalty", np.float32, 0),
        )
        min_new_tokens = spread("min_new_tokens", np.int32, 0)
        grammars = check_grammars(self.grammar, num_rows)
        indices = [-1 if grammar is None else grammar.index for grammar in grammars]
        processor_arrays = ProcessorArrays(
            bias=self._bias(num_rows, vocab_size, num_padding),
            penalties=penalties if _is_any(penalties, (1, 0, 0)) else None,
            min_new_tokens=min_new_tokens if min_new_tokens.any() else None,
            grammars=np.asarray([*indices, *[-1] * num_padding], np.int32) if any(grammars) else None,
        )
        return SamplingArrays(
            temperature=spread("temperature", np.float32, 0),
            top_k=spread("top_k", np.int32, 0),
            top_p=spread("top_p", np.float32, 1),
            min_p=spread("min_p", np.float32, 0),
            processor_arrays=None if all(part is None for part in processor_arrays) else processor_arrays,
        )

    def _bias(self, num_rows: int, vocab_size: int, num_padding: int) -> np.ndarray | None:
        """Returns bias and bans as one array ``[rows, V]``, or None if there are none."""
        biases, allowed, banned = (
            _per_row(getattr(self, name), name, num_rows) for name in ("logit_bias", "allowed_tokens", "banned_tokens")
        )
        if all(value is None for value in (*biases, *allowed, *banned)):
            return None
        total = np.zeros((num_rows + num_padding, vocab_size), np.float32)
        for row in range(num_rows):
            if biases[row] is not None:
                tokens = _check_tokens(list(biases[row]), "logit_bias", vocab_size)
                total[row, tokens] += np.fromiter(biases[row].values(), np.float32)
            if allowed[row] is not None:
                is_banned = np.ones(vocab_size, bool)
                is_banned[_check_tokens(allowed[row], "allowed_tokens", vocab_size)] = False
                total[row, is_banned] = -np.inf
            if banned[row] is not None:
                total[row, _check_tokens(banned[row], "banned_tokens", vocab_size)] = -np.inf
            if np.isneginf(total[row]).all():
                raise ValueError(f"row {row}: logit_bias, allowed_tokens and banned_tokens ban all tokens")
        return total


def _is_any(penalties: Penalties, off: tuple[int, ...]) -> bool:
    return any((values != value).any() for values, value in zip(penalties, off, strict=True))


def _per_row(value: Any, name: str, num_rows: int) -> list:
    """Returns one mapping, sequence of tokens or None per row."""
    items = () if value is None or isinstance(value, Mapping) else value
    if not any(item is None or isinstance(item, Mapping | Sequence | np.ndarray) for item in items):
        return [value] * num_rows
    if len(items) != num_rows:
        raise ValueError(f"{name} has {len(items)} values: expected one for all or {num_rows}, one per row")
    return list(items)


def _check_tokens(tokens: Any, name: str, vocab_size: int) -> np.ndarray:
    return check_tokens(name, tokens, vocab_size)
