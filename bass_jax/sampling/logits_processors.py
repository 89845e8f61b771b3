"""Logits processors: bias, bans, penalties, minimum length, grammars and the user's functions, before sampling.

Penalties and processors depend on the tokens before a position. A step therefore applies them position by position,
each with the drafts before it. Otherwise the target's distribution would differ from that of regular decoding.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from bass_jax.runtime.files import one_line
from bass_jax.runtime.imports import import_attribute
from bass_jax.sampling.grammar import allowed_tokens
from bass_jax.sampling.params import Penalties, ProcessorArrays
from bass_jax.typing import Array, Float, Int

type LogitsProcessor = Callable[[Array, Array, Array], Array]
"""A pure function ``(logits [V], tokens [C], position) -> logits [V]``. The logits are those of the token at
`position`; ``tokens[:position]`` are the prompt and output before it, and later entries are -1."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsProcessors:
    """Processes logits in this order: bias and bans, penalties, minimum length, grammars, the user's functions.

    Attributes:
        processor_arrays: settings per row; None if no row has any.
        prompt_lengths: ``[B]`` int32.
        stop_tokens: ``[B, num]`` int32, padded with -1.
        processors: static; the user's functions, each called for every row and position.
    """

    processor_arrays: ProcessorArrays | None
    prompt_lengths: Array
    stop_tokens: Array
    processors: tuple[LogitsProcessor, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def is_identity(self) -> bool:
        """Whether logits are returned unchanged; static."""
        return self.processor_arrays is None and not self.processors

    def __call__(
        self, logits: Float[Array, "B T V"], tokens: Int[Array, "B C"], lengths: Int[Array, "B"]
    ) -> Float[Array, "B T V"]:
        """Processes the logits of the tokens at positions ``lengths[b]`` to ``lengths[b] + T - 1``.

        Args:
            logits: those at ``[b, t]`` follow ``tokens[b, :lengths[b] + t]``.
            tokens: the committed tokens, then the drafts of this step; later entries are not read.
            lengths: number of committed tokens.
        """
        if self.is_identity:
            return logits
        logits = logits.astype(jnp.float32)
        positions = lengths[:, None] + jnp.arange(logits.shape[1])
        bias, penalties, min_new_tokens, grammars = self.processor_arrays or ProcessorArrays()
        if bias is not None:
            logits = logits + bias[:, None]
        if penalties is not None:
            logits = _penalize(logits, penalties, tokens, self.prompt_lengths, lengths)
        if min_new_tokens is not None:
            is_early = positions - self.prompt_lengths[:, None] < min_new_tokens[:, None]
            is_stop = _count(self.stop_tokens, self.stop_tokens >= 0, logits.shape[-1]) > 0
            logits = jnp.where(is_early[..., None] & is_stop[:, None], -jnp.inf, logits)
        if grammars is not None:
            num_positions, vocab_size = logits.shape[1:]
            allowed = allowed_tokens(
                jnp.asarray(grammars), tokens, self.prompt_lengths, lengths, num_positions, vocab_size
            )
            logits = jnp.where(allowed, logits, -jnp.inf)
        if self.processors:
            logits = self._process(logits, tokens, positions)
        return logits

    def _process(self, logits: Array, tokens: Array, positions: Array) -> Array:
        slots = jnp.arange(tokens.shape[1])

        def process(logits, tokens, position):
            so_far = jnp.where(slots < position, tokens, -1)
            for processor in self.processors:
                processed = _call(processor, logits, so_far, position)
                if processed.shape != logits.shape:
                    raise ValueError(
                        f"logits_processors: {processor!r} returned shape {processed.shape}: expected {logits.shape}"
                    )
                logits = processed.astype(jnp.float32)
            return logits

        over_window = jax.vmap(process, in_axes=(0, None, 0))
        return jax.vmap(over_window)(logits, tokens, positions)


def _call(processor: LogitsProcessor, logits: Array, tokens: Array, position: Array) -> Array:
    """Calls a user's function during tracing, where any mistake in it is an exception of some type."""
    try:
        return jnp.asarray(processor(logits, tokens, position))
    except Exception as error:
        name = getattr(processor, "__name__", repr(processor))
        raise ValueError(
            f"logits_processors: {name}: expected a function (logits, tokens, position) -> logits that jax can trace: "
            f"{one_line(error)}"
        ) from error


def find_processors(processors: Sequence[LogitsProcessor | str]) -> tuple[LogitsProcessor, ...]:
    """Returns the functions that ``SpecConfig.logits_processors`` names.

    Raises:
        ValueError: if a name cannot be imported or is not a function.
    """
    found = []
    for processor in processors:
        function = import_attribute(processor, "logits_processors") if isinstance(processor, str) else processor
        if not callable(function):
            raise ValueError(f"logits_processors={processor!r}: expected a function (logits, tokens, position)")
        found.append(function)
    return tuple(found)


def _penalize(
    logits: Array, penalties: Penalties, tokens: Array, prompt_lengths: Array, lengths: Array
) -> Float[Array, "B T V"]:
    """Applies the repetition penalty for prompt and output, and frequency and presence penalties for the output."""
    vocab_size = logits.shape[-1]
    slots = jnp.arange(tokens.shape[1])
    is_before = slots < lengths[:, None]
    is_output = is_before & (slots >= prompt_lengths[:, None])
    repetition, frequency, presence = (jnp.asarray(penalty)[:, None, None] for penalty in penalties)
    # The drafts: the logits at position t follow the first t of them.
    columns = lengths[:, None] + jnp.arange(logits.shape[1] - 1)
    window = jnp.take_along_axis(tokens, jnp.minimum(columns, tokens.shape[1] - 1), axis=1)
    in_window = jnp.cumsum(jax.nn.one_hot(window, vocab_size, dtype=jnp.float32), axis=1)
    in_window = jnp.pad(in_window, ((0, 0), (1, 0), (0, 0)))
    num_seen = _count(tokens, is_before, vocab_size)[:, None] + in_window
    num_emitted = _count(tokens, is_output, vocab_size)[:, None] + in_window
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(num_seen > 0, repeated, logits)
    return logits - frequency * num_emitted - presence * (num_emitted > 0)


def _count(tokens: Int[Array, "B C"], is_counted: Array, vocab_size: int) -> Float[Array, "B V"]:
    """Counts how often each token occurs where `is_counted`."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    columns = jnp.where(is_counted, tokens, vocab_size)
    return jnp.zeros((tokens.shape[0], vocab_size), jnp.float32).at[rows, columns].add(1.0, mode="drop")
