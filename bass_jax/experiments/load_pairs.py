"""Loads the pairs of a run: one target, and what each method changes about it."""

import dataclasses
from typing import Any

import jax

from bass_jax.decoding.load_pair import load_pair, random_pair
from bass_jax.decoding.pair import Pair
from bass_jax.drafters import EagleDrafter, ModelDrafter, find_drafter
from bass_jax.drafters.registry import is_drafter_name
from bass_jax.experiments.experiment_config import MethodConfig, PairConfig
from bass_jax.models import Model, TargetModel, preset, random_model, require_model


class MethodPairs:
    """The pairs of a run's methods. Each is loaded once; pairs of one quantization share the target's weights.

    Attributes:
        base: the run's own pair.
    """

    def __init__(self, config: PairConfig):
        """Loads the run's own pair.

        Raises:
            ValueError: as `bass_jax.load_pair` and `bass_jax.decoding.random_pair` do.
        """
        self._config = config
        self._by_quantization: dict[str | None, Pair] = {}
        self._by_method: dict[tuple[Any, ...], Pair] = {}
        self.base = self._load(config.quantize)

    def of(self, method: MethodConfig) -> Pair:
        """Returns the pair that `method` decodes with."""
        key = (method.draft, method.attention, method.quantize)
        if key not in self._by_method:
            pair = self._load(method.quantize or self._config.quantize)
            if method.draft is not None and method.draft != self._config.draft:
                pair = self._with_draft(pair, method.draft)
            if method.attention is not None:
                target, drafter = _with_attention(pair.target, method.attention), pair.drafter
                if isinstance(drafter, ModelDrafter | EagleDrafter):
                    drafter = dataclasses.replace(drafter, model=_with_attention(drafter.model, method.attention))
                pair = dataclasses.replace(pair, target=target, drafter=drafter)
            self._by_method[key] = pair
        return self._by_method[key]

    def _load(self, quantize: str | None) -> Pair:
        if quantize not in self._by_quantization:
            config = self._config
            options: dict[str, Any] = {"quantize": quantize, "cache_dtype": config.cache_dtype, "dtype": config.dtype}
            if config.path is not None:
                pair = load_pair(config.path, drafter=config.draft, **options)
            else:
                assert config.target is not None
                pair = random_pair(config.target, None if config.draft == "ngram" else config.draft, **options)
            self._by_quantization[quantize] = pair
        return self._by_quantization[quantize]

    def _with_draft(self, pair: Pair, draft: str) -> Pair:
        config = self._config
        if config.path is not None:
            return pair.with_drafter(load_pair(config.path, drafter=draft, dtype=config.dtype).drafter)
        if is_drafter_name(draft):
            return pair.with_drafter(find_drafter(draft, pair.target, pair.tokenizer))
        model = random_model(preset(draft, dtype=config.dtype or "bfloat16"), jax.random.key(1))
        return pair.with_drafter(ModelDrafter(model, pair.target.vocab_size))


def _with_attention(model: TargetModel, attention: str) -> Model:
    model = require_model(model, "another attention")
    return dataclasses.replace(model, config=dataclasses.replace(model.config, attention_implementation=attention))
