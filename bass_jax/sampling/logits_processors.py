"""What is done to logits before they become a distribution: bias, penalties, bans, and functions of the user's own.

All of it depends on the tokens before a position, so inside a step it is done position by position: a penalty that
stood still over the window would give the target another distribution than the one that regular decoding draws from.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from bass_jax.runtime.imports import import_attribute
from bass_jax.sampling.params import Penalties, ProcessorArrays
from bass_jax.typing import Array, Float, Int

type LogitsProcessor = Callable[[Array, Array, Array], Array]
"""``(logits [V], tokens [C], position) -> logits [V]``: pure; the logits are those of the token at `position`, and
``tokens[:position]`` is all that came before, prompt included; past them it holds -1."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsProcessors:
    """Adjusts logits in this order: bias, penalties, minimum length, the user's processors.

    Attributes:
        adjustments: per row; None for none.
        prompt_lengths: ``[B]`` int32.
        stop_tokens: ``[B, E]`` int32, padded with -1.
        processors: static; each is called for every row and position.
    """

    processor_arrays: ProcessorArrays | None
    prompt_lengths: Array
    stop_tokens: Array
    processors: tuple[LogitsProcessor, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing; static."""
        return self.processor_arrays is None and not self.processors

    def __call__(
        self, logits: Float[Array, "B T V"], tokens: Int[Array, "B C"], lengths: Int[Array, "B"]
    ) -> Float[Array, "B T V"]:
        """Adjusts the logits of the tokens at positions ``lengths[b]`` to ``lengths[b] + T - 1``.

        Args:
            logits: position ``t`` of row ``b`` follows ``tokens[b, :lengths[b] + t]``.
            tokens: committed tokens and the window's drafts after them; the rest is never read.
            lengths: tokens before the window.
        """
        if self.is_identity:
            return logits
        logits = logits.astype(jnp.float32)
        positions = lengths[:, None] + jnp.arange(logits.shape[1])
        bias, penalties, min_new_tokens = self.processor_arrays or (None, None, None)
        if bias is not None:
            logits = logits + bias[:, None]
        if penalties is not None:
            logits = _penalize(logits, penalties, tokens, self.prompt_lengths, lengths)
        if min_new_tokens is not None:
            is_early = positions - self.prompt_lengths[:, None] < min_new_tokens[:, None]
            is_stop = _count(self.stop_tokens, self.stop_tokens >= 0, logits.shape[-1]) > 0
            logits = jnp.where(is_early[..., None] & is_stop[:, None], -jnp.inf, logits)
        if self.processors:
            logits = self._process(logits, tokens, positions)
        return logits

    def _process(self, logits: Array, tokens: Array, positions: Array) -> Array:
        slots = jnp.arange(tokens.shape[1])

        def process(logits, tokens, position):
            so_far = jnp.where(slots < position, tokens, -1)
            for processor in self.processors:
                processed = processor(logits, so_far, position)
                if processed.shape != logits.shape:
                    raise ValueError(
                        f"logits_processors: {processor!r} returned shape {processed.shape}: expected {logits.shape}"
                    )
                logits = processed.astype(jnp.float32)
            return logits

        over_window = jax.vmap(process, in_axes=(0, None, 0))
        return jax.vmap(over_window)(logits, tokens, positions)


def find_processors(processors: Sequence[LogitsProcessor | str]) -> tuple[LogitsProcessor, ...]:
    """Returns the functions that ``SpecConfig.logits_processors`` names.

    Raises:
        ValueError: if a name leads nowhere, or what it names cannot be called.
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
    """Repetition over prompt and output, frequency and presence over the output alone."""
    vocab_size = logits.shape[-1]
    slots = jnp.arange(tokens.shape[1])
    is_before = slots < lengths[:, None]
    is_output = is_before & (slots >= prompt_lengths[:, None])
    repetition, frequency, presence = (jnp.asarray(penalty)[:, None, None] for penalty in penalties)
    # The window's own tokens: position t follows the first t of them.
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
    """How often each token occurs where `is_counted`."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    columns = jnp.where(is_counted, tokens, vocab_size)
    return jnp.zeros((tokens.shape[0], vocab_size), jnp.float32).at[rows, columns].add(1.0, mode="drop")
