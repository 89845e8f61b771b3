"""The pairs of a run: one target, and what each way to decode changes about it."""

import dataclasses
from typing import Any

import jax

from bass_jax.decoding.load_pair import load_pair, random_pair
from bass_jax.decoding.pair import Pair
from bass_jax.drafters import EagleDrafter, ModelDrafter, NgramDrafter
from bass_jax.experiments.experiment_config import MethodConfig, PairConfig
from bass_jax.models import Model, preset, random_model


class Pairs:
    """Loads each pair once; those of one quantization share the target's weights."""

    def __init__(self, config: PairConfig):
        """Loads the run's own pair.

        Raises:
            ValueError: as `bass_jax.load_pair` and `bass_jax.random_pair` do.
        """
        self._config = config
        self._targets: dict[str | None, Pair] = {}
        self._loaded: dict[tuple[Any, ...], Pair] = {}
        self.base = self._with_target(config.quantize)

    def of(self, method: MethodConfig) -> Pair:
        """Returns the pair that `method` decodes with."""
        key = (method.draft, method.attention, method.quantize)
        if key not in self._loaded:
            pair = self._with_target(method.quantize or self._config.quantize)
            if method.draft is not None and method.draft != self._config.draft:
                pair = self._with_draft(pair, method.draft)
            self._loaded[key] = pair if method.attention is None else with_attention(pair, method.attention)
        return self._loaded[key]

    def _with_target(self, quantize: str | None) -> Pair:
        if quantize not in self._targets:
            config = self._config
            options: dict[str, Any] = {"quantize": quantize, "cache_dtype": config.cache_dtype}
            if config.path is not None:
                pair, _ = load_pair(config.path, drafter=config.draft, dtype=config.dtype, **options)
            else:
                assert config.target is not None
                draft = None if config.draft == "ngram" else config.draft
                pair = random_pair(config.target, draft, dtype=self._dtype, **options)
            self._targets[quantize] = pair
        return self._targets[quantize]

    def _with_draft(self, pair: Pair, draft: str) -> Pair:
        path = self._config.path
        if path is not None:
            other, _ = load_pair(path, drafter=draft, dtype=self._config.dtype)
            return dataclasses.replace(other, target=pair.target)
        if draft == "ngram":
            return pair.with_drafter(NgramDrafter())
        model = random_model(preset(draft, dtype=self._dtype), jax.random.key(1))
        return pair.with_drafter(ModelDrafter(model, pair.target.config.vocab_size))

    @property
    def _dtype(self) -> str:
        """Of random weights."""
        return self._config.dtype or "bfloat16"


def with_attention(pair: Pair, attention: str) -> Pair:
    """Returns the pair with another implementation of attention, in target and draft."""

    def changed(model: Model) -> Model:
        return dataclasses.replace(model, config=dataclasses.replace(model.config, attention_implementation=attention))

    drafter = pair.drafter
    if isinstance(drafter, ModelDrafter | EagleDrafter):
        drafter = dataclasses.replace(drafter, model=changed(drafter.model))
    return dataclasses.replace(pair, target=changed(pair.target), drafter=drafter)
