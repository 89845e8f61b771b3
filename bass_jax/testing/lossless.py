"""Whether a drafter and a rule keep the target's distribution: enumerated over a small vocabulary, drawn from the
step.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.config import SpecConfig
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.policy_runner import advance_policy, no_step
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.step import speculate_step
from bass_jax.drafters import Drafter
from bass_jax.models import Model, abstract_params
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LayerConfig, ModelConfig
from bass_jax.policies import Policy
from bass_jax.runtime.checks import check_integer, check_kind, check_number
from bass_jax.sampling import SamplingParams, find_processors
from bass_jax.sampling.keys import row_keys
from bass_jax.testing.enumeration import CAPACITY, continuation_distribution
from bass_jax.typing import Array

NUM_TOKENS = 4
"""Length of the continuations whose joint distribution is compared."""

PROMPTS = ((4,), (0, 3, 1), (2, 0, 1, 1, 3, 4))
"""Ragged, one of a single token."""

SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.15},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "frequency_penalty": 0.9, "presence_penalty": -0.6},
    {"temperature": 1.0, "logit_bias": {0: 1.2, 3: -0.8}, "banned_tokens": (1,)},
    {"temperature": 0.8, "allowed_tokens": (0, 2, 3), "repetition_penalty": 1.5, "top_p": 0.95},
)
"""Fields of `bass_jax.SamplingParams`; rows of all of them share the batch."""

MAX_CELLS = 20_000
NUM_ROWS = 4096
_OFF = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | {"temperature": 1.0}


@dataclasses.dataclass(frozen=True)
class LosslessReport:
    """How the drawn continuations agree with the enumerated distribution.

    Attributes:
        rule: name of the acceptance rule.
        claims_lossless: what the rule says of itself.
        p_value: of the chi-square statistic: probability that an exact decoder looks at least this wrong; 0 if
            something of probability 0 was drawn.
        total_variation: between drawn frequencies and the distribution, mean over prompts and settings.
        expected_variation: the total variation that so many samples of an exact decoder show.
        tokens_per_step: mean emitted tokens per target pass.
        num_samples: continuations drawn.
        significance: `is_lossless` means a `p_value` of at least this.
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
        """Whether nothing speaks against exactness."""
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
    drafter: Drafter,
    rule: str = "token",
    *,
    target: Model | None = None,
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
    policy: Policy | None = None,
) -> LosslessReport:
    """Compares the joint distribution of the first four tokens, of ragged rows under several settings, with the
    target's.

    Every other row wants a draft length of its own, drawn anew for every step, 0 included. A minute on a CPU.

    Args:
        drafter: over the target's vocabulary.
        rule: name of a registered rule, or ``"module:attribute"``.
        target: a model with few tokens; default `tiny_target`.
        draft_len: largest number of drafts per step.
        num_candidates: M, of rules that evaluate several chains.
        settings: fields of `SamplingParams` per group of rows.
        prompts: token ids per group of rows.
        stop_tokens: rows end with these.
        logits_processors: as in `SpecConfig`.
        num_samples: continuations in all, rounded up to whole batches.
        significance: of the result; a sound decoder is called unsound this often.
        seed: of the noise.
        step: the step that is verified.
        policy: chooses the draft lengths, up to `draft_len`, instead.

    Raises:
        ValueError: if the vocabulary is too large to enumerate, or an argument is not valid.
    """
    check_kind("drafter", drafter, Drafter, "an object with init, propose and commit")
    check_kind("target", target, Model | None)
    check_kind("settings", settings, list | tuple, "a sequence of fields of Sampling")
    check_kind("prompts", prompts, list | tuple, "a sequence of prompts")
    target = tiny_target() if target is None else target
    vocab_size = target.config.vocab_size
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
    counts, tokens_per_step = _draw(Pair(target, drafter), spec, groups, stop_tokens, num_samples, seed, step, policy)
    num_per_group = counts.sum(axis=1, keepdims=True)
    noise = np.sqrt(2 * distributions * (1 - distributions) / (np.pi * num_per_group)).sum(axis=1) / 2
    return LosslessReport(
        rule=rule,
        claims_lossless=find_rule(rule).lossless,
        p_value=chi_square(counts, distributions),
        total_variation=float(np.abs(counts / num_per_group - distributions).sum(axis=1).mean() / 2),
        expected_variation=float(noise.mean()),
        tokens_per_step=tokens_per_step,
        num_samples=int(counts.sum()),
        significance=significance,
    )


def tiny_target(vocab_size: int = 5, seed: int = 1) -> Model:
    """Makes a random decoder of one layer whose distributions are uneven and depend on the whole prefix."""
    config = ModelConfig(vocab_size, 8, CAPACITY, (LayerConfig(AttentionConfig(1, 1, 8), DenseMLP(16)),))
    random = np.random.default_rng(seed)

    def fill(leaf):
        # Large weights: attention and mlp then move the logits as much as the last token does.
        return jnp.asarray(np.ones(leaf.shape) if leaf.ndim == 1 else 0.4 * random.normal(size=leaf.shape), leaf.dtype)

    return Model(jax.tree.map(fill, nn.meta.unbox(abstract_params(config))), config)


def chi_square(counts: np.ndarray, distributions: np.ndarray) -> float:
    """Returns the p-value of all groups together; 0 if anything of probability 0 was drawn.

    Cells expected fewer than 5 times are pooled within their group, where the approximation needs it.

    Args:
        counts: ``[groups, cells]``.
        distributions: ``[groups, cells]``.
    """
    statistic, freedom = 0.0, 0
    for observed, distribution in zip(counts, distributions, strict=True):
        if observed[distribution == 0].any():
            return 0.0
        expected = distribution * observed.sum()
        is_rare = expected < 5
        observed = np.append(observed[~is_rare], observed[is_rare].sum())
        expected = np.append(expected[~is_rare], expected[is_rare].sum())
        if expected[-1] < 5 and len(expected) > 1:  # Too few even together: into the most probable cell.
            most = expected[:-1].argmax()
            observed[most] += observed[-1]
            expected[most] += expected[-1]
            observed, expected = observed[:-1], expected[:-1]
        statistic += ((observed - expected) ** 2 / expected).sum()
        freedom += len(expected) - 1
    if freedom == 0:
        return 1.0
    # Wilson and Hilferty 1931: the cube root is nearly normal; good to a per cent of the tail from 10 degrees on.
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))


def _draw(
    pair: Pair, spec: SpecConfig, groups, stop_tokens, num_samples: int, seed: int, step, policy
) -> tuple[np.ndarray, float]:
    """Counts continuations per group, ``[groups, V ** 4]``; also returns the mean emitted tokens per step."""
    per_group = min(-(-num_samples // len(groups)), NUM_ROWS // len(groups))
    rows = [prompt for prompt, _ in groups for _ in range(per_group)]
    per_row = {name: [setting[name] for _, setting in groups for _ in range(per_group)] for name in _OFF}
    sampling = SamplingParams(**per_row)
    state = prefill(pair, rows, spec, sampling=sampling, max_new_tokens=NUM_TOKENS + 6, stop_tokens=stop_tokens)
    num_rows = len(state.lengths)
    lengths = np.random.default_rng(seed).integers(0, spec.draft_len + 1, (NUM_TOKENS, num_rows)).astype(np.int32)
    lengths[:, ::2] = spec.draft_len
    counts = np.zeros((len(groups), pair.target.config.vocab_size**NUM_TOKENS), np.int64)
    of_row = np.repeat(np.arange(len(groups)), per_group)
    num_emitted, num_batches = 0, -(-num_samples // len(rows))
    for index in range(num_batches):
        keys = row_keys(jax.random.fold_in(jax.random.key(seed), index), jnp.arange(num_rows, dtype=jnp.uint32))
        codes, emitted = _continue(pair, state._replace(keys=keys), lengths, spec, step, policy)
        np.add.at(counts, (of_row, np.asarray(codes)[: len(rows)]), 1)
        num_emitted += int(emitted)
    return counts, num_emitted / (num_batches * len(rows) * NUM_TOKENS)


@functools.partial(jax.jit, static_argnames="step")
def _continue(pair: Pair, state, draft_lens: Array, spec: SpecConfig, step, policy) -> tuple[Array, Array]:
    """Takes four steps; returns each row's first four tokens as one number, and how many were emitted in all."""

    def advance(carry, wanted):
        state, policy_state = carry
        if policy is None:
            return (step(pair, state._replace(draft_lens=wanted), spec)[0], None), None
        state, info = step(pair, state, spec)
        policy_state, state, _ = advance_policy(policy, policy_state, state, info, jnp.nan)
        return (state, policy_state), None

    start, policy_state = state.lengths, None
    if policy is not None:
        num_rows = len(state.lengths)
        policy_state, state, _ = advance_policy(policy, policy.init(num_rows), state, no_step(num_rows), jnp.nan)
    (state, _), _ = jax.lax.scan(advance, (state, policy_state), draft_lens)
    columns = state.prompt_lengths[:, None] + jnp.arange(NUM_TOKENS)
    tokens = jnp.take_along_axis(state.tokens, columns, axis=1)
    tokens = jnp.where(columns < state.lengths[:, None], tokens, 0)
    codes = tokens @ (pair.target.config.vocab_size ** jnp.arange(NUM_TOKENS - 1, -1, -1))
    return codes, (state.lengths - start).sum()
