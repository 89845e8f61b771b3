"""Compares the distributions and the acceptance rates of a quantized pair with those of the original pair."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import SpecConfig, capacity_bucket
from bass_jax.cost_model import geometric_tokens_per_pass
from bass_jax.decoding.metrics import Metrics
from bass_jax.decoding.options import DecodeOptions
from bass_jax.decoding.pair import Pair
from bass_jax.drafters import ModelDrafter
from bass_jax.engine.generate import Prompts, encode_prompts, generate
from bass_jax.models import TargetModel
from bass_jax.models.protocol import output_ids_of
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.sampling import SamplingParams
from bass_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class QuantizationError:
    """Differences of the next-token distributions, over all positions of the prompts and the reference's greedy text.

    Attributes:
        num_tokens: number of positions.
        mean_kl: mean divergence of the other target's distribution from the reference's, in nats.
        quantile_kl: 99 % quantile of the divergence.
        max_kl: largest divergence.
        agreement: share of the positions at which both have the same most probable token.
        overlaps: mean probability that the token rule accepts a draft at temperature 1, at the same positions: of the
            reference's target with its draft model, and of the other target with its own. None if a drafter is not a
            model.
        reference: metrics of the reference pair's speculation.
        other: metrics of the other pair's speculation, whose text can differ.
    """

    num_tokens: int
    mean_kl: float
    quantile_kl: float
    max_kl: float
    agreement: float
    overlaps: tuple[float, float] | None
    reference: Metrics
    other: Metrics

    def efficiency_change(self, draft_len: int) -> float | None:
        """Returns the relative change of the tokens per target pass that `overlaps` give with `draft_len` drafts."""
        if self.overlaps is None:
            return None
        before, after = (geometric_tokens_per_pass(rate, draft_len) for rate in self.overlaps)
        return after / before - 1


def measure_quantization_error(
    reference: Pair,
    other: Pair,
    prompts: Prompts,
    spec: SpecConfig | None = None,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
) -> QuantizationError:
    """Compares a pair, such as one with an INT8 target, with the pair that it was made from.

    Args:
        reference: the pair whose target's distributions are the true ones.
        other: a pair with the same vocabulary.
        prompts: texts or token ids.
        spec: of the speculation; default ``SpecConfig()``.
        max_new_tokens: largest number of new tokens per prompt.
        sampling: of the speculation; default greedy.

    Raises:
        ValueError: if there are no prompts, or the vocabularies differ.
    """
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one")
    sizes = [pair.target.vocab_size for pair in (reference, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"other: its target has {sizes[1]} tokens, the reference's {sizes[0]}")
    rows = encode_prompts(reference, prompts)
    options = DecodeOptions(max_new_tokens=max_new_tokens, max_batch=8)
    runs = [generate(pair, rows, spec, options, sampling=sampling) for pair in (reference, other)]
    greedy = runs[0]
    if sampling is not None and not sampling.is_greedy:
        greedy = generate(reference, rows, None, options, step="decode")
    texts = [np.concatenate([prompt, tokens]) for prompt, tokens in zip(rows, greedy.tokens, strict=True)]
    kl, agreement, *overlaps = _compare_texts(reference, other, texts)
    return QuantizationError(
        num_tokens=len(kl),
        mean_kl=float(kl.mean()),
        quantile_kl=float(np.quantile(kl, 0.99)),
        max_kl=float(kl.max()),
        agreement=float(agreement.mean()),
        overlaps=(float(overlaps[0].mean()), float(overlaps[1].mean())) if overlaps else None,
        reference=runs[0].metrics,
        other=runs[1].metrics,
    )


def _compare_texts(reference: Pair, other: Pair, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns divergence, agreement and the overlaps with the draft models, at every position of every text."""
    drafters = [pair.drafter for pair in (reference, other) if isinstance(pair.drafter, ModelDrafter)]
    found = []
    for text in texts:
        capacity = capacity_bucket(len(text))
        tokens = np.zeros((1, capacity), np.int32)
        tokens[0, : len(text)] = text
        # Padding has a position past the capacity, so that it is not written.
        positions = np.where(np.arange(capacity) < len(text), np.arange(capacity), capacity)[None].astype(np.int32)
        compared = _compare(reference.target, other.target, drafters if len(drafters) == 2 else [], tokens, positions)
        found.append([np.asarray(values)[0, : len(text)] for values in compared])
    return [np.concatenate(values) for values in zip(*found, strict=True)]


@jax.jit
def _compare(
    reference: TargetModel,
    other: TargetModel,
    drafters: list[ModelDrafter],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> list[Array]:
    distributions = [jax.nn.log_softmax(_logits(model, tokens, positions), axis=-1) for model in (reference, other)]
    true, found = distributions
    kl = jnp.sum(jnp.exp(true) * (true - found), axis=-1)
    overlaps = []
    for distribution, drafter in zip(distributions, drafters):
        model, probs = drafter.model, jnp.exp(distribution)
        draft = jax.nn.softmax(_logits(model, tokens, positions)[..., : drafter.vocab_size], axis=-1)
        output_ids = output_ids_of(model)
        columns = jnp.arange(draft.shape[-1]) if output_ids is None else output_ids
        overlaps.append(jnp.minimum(probs[..., columns], draft).sum(axis=-1))
    return [kl, argmax(true) == argmax(found), *overlaps]


def _logits(model: TargetModel, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T O"]:
    return model.forward(tokens, positions, model.init_cache(*tokens.shape)).logits
