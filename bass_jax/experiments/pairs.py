"""The pairs of a run: one target, and what each way to decode changes about it."""

import dataclasses
from typing import Any

import jax

from bass_jax.drafters import ModelDrafter, NgramDrafter
from bass_jax.experiments.config import ModeConfig, PairConfig
from bass_jax.models import Model, preset, random_model
from bass_jax.pair import Pair, load_pair, random_pair


class Pairs:
    """Loads each pair once; all share the target's weights."""

    def __init__(self, config: PairConfig):
        """Loads the run's own pair.

        Raises:
            ValueError: as `bass_jax.load_pair` and `bass_jax.random_pair` do.
        """
        self._config = config
        if config.path is not None:
            self.base = load_pair(config.path, drafter=config.draft, dtype=config.dtype)[0]
        else:
            assert config.target is not None
            draft = None if config.draft == "ngram" else config.draft
            self.base = random_pair(config.target, draft, dtype=self._dtype)
        self._loaded: dict[tuple[Any, Any], Pair] = {}

    def of(self, mode: ModeConfig) -> Pair:
        """Returns the pair that `mode` decodes with."""
        key = (mode.draft, mode.attention)
        if key not in self._loaded:
            pair = self.base
            if mode.draft is not None and mode.draft != self._config.draft:
                pair = self._with_draft(mode.draft)
            self._loaded[key] = pair if mode.attention is None else with_attention(pair, mode.attention)
        return self._loaded[key]

    @property
    def _dtype(self) -> str:
        """Of random weights."""
        return self._config.dtype or "bfloat16"

    def _with_draft(self, draft: str) -> Pair:
        base, path = self.base, self._config.path
        if path is not None:
            other, _ = load_pair(path, drafter=draft, dtype=self._config.dtype)
            return dataclasses.replace(other, target=base.target)
        if draft == "ngram":
            return base.with_drafter(NgramDrafter())
        model = random_model(preset(draft, dtype=self._dtype), jax.random.key(1))
        return base.with_drafter(ModelDrafter(model, base.target.config.vocab_size))


def with_attention(pair: Pair, attention: str) -> Pair:
    """Returns the pair with another implementation of attention, in target and draft."""

    def changed(model: Model) -> Model:
        return dataclasses.replace(model, config=dataclasses.replace(model.config, attention=attention))

    drafter = pair.drafter
    if isinstance(drafter, ModelDrafter):
        drafter = dataclasses.replace(drafter, model=changed(drafter.model))
    return dataclasses.replace(pair, target=changed(pair.target), drafter=drafter)
