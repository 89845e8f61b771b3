"""What the next step needs, and what only the analyst needs."""

import enum
from typing import Any, NamedTuple

import numpy as np

from bass_jax.models.kv_cache import KVCache, PagedCache
from bass_jax.runtime.checks import check_integer, check_kind
from bass_jax.sampling import SamplingArrays
from bass_jax.typing import Array


class FinishReason(enum.IntEnum):
    """Why a row emits no more."""

    RUNNING = 0
    STOP = 1  # a stop token or a stop string
    LENGTH = 2  # its token limit
    NOT_FINITE = 3  # the target's logits held NaN or infinity: nothing was emitted from them
    INACTIVE = 4  # never a request: it pads the batch to its bucket
    NO_TOKEN = 5  # bans and processors left no token that could be emitted
    NOT_GREEDY = 6  # the rule decodes greedily and the row's temperature is not 0: nothing was emitted


class SpecState(NamedTuple):
    """The rows of a batch; row ``b`` has committed ``tokens[b, :lengths[b]]``.

    The target's cache holds all but the last committed token, which the next pass reads first.
    """

    tokens: Array  # [B, C] int32, prompt and output, right-padded
    lengths: Array  # [B] int32, committed tokens
    prompt_lengths: Array  # [B] int32
    limits: Array  # [B] int32, `lengths` never exceeds it
    finish: Array  # [B] int32, `FinishReason`
    keys: Array  # [B] key, the row's own
    num_steps: Array  # [B] int32, steps the row took part in; counts the noise of rejection rules
    draft_lens: Array  # [B] int32, drafts wanted per step, at most the bucket's
    sampling_arrays: SamplingArrays  # per row
    stop_tokens: Array  # [B, E] int32, padded with -1
    target_cache: KVCache | PagedCache  # capacity C
    drafter: Any  # the drafter's own state
    min_confidence: Array | None = None  # [B] float32, drafts that are less sure are not drafted; None: all are

    @property
    def done(self) -> Array:
        """``[B]`` bool: the row emits no more."""
        return self.finish != FinishReason.RUNNING


class DraftRecord(NamedTuple):
    """What decided over the drafts of a step; slots past ``num_drafted`` mean nothing."""

    target_logprobs: (
        Array  # [B, G] float32, of the draft under the target's distribution as warped; -inf at probability 0
    )
    draft_logprobs: (
        Array  # [B, G] float32, under the distribution that it was drawn from; 0 if the drafter is deterministic
    )
    accept_draws: Array  # [B, G] float32, the uniform draws of rules that draw
    confidence: Array | None  # [B, G] float32, the draft's most probable probability there; None: not known


class TokenLogprobs(NamedTuple):
    """Emitted tokens under the distribution that they were drawn from, and the n most probable tokens of both
    distributions.

    The warped distribution is that after adjustments, temperature, top-k, top-p and min-p; tokens of probability 0 have
    a log-probability of -inf.
    """

    warped_logprobs: Array  # [B, T] float32, of the emitted tokens
    raw_top_tokens: Array  # [B, T, n] int32, most probable first
    raw_top_logprobs: Array  # [B, T, n] float32
    warped_top_tokens: Array  # [B, T, n] int32
    warped_top_logprobs: Array  # [B, T, n] float32


class StepInfo(NamedTuple):
    """What one step did; T is 1 for a regular step, else the bucket's ``G + 1``."""

    is_active: Array  # [B] bool, the row took part
    tokens: Array  # [B, T] int32, emitted tokens, then -1
    num_emitted: Array  # [B] int32
    num_accepted: Array  # [B] int32, drafts that the rule accepted, before a stop cuts the row
    num_drafted: Array  # [B] int32
    logprobs: Array  # [B, T] float32, of emitted tokens under the target's raw distribution; 0 past them
    finish: Array  # [B] int32, `FinishReason` after the step
    drafts: DraftRecord | None = None  # of each draft, where ``SpecConfig.record_drafts`` asks for it
    token_logprobs: TokenLogprobs | None = None  # with `SpecConfig.num_logprobs`; means nothing past the emitted tokens
    width: Array | None = None  # [] int32, positions per row that the target computed; None: T


def output_tokens(state: SpecState, row: int) -> np.ndarray:
    """Returns what `row` has emitted, its stop token included: ``[num]`` int32.

    Raises:
        ValueError: if there is no such row.
    """
    check_kind("state", state, SpecState)
    row = check_integer("row", row, 0, len(state.lengths) - 1)
    start, end = int(state.prompt_lengths[row]), int(state.lengths[row])
    return np.asarray(state.tokens[row, start:end])
