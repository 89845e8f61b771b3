"""The results of `bass_jax.generate` and `bass_jax.stream`."""

import dataclasses
import reprlib
from typing import NamedTuple

import numpy as np

from bass_jax.decoding.metrics import Metrics, PerTokenLatency
from bass_jax.decoding.state import StepInfo, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class Timings:
    """Wall times of one run in seconds. Only `compile` includes compilation.

    Attributes:
        prefill: time to read the prompts of the first batch.
        decode: time of all steps.
        compile: compile time.
        num_compiled: number of functions compiled.
        steps: time of each step.
        warm_up: draft-length bucket → compile time of its step.
    """

    prefill: float
    decode: float
    compile: float
    num_compiled: int
    steps: tuple[float, ...]
    warm_up: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, repr=False)
class Generation:
    """The result of `bass_jax.generate`. Row ``i`` is an answer to prompt ``i // num_samples``.

    Attributes:
        tokens: per row ``[num]`` int32, including a stop token.
        texts: per row, without special tokens, up to a stop string; None without a tokenizer.
        logprobs: per row ``[num]`` float32, of the tokens under the target's raw distribution.
        token_logprobs: per row `bass_jax.decoding.state.TokenLogprobs` with fields ``[num]`` and ``[num, n]``; None
            without `SpecConfig.num_logprobs`.
        finish_reasons: per row ``"stop"``, ``"length"``, ``"not_finite"`` or ``"no_token"``.
        metrics: acceptance, tokens per target pass and counts.
        latency: per-token latency.
        timings: wall times.
        infos: one per step, on the host.
        requests: for each step ``[B]`` int32, the index into `tokens` of each row of the batch; -1 for a free row.
        is_lossless: whether the tokens follow the target's distribution exactly; False for a lossy acceptance rule.
    """

    tokens: list[np.ndarray]
    texts: list[str] | None
    logprobs: list[np.ndarray]
    token_logprobs: list[TokenLogprobs] | None
    finish_reasons: list[str]
    metrics: Metrics
    latency: PerTokenLatency
    timings: Timings
    infos: list[StepInfo]
    requests: list[np.ndarray]
    is_lossless: bool

    def __repr__(self) -> str:
        """Returns a summary, because the arrays of all steps fill pages."""
        counts = ", ".join(f"{self.finish_reasons.count(name)} {name}" for name in dict.fromkeys(self.finish_reasons))
        parts = [f"{len(self.tokens)} rows ({counts})", f"{self.metrics.num_emitted} tokens"]
        parts.append(f"{self.metrics.tokens_per_pass:.2f} tokens per target pass")
        parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.texts is not None:
            parts.append(f"texts={reprlib.repr(self.texts)}")
        return f"Generation({', '.join(parts)})"

    @property
    def mean_logprobs(self) -> np.ndarray:
        """Mean log-probability per token, ``[rows]`` float64. BASS ranks the samples of a prompt by it."""
        return np.array([row.mean() if row.size else np.nan for row in self.logprobs])

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows divided by the decode time."""
        return self.metrics.num_emitted / self.timings.decode


class StreamEvent(NamedTuple):
    """The tokens that one row emitted in one step."""

    row: int
    tokens: np.ndarray  # [num] int32
    text: str  # complete characters only; "" without a tokenizer
    finish_reason: str | None  # None while the row runs
