"""Compares samples of the decoder with the target's distribution, enumerated over a small vocabulary."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.acceptance import AcceptanceRule, find_rule
from bass_jax.config import SpecConfig
from bass_jax.decoding.pair import Pair, check_pair
from bass_jax.decoding.policy_runner import advance_policy, no_step
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.step import speculate_step
from bass_jax.drafters import Drafter, find_drafter
from bass_jax.models.protocol import TargetModel
from bass_jax.policies import Policy, find_policy
from bass_jax.runtime.checks import check_integer, check_kind, check_number
from bass_jax.sampling import SamplingParams, find_processors
from bass_jax.sampling.keys import row_keys
from bass_jax.testing.enumeration import continuation_distribution
from bass_jax.testing.tiny_models import tiny_target
from bass_jax.typing import Array

NUM_TOKENS = 4
"""Tokens of the continuations whose joint distribution is compared."""

PROMPTS = ((4,), (0, 3, 1), (2, 0, 1, 1, 3, 4))
"""Prompts of different lengths, one of them a single token."""

SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.14},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "frequency_penalty": 0.9, "presence_penalty": -0.6},
    {"temperature": 1.0, "logit_bias": {0: 1.2, 3: -0.8}, "banned_tokens": (1,)},
    {"temperature": 0.8, "allowed_tokens": (0, 2, 3), "repetition_penalty": 1.5, "top_p": 0.95},
)
"""Fields of `bass_jax.SamplingParams`; one batch contains rows of all settings.

No probability of `tiny_target` is at a threshold, where float32 and float64 could differ.
"""

MAX_CELLS = 20_000
NUM_ROWS = 4096
_OFF = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | {"temperature": 1.0}


@dataclasses.dataclass(frozen=True)
class LosslessReport:
    """The result of `verify_lossless`.

    Attributes:
        rule: name of the acceptance rule.
        claims_lossless: `AcceptanceRule.lossless`.
        p_value: of the chi-square test; 0 if a sequence of probability 0 was sampled.
        total_variation: distance between the sampled frequencies and the distribution, mean over prompts and settings.
        expected_variation: the same distance for an exact decoder with as many samples.
        tokens_per_step: emitted tokens per row and target pass.
        num_samples: number of sampled continuations.
        significance: `is_lossless` is a `p_value` of at least this.
    """

    rule: str
    claims_lossless: bool
    p_value: float
    total_variation: float
    expected_variation: float
    tokens_per_step: float
    num_samples: int
    significance: float

    @property
    def is_lossless(self) -> bool:
        """Whether the test found no difference from the target's distribution."""
        return self.p_value >= self.significance

    def __str__(self) -> str:
        result = "keeps the target's distribution" if self.is_lossless else "does NOT keep the target's distribution"
        label = "lossless" if self.claims_lossless else "lossy by design"
        return (
            f"{self.rule} ({label}): {result}: p = {self.p_value:.2g} over {self.num_samples} samples, "
            f"total variation {self.total_variation:.4f} (an exact decoder: {self.expected_variation:.4f}), "
            f"{self.tokens_per_step:.2f} tokens per step"
        )


def verify_lossless(
    drafter: Drafter | str,
    rule: str | AcceptanceRule = "token",
    *,
    target: TargetModel | None = None,
    draft_len: int = 3,
    num_candidates: int = 1,
    settings: Sequence[Mapping[str, Any]] = SETTINGS,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    stop_tokens: Sequence[int] = (),
    logits_processors: Sequence[Callable | str] = (),
    num_samples: int = 200_000,
    significance: float = 1e-4,
    seed: int = 0,
    step: Callable = speculate_step,
    policy: Policy | str | None = None,
) -> LosslessReport:
    """Compares the joint distribution of the first four sampled tokens with the target's, by a chi-square test.

    The batch contains rows of all prompts and settings. Half of the rows use a random draft length in every step, 0
    included. It takes about a minute on a CPU.

    Args:
        drafter: a drafter with the target's vocabulary, or its name; see `bass_jax.drafters.find_drafter`.
        rule: an acceptance rule, a registered name, or ``"module:attribute"``.
        target: a model with a small vocabulary; default `tiny_target`.
        draft_len: largest number of drafts per step.
        num_candidates: M, for rules with several candidates.
        settings: fields of `SamplingParams`, per group of rows.
        prompts: token ids, per group of rows.
        stop_tokens: a row ends with the first of these tokens.
        logits_processors: as in `SpecConfig`.
        num_samples: total number of continuations, rounded up to whole batches.
        significance: probability that an exact decoder fails the test.
        seed: of the random numbers.
        step: the step to test.
        policy: chooses the draft lengths, up to `draft_len`; a policy, or its name.

    Raises:
        ValueError: if the vocabulary is too large to enumerate, or an argument is invalid.
    """
    check_kind("settings", settings, list | tuple, "a sequence of fields of SamplingParams")
    check_kind("prompts", prompts, list | tuple, "a sequence of prompts")
    target = tiny_target() if target is None else target
    if isinstance(drafter, str):
        drafter = find_drafter(drafter, target)
    check_pair(Pair(target, drafter))
    policy = None if policy is None else find_policy(policy)
    vocab_size = target.vocab_size
    if vocab_size**NUM_TOKENS > MAX_CELLS:
        raise ValueError(f"target has {vocab_size} tokens: expected at most {int(MAX_CELLS ** (1 / NUM_TOKENS))}")
    if not 0 < check_number("significance", significance) < 1:
        raise ValueError(f"significance={significance}: expected a number between 0 and 1")
    check_integer("num_samples", num_samples, 1)
    check_integer("seed", seed, 0, 2**32 - 1)
    spec = SpecConfig(draft_len, rule, num_candidates=num_candidates, logits_processors=logits_processors)
    groups = [(tuple(prompt), {**_OFF, **setting}) for prompt, setting in itertools.product(prompts, settings)]
    processors = find_processors(logits_processors)
    distributions = np.stack(
        [continuation_distribution(target, *group, NUM_TOKENS, stop_tokens, processors) for group in groups]
    )
    counts, tokens_per_step = _sample_continuations(
        Pair(target, drafter), spec, groups, stop_tokens, num_samples, seed, step, policy
    )
    num_per_group = counts.sum(axis=1, keepdims=True)
    noise = np.sqrt(2 * distributions * (1 - distributions) / (np.pi * num_per_group)).sum(axis=1) / 2
    return LosslessReport(
        rule=find_rule(rule).name,
        claims_lossless=find_rule(rule).lossless,
        p_value=chi_square(counts, distributions),
        total_variation=float(np.abs(counts / num_per_group - distributions).sum(axis=1).mean() / 2),
        expected_variation=float(noise.mean()),
        tokens_per_step=tokens_per_step,
        num_samples=int(counts.sum()),
        significance=significance,
    )


def chi_square(counts: np.ndarray, distributions: np.ndarray) -> float:
    """Returns the p-value of a chi-square test of all groups together; 0 if a token of probability 0 was sampled.

    Cells with an expected count below 5 are pooled within their group, because the approximation needs it.

    Args:
        counts: ``[groups, cells]``.
        distributions: ``[groups, cells]``.
    """
    from scipy.stats import chi2

    statistic, freedom = 0.0, 0
    for observed, distribution in zip(counts, distributions, strict=True):
        if observed[distribution == 0].any():
            return 0.0
        expected = distribution * observed.sum()
        is_rare = expected < 5
        if is_rare.any():
            pooled = [np.append(values[~is_rare], values[is_rare].sum()) for values in (observed, expected)]
            if pooled[1][-1] < 5 and len(pooled[1]) > 1:  # The pool is still small: add it to the largest cell.
                largest = pooled[1][:-1].argmax()
                for values in pooled:
                    values[largest] += values[-1]
                pooled = [values[:-1] for values in pooled]
            observed, expected = pooled
        statistic += ((observed - expected) ** 2 / expected).sum()
        freedom += len(expected) - 1
    return 1.0 if freedom == 0 else float(chi2.sf(statistic, freedom))


def _sample_continuations(
    pair: Pair, spec: SpecConfig, groups, stop_tokens, num_samples: int, seed: int, step, policy
) -> tuple[np.ndarray, float]:
    """Counts sampled continuations per group, ``[groups, V ** 4]``; also returns the tokens per row and step."""
    per_group = min(-(-num_samples // len(groups)), NUM_ROWS // len(groups))
    rows = [prompt for prompt, _ in groups for _ in range(per_group)]
    per_row = {name: [setting[name] for _, setting in groups for _ in range(per_group)] for name in _OFF}
    sampling = SamplingParams(**per_row)
    state = prefill(pair, rows, spec, sampling=sampling, max_new_tokens=NUM_TOKENS + 6, stop_tokens=stop_tokens)
    num_rows = len(state.lengths)
    lengths = np.random.default_rng(seed).integers(0, spec.num_drafts + 1, (NUM_TOKENS, num_rows)).astype(np.int32)
    lengths[:, ::2] = spec.num_drafts
    counts = np.zeros((len(groups), pair.target.vocab_size**NUM_TOKENS), np.int64)
    of_row = np.repeat(np.arange(len(groups)), per_group)
    num_emitted, num_batches = 0, -(-num_samples // len(rows))
    for index in range(num_batches):
        keys = row_keys(jax.random.fold_in(jax.random.key(seed), index), jnp.arange(num_rows, dtype=jnp.uint32))
        codes, emitted = _run_steps(pair, state._replace(keys=keys), lengths, spec, step, policy)
        np.add.at(counts, (of_row, np.asarray(codes)[: len(rows)]), 1)
        num_emitted += int(emitted)
    return counts, num_emitted / (num_batches * len(rows) * NUM_TOKENS)


@functools.partial(jax.jit, static_argnames="step")
def _run_steps(pair: Pair, state, draft_lens: Array, spec: SpecConfig, step, policy) -> tuple[Array, Array]:
    """Runs four steps; returns each row's first four tokens as one number, and the number of emitted tokens."""

    def advance(carry, wanted):
        state, policy_state = carry
        if policy is None:
            return (step(pair, state._replace(draft_lens=wanted), spec)[0], None), None
        state, info = step(pair, state, spec)
        policy_state, state, _ = advance_policy(policy, policy_state, state, info)
        return (state, policy_state), None

    start, policy_state = state.lengths, None
    if policy is not None:
        num_rows = len(state.lengths)
        policy_state, state, _ = advance_policy(policy, policy.init(num_rows), state, no_step(num_rows))
    (state, _), _ = jax.lax.scan(advance, (state, policy_state), draft_lens)
    columns = state.prompt_lengths[:, None] + jnp.arange(NUM_TOKENS)
    tokens = jnp.take_along_axis(state.tokens, columns, axis=1)
    tokens = jnp.where(columns < state.lengths[:, None], tokens, 0)
    codes = tokens @ (pair.target.vocab_size ** jnp.arange(NUM_TOKENS - 1, -1, -1))
    return codes, (state.lengths - start).sum()
