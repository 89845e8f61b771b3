"""The configuration of a distillation: one YAML file, checked to the last key."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bass_jax.settings import forbid_extra, parse_settings, read_settings
from bass_jax.training import recipe


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How the target writes the corpus.

    Attributes:
        num_tokens: response tokens to write.
        max_new_tokens: per prompt.
        batch: prompts decoded together.
        temperatures: temperature to its share of the prompts; 0 is greedy.
        top: tokens of the target's law kept per position.
        dtype: of the target while it writes. bfloat16 is twice as fast on a CPU with AVX-512 BF16 and
            ten times slower on one without.
    """

    num_tokens: int = 1_000_000
    max_new_tokens: int = 224
    batch: int = 64
    temperatures: Mapping[float, float] = dataclasses.field(default_factory=lambda: {0.0: 1.0})
    top: int = 16
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        for name in ("num_tokens", "max_new_tokens", "batch", "top"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")
        if not self.temperatures or min(self.temperatures) < 0 or min(self.temperatures.values()) < 0:
            raise ValueError("temperatures: expected shares of temperatures, none negative")
        if not sum(self.temperatures.values()) > 0:
            raise ValueError("temperatures: expected a share above 0")


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Shape of the draft; vocabulary, context and rotary base are the target's.

    Attributes:
        width: D.
        num_layers: L.
        num_heads: N.
        num_kv_heads: K.
        head_dim: H.
        mlp_width: F.
        output_vocab_size: O; the tokens that the corpus uses most, bytes and specials. None keeps all.
    """

    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp_width: int = 768
    output_vocab_size: int | None = 8192


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimised, per response token.

    Attributes:
        soft_weight: of the cross-entropy to the target's top law, renormalised over the output vocabulary.
        hard_weight: of the cross-entropy to the target's likeliest token.
    """

    soft_weight: float = 0.7
    hard_weight: float = 0.3

    def __post_init__(self):
        if min(self.soft_weight, self.hard_weight) < 0 or not self.soft_weight + self.hard_weight > 0:
            raise ValueError("soft_weight, hard_weight: expected weights, not both 0")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser, with a linear warm-up and a decay.

    Attributes:
        kind: ``"adamw"``, or ``"muon"``: orthogonalised momentum on the layers' matrices, AdamW elsewhere.
        learning_rate: AdamW's peak.
        muon_learning_rate: Muon's peak.
        schedule: ``"cosine"`` decays over the whole run; ``"wsd"`` holds the peak, then falls linearly over
            the last `decay_share` of the steps.
        warmup_steps: linear rise from 0.
        final_share: last learning rate over the peak.
        decay_share: see `schedule`.
        weight_decay: on matrices, not on norms.
        beta2: of the second moment.
        clip_norm: of the whole gradient.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 2e-3
    muon_learning_rate: float = 0.02
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 50
    final_share: float = 0.02
    decay_share: float = 0.3
    weight_decay: float = 0.1
    beta2: float = 0.98
    clip_norm: float = 1.0

    def __post_init__(self):
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length and shape of the training.

    Attributes:
        num_steps: optimiser steps.
        batch_tokens: response tokens per step, at most.
        length_grain: sequences are padded to multiples of this; each length has an executable of its own.
        log_every: steps between two lines of metrics.
        save_every: steps between two checkpoints.
        held_out_share: share of the corpus' prompts kept apart, to watch agreement while training.
    """

    num_steps: int = 2000
    batch_tokens: int = 2048
    length_grain: int = 64
    log_every: int = 10
    save_every: int = 200
    held_out_share: float = 0.01

    def __post_init__(self):
        for name in ("num_steps", "batch_tokens", "length_grain", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share={self.held_out_share}: expected a share below 1")


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """A distillation, from prompts to a draft.

    Attributes:
        target: checkpoint of the target: what `bass_jax.checkpoint.load_model` takes, or ``"package:module"``
            for the one model file inside an installed package.
        output_dir: of corpus, checkpoints, metrics and draft.
        prompts: the data recipe.
        rollout: how the corpus is written.
        draft: shape of the draft.
        loss: what is minimised.
        optimizer: how.
        training: for how long.
        seed: of everything that is drawn.
        draft_len: draft length of the reported block efficiency.
    """

    target: str
    output_dir: str
    prompts: recipe.PromptRecipe
    rollout: RolloutConfig = RolloutConfig()
    draft: DraftConfig = DraftConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    seed: int = 0
    draft_len: int = 4


forbid_extra(
    recipe.JsonlSource, recipe.DocumentedCodeSource, recipe.PythonFunctionsSource, recipe.HeldOut,
    recipe.PromptRecipe, RolloutConfig, DraftConfig, LossConfig, OptimizerConfig, TrainingConfig, DistillConfig,
)  # fmt: skip


def load_config(path: Path, overrides: Mapping[str, Any] | None = None) -> DistillConfig:
    """Reads a configuration; see `bass_jax.settings.read_settings`."""
    return read_settings(DistillConfig, path, overrides)


def parse_config(content: Mapping[str, Any], name: str) -> DistillConfig:
    """Checks a parsed configuration; see `load_config`."""
    return parse_settings(DistillConfig, content, name)
