"""How far a model's distributions are from another's on real text, and what its draft is worth to each."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import SpecConfig, capacity_bucket
from bass_jax.cost_model import geometric_block_efficiency
from bass_jax.decoding.metrics import Summary, summarize
from bass_jax.decoding.pair import Pair
from bass_jax.drafters import ModelDrafter
from bass_jax.engine.generate import Prompts, generate
from bass_jax.models import Model
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.sampling import SamplingParams
from bass_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class QuantizationError:
    """Distributions of the next token, at every position of the prompts and of the reference's own greedy answers.

    Attributes:
        num_tokens: positions.
        mean_kl: divergence of the other's distribution from the reference's, nats per token.
        quantile_kl: of 99 % of the positions, at most.
        max_kl: of the worst position.
        agreement: share of positions whose most probable token is the same.
        overlaps: probability that the token rule accepts a draft at temperature 1, mean over the same positions:
            of the reference's target with its draft, of the other's with its own; None if a drafter is no model.
        reference: of the reference's target speculated with its drafter. Where the two texts part, so do the counts:
            `overlaps` compare the same positions.
        other: of the other's.
    """

    num_tokens: int
    mean_kl: float
    quantile_kl: float
    max_kl: float
    agreement: float
    overlaps: tuple[float, float] | None
    reference: Summary
    other: Summary

    def efficiency_change(self, draft_len: int) -> float | None:
        """Of the block efficiency that `overlaps` stand for with `draft_len` drafts, relative."""
        if self.overlaps is None:
            return None
        before, after = (geometric_block_efficiency(rate, draft_len) for rate in self.overlaps)
        return after / before - 1


def measure_quantization_error(
    reference: Pair,
    other: Pair,
    prompts: Prompts,
    spec: SpecConfig | None = None,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    batch: int = 8,
) -> QuantizationError:
    """Compares a pair, such as one with an INT8 target, with the pair that it was made of.

    Args:
        reference: whose target's distributions are the true ones.
        other: of the same vocabulary.
        prompts: texts or token ids.
        spec: of the speculation; default ``SpecConfig()``.
        max_new_tokens: limit per answer.
        sampling: of the speculation; default greedy.
        batch: prompts decoded together.

    Raises:
        ValueError: if there are no prompts, or the vocabularies differ.
    """
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one")
    sizes = [pair.target.config.vocab_size for pair in (reference, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"other: its target has {sizes[1]} tokens, the reference's {sizes[0]}")
    rows = prompts if not isinstance(prompts[0], str) else reference.tokenizer.encode_batch(prompts)
    starts = range(0, len(rows), batch)
    summaries, texts = [], []
    for pair in (reference, other):
        infos = []
        for start in starts:
            part = rows[start : start + batch]
            run = generate(pair, part, spec, sampling=sampling, max_new_tokens=max_new_tokens)
            infos += run.infos
            if pair is reference:
                answers = run
                if sampling is not None and not sampling.is_greedy:
                    answers = generate(pair, part, step="decode", max_new_tokens=max_new_tokens)
                texts += [np.concatenate([prompt, answer]) for prompt, answer in zip(part, answers.tokens, strict=True)]
        summaries.append(summarize(infos))
    divergences, agreed, *overlaps = _compare_texts(reference, other, texts)
    return QuantizationError(
        len(divergences), float(divergences.mean()), float(np.quantile(divergences, 0.99)), float(divergences.max()),
        float(agreed.mean()), (float(overlaps[0].mean()), float(overlaps[1].mean())) if overlaps else None, *summaries,
    )  # fmt: skip


def _compare_texts(reference: Pair, other: Pair, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Divergence, agreement and overlaps with the drafts, of every position of every text."""
    drafters = [pair.drafter for pair in (reference, other) if isinstance(pair.drafter, ModelDrafter)]
    found = []
    for text in texts:
        capacity = capacity_bucket(len(text))
        tokens = np.zeros((1, capacity), np.int32)
        tokens[0, : len(text)] = text
        # Padding stands past the end, where it is not written.
        positions = np.where(np.arange(capacity) < len(text), np.arange(capacity), capacity)[None].astype(np.int32)
        compared = _compare(reference.target, other.target, drafters if len(drafters) == 2 else [], tokens, positions)
        found.append([np.asarray(values)[0, : len(text)] for values in compared])
    return [np.concatenate(values) for values in zip(*found, strict=True)]


@jax.jit
def _compare(
    reference: Model,
    other: Model,
    drafters: list[ModelDrafter],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> list[Array]:
    distributions = [jax.nn.log_softmax(_logits(model, tokens, positions), axis=-1) for model in (reference, other)]
    true, found = distributions
    divergence = jnp.sum(jnp.exp(true) * (true - found), axis=-1)
    overlaps = []
    for distribution, drafter in zip(distributions, drafters):
        model, distribution = drafter.model, jnp.exp(distribution)
        draft = jax.nn.softmax(_logits(model, tokens, positions)[..., : drafter.vocab_size], axis=-1)
        columns = jnp.arange(draft.shape[-1]) if model.output_ids is None else model.output_ids
        overlaps.append(jnp.minimum(distribution[..., columns], draft).sum(axis=-1))
    return [divergence, argmax(true) == argmax(found), *overlaps]


def _logits(model: Model, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T O"]:
    return model.forward(tokens, positions, model.init_cache(*tokens.shape)).logits
