"""What a run of a batch returns: tokens, texts, log-probabilities, times."""

import dataclasses
from typing import NamedTuple

import numpy as np

from bass_jax.decoding.metrics import PerTokenLatency, Summary
from bass_jax.decoding.state import StepInfo, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of one run on the host's clock; compilation is in none but its own.

    Attributes:
        prefill: reading the prompts; where steps are compiled meanwhile, for the first batch of a shape, with what
            that leaves of the cores.
        decode: all steps.
        compile: making executables, as far as the run waited for it.
        num_compiled: executables made.
        steps: each step.
        warm_up: of `compile`, the draft-length buckets of a policy, made before the first step: bucket → seconds.
    """

    prefill: float
    decode: float
    compile: float
    num_compiled: int
    steps: tuple[float, ...]
    warm_up: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a batch came to; row ``i`` answers prompt ``i // num_samples``.

    Attributes:
        tokens: per row ``[num]`` int32, a stop token included.
        texts: per row, without special tokens and cut before a stop string; None without a tokenizer.
        logprobs: per row ``[num]`` float32, of each token under the target's raw distribution.
        token_logprobs: per row the fields of `bass_jax.decoding.state.TokenLogprobs`, ``[num]`` and ``[num, n]``:
            log-probabilities under the distribution that the tokens were drawn from, and the alternatives; None without
            `SpecConfig.num_logprobs`.
        finish_reasons: per row ``"stop"``, ``"length"``, ``"not_finite"`` or ``"no_token"``.
        summary: acceptance, block efficiency and counts.
        latency: per-token latency, seconds.
        timings: wall time.
        infos: one per step, on the host.
        requests: for each step ``[B]`` int32, the row of `tokens` in each row of the batch; -1 for none.
        is_lossless: the tokens follow the target's distribution exactly; False after a lossy acceptance rule.
    """

    tokens: list[np.ndarray]
    texts: list[str] | None
    logprobs: list[np.ndarray]
    token_logprobs: list[TokenLogprobs] | None
    finish_reasons: list[str]
    summary: Summary
    latency: PerTokenLatency
    timings: Timings
    infos: list[StepInfo]
    requests: list[np.ndarray]
    is_lossless: bool

    @property
    def mean_logprobs(self) -> np.ndarray:
        """``[rows]`` float64: mean log-probability per token, by which BASS ranks the samples of a prompt."""
        return np.array([row.mean() if row.size else np.nan for row in self.logprobs])

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows over decode time."""
        return self.summary.num_emitted / self.timings.decode


class StreamEvent(NamedTuple):
    """What one row emitted in one step."""

    row: int
    tokens: np.ndarray  # [num] int32
    text: str  # whole characters only; "" without a tokenizer
    finish_reason: str | None  # None while the row runs
