"""The state of a batch between two steps, and the report of a step."""

import enum
from typing import Any, NamedTuple

import numpy as np

from bass_jax.runtime.checks import check_integer, check_kind
from bass_jax.sampling import SamplingArrays
from bass_jax.typing import Array


class FinishReason(enum.IntEnum):
    """Why a row has finished."""

    RUNNING = 0
    STOP = 1  # a stop token or a stop string
    LENGTH = 2  # its token limit
    NOT_FINITE = 3  # the target's logits contained NaN or infinity; no token was sampled from them
    INACTIVE = 4  # the row holds no request
    NO_TOKEN = 5  # the logits processors left no token with a probability above 0
    NOT_GREEDY = 6  # the rule decodes greedily, but the row's temperature is not 0; no token was emitted


class SpecState(NamedTuple):
    """The state of a batch between two steps. Row ``b`` has committed ``tokens[b, :lengths[b]]``.

    The target's cache holds all committed tokens except the last one, which is the first input of the next pass. The
    later entries of the cache are those of rejected drafts. They need no clearing, because no query reads past its own
    position, and the next passes overwrite them.
    """

    tokens: Array  # [B, C] int32, prompt and output, padded on the right
    lengths: Array  # [B] int32, committed tokens
    prompt_lengths: Array  # [B] int32
    limits: Array  # [B] int32, the length at which the row ends
    finish: Array  # [B] int32, `FinishReason`
    keys: Array  # [B] key
    num_steps: Array  # [B] int32, steps that the row took part in; rejection rules fold it into the key
    draft_lens: Array  # [B] int32, drafts wanted in the next step; set by prefill or a policy
    sampling_arrays: SamplingArrays
    stop_tokens: Array  # [B, num] int32, padded with -1
    target_cache: Any  # the target's own pytree; the arrays have the first axis B, unless it is a `PagedCache`
    drafter_state: Any  # what the drafter keeps between steps, such as its cache
    min_confidence: Array | None = None  # [B] float32, a row stops before the first draft below it; None: never

    @property
    def done(self) -> Array:
        """``[B]`` bool, whether each row has finished."""
        return self.finish != FinishReason.RUNNING


class DraftRecord(NamedTuple):
    """The probabilities and random numbers that decided on the drafts of a step.

    Entries past ``num_drafted`` are arbitrary.
    """

    target_logprobs: Array  # [B, G] float32, under the target's warped distribution; -inf for probability 0
    draft_logprobs: Array  # [B, G] float32, under the drafter's distribution; 0 if it is deterministic
    accept_draws: Array  # [B, G] float32, the uniform random numbers of rejection rules
    confidence: Array | None  # [B, G] float32, the drafter's largest probability at this position; None: unknown


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the emitted tokens and of the n most probable tokens.

    The raw distribution is the softmax of the target's logits. The warped distribution is the one that tokens are
    sampled from: after logits processors, temperature, top-k, top-p and min-p. Probability 0 is -inf.
    """

    warped_logprobs: Array  # [B, T] float32, of the emitted tokens
    raw_top_tokens: Array  # [B, T, n] int32, most probable first
    raw_top_logprobs: Array  # [B, T, n] float32
    warped_top_tokens: Array  # [B, T, n] int32
    warped_top_logprobs: Array  # [B, T, n] float32


class StepInfo(NamedTuple):
    """The report of one step. T is ``G + 1``; 1 for a regular step."""

    is_active: Array  # [B] bool, whether the row took part
    tokens: Array  # [B, T] int32, emitted tokens, then -1
    num_emitted: Array  # [B] int32
    num_accepted: Array  # [B] int32, drafts that the rule accepted, also those after a stop token
    num_drafted: Array  # [B] int32, drafts that were verified; of several candidates, those of the longest
    logprobs: Array  # [B, T] float32, of the emitted tokens under the target's raw distribution, then 0
    finish: Array  # [B] int32, `FinishReason` after the step
    draft_record: DraftRecord | None = None  # with `SpecConfig.record_drafts`
    token_logprobs: TokenLogprobs | None = None  # with `SpecConfig.num_logprobs`; arbitrary past the emitted tokens
    width: Array | None = None  # [] int32, positions per row in the target's pass; None: T


def output_tokens(state: SpecState, row: int) -> np.ndarray:
    """Returns the tokens that `row` has emitted, including a stop token: ``[num]`` int32.

    Raises:
        ValueError: if there is no such row.
    """
    check_kind("state", state, SpecState)
    row = check_integer("row", row, 0, len(state.lengths) - 1)
    start, end = int(state.prompt_lengths[row]), int(state.lengths[row])
    return np.asarray(state.tokens[row, start:end])
