"""The configuration of a distillation: one YAML file, checked to the last key."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bass_jax.runtime.yaml_config import forbid_extra, parse_yaml, read_yaml
from bass_jax.training import recipe


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How the target writes the corpus.

    Attributes:
        num_tokens: response tokens to write.
        max_new_tokens: per prompt.
        batch: prompts decoded together.
        temperatures: temperature to its share of the prompts; 0 is greedy.
        top: tokens of the target's distribution kept per position.
        dtype: of the target while it writes. bfloat16 is twice as fast on a CPU with AVX-512 BF16 and
            ten times slower on one without.
        keep_features: also store the target's final hidden states, which a hidden-state draft is trained on:
            ``2 D`` bytes per token.
    """

    num_tokens: int = 1_000_000
    max_new_tokens: int = 224
    batch: int = 64
    temperatures: Mapping[float, float] = dataclasses.field(default_factory=lambda: {0.0: 1.0})
    top: int = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    keep_hidden_states: bool = False

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
        reads_hidden: the draft reads the target's final hidden state at the token before; the corpus keeps them then.
        target_layers: layers of the target that the draft starts from, in this order; everything above but
            `output_vocab_size` is then the target's.
        start: checkpoint of a draft of this shape, for this target, to go on from; its output vocabulary is kept. It
            may have fewer layers, and with `reads_hidden` read tokens alone: it begins as good as it was. A smaller
            output vocabulary grows by the tokens that the corpus uses most.
    """

    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp_width: int = 768
    output_vocab_size: int | None = 8192
    reads_hidden: bool = False
    target_layers: tuple[int, ...] = ()
    start: str | None = None

    def __post_init__(self):
        if self.start is not None and self.target_layers:
            raise ValueError(f"start={self.start!r}: expected no target_layers beside it")


type Schedule = float | int | tuple[tuple[float | int, float | int], ...]
"""A weight, or points ``(share of the steps, weight)`` that it runs through, ascending and linear in between."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimized, per response token: a mixture whose weights may change with the steps.

    The target's distribution is known at its most probable tokens; for the reverse divergence and the total variation
    all others together are one more token.

    Attributes:
        soft_weight: of the cross-entropy to the target's top distribution, renormalized over the output vocabulary: the
            forward KL divergence and a constant.
        hard_weight: of the cross-entropy to the target's most probable token.
        reverse_weight: of the KL divergence from the draft's distribution to the target's.
        total_variation_weight: of the distance between the distributions: the share of drafts that is rejected at
            temperature 1.
        hidden_weight: of a hidden-state draft's error in predicting the target's hidden state, relative to its size.
        unroll: drafts in a row that a hidden-state draft is trained for, in as many passes: the first reads the
            target's states; in the last, ``unroll - 1`` of every ``2 unroll`` positions read what it predicted itself.
    """

    soft_weight: Schedule = 0.7
    hard_weight: Schedule = 0.3
    reverse_weight: Schedule = 0.0
    total_variation_weight: Schedule = 0.0
    hidden_weight: Schedule = 0.0
    unroll: int = 2

    def __post_init__(self):
        names = [field.name for field in dataclasses.fields(self) if field.name.endswith("_weight")]
        total = 0.0
        for name in names:
            points = _points(getattr(self, name))
            shares = [share for share, _ in points]
            if not points or min(weight for _, weight in points) < 0 or shares != sorted(shares):
                raise ValueError(f"{name}={getattr(self, name)}: expected weights of at least 0, shares ascending")
            total += sum(weight for _, weight in points)
        if not total > 0:
            raise ValueError(f"{', '.join(names)}: expected weights, not all 0")
        if self.unroll < 1:
            raise ValueError(f"unroll={self.unroll}: expected a positive number")

    def weight_at(self, name: str, share: float) -> float:
        """Returns the weight `name` after that share of the steps."""
        shares, weights = zip(*_points(getattr(self, name)), strict=True)
        return float(np.interp(share, shares, weights))


def _points(weight: Schedule) -> tuple[tuple[float | int, float | int], ...]:
    return ((0.0, weight),) if isinstance(weight, float | int) else weight


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, with a linear warm-up and a decay.

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
        num_steps: optimizer steps.
        batch_tokens: response tokens per step, at most.
        length_grain: sequences are padded to multiples of this; each length has an executable of its own.
        log_every: steps between two lines of metrics.
        save_every: steps between two checkpoints.
        held_out_share: share of the corpus' prompts kept apart, to watch agreement while training.
        accumulate: batches whose mean gradient makes one step.
        patience: stop after this many checkpoints without a better block efficiency on the prompts kept apart, and
            return the best; None trains to the end.
        on_policy_share: share of the batches whose answers the draft writes itself, for the target to score.
        data_shards: devices that a batch is split over.
        param_shards: devices that heads, mlp and vocabulary are split over, for each of those.
        dtype: of the passes; parameters, their gradient's mean and the optimizer's state are float32.
        product_dtype: what products with weights round their inputs to in float32 passes, and in their gradients by
            activations; gradients by weights are those of exact products (see `ModelConfig`).
    """

    num_steps: int = 2000
    batch_tokens: int = 2048
    length_grain: int = 64
    log_every: int = 10
    save_every: int = 200
    held_out_share: float = 0.01
    accumulate: int = 1
    patience: int | None = None
    on_policy_share: float = 0.0
    data_shards: int = 1
    param_shards: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    product_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        positive = (
            "num_steps", "batch_tokens", "length_grain", "log_every", "save_every", "accumulate", "patience",
            "data_shards", "param_shards",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive number")
        if self.batch_tokens % self.data_shards:
            raise ValueError(f"batch_tokens={self.batch_tokens}: expected a multiple of data_shards={self.data_shards}")
        if not 0 <= self.on_policy_share <= 1:
            raise ValueError(f"on_policy_share={self.on_policy_share}: expected a share")
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
        loss: what is minimized.
        optimizer: how.
        training: for how long.
        seed: of everything that is drawn.
        draft_len: draft length of the reported block efficiency.
        corpus_dir: where ``corpus/``, ``questions/`` and ``held_out/`` lie, if not in `output_dir`: several drafts can
            learn from one corpus.
        extra_corpora: directories of other runs on the same target whose ``corpus/`` the training reads too.
        is_packed: the draft's matrices are written in INT8, half of bfloat16, and widened as they are read.
        held_out_temperatures: at which the held-out prompts are answered too, for the acceptance of sampled answers.
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
    corpus_dir: str | None = None
    extra_corpora: tuple[str, ...] = ()
    is_packed: bool = False
    held_out_temperatures: tuple[float | int, ...] = ()

    def __post_init__(self):
        if any(not temperature > 0 for temperature in self.held_out_temperatures):
            raise ValueError(f"held_out_temperatures={self.held_out_temperatures}: expected numbers above 0")

    @property
    def corpus_root(self) -> Path:
        """`corpus_dir`, once it is settled."""
        return Path(self.output_dir if self.corpus_dir is None else self.corpus_dir)


forbid_extra(
    recipe.JsonlSource, recipe.DocumentedCodeSource, recipe.PythonFunctionsSource, recipe.SelfAskedSource,
    recipe.HeldOut, recipe.PromptRecipe, RolloutConfig, DraftConfig, LossConfig, OptimizerConfig, TrainingConfig,
    DistillConfig,
)  # fmt: skip


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> DistillConfig:
    """Reads a configuration; see `bass_jax.runtime.yaml_config.read_yaml`."""
    return read_yaml(DistillConfig, path, overrides)


def parse_config(content: Mapping[str, Any], name: str) -> DistillConfig:
    """Checks a parsed configuration; see `load_config`."""
    return parse_yaml(DistillConfig, content, name)
