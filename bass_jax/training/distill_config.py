"""The configuration of a distillation, one YAML file."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bass_jax.runtime.yaml_config import forbid_extra, read_yaml


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class PromptsConfig:
    """Where the prompts come from: `files`, or `source`.

    Attributes:
        files: JSON Lines files of training prompts, gzipped or not.
        template: the user message; ``{field}`` is replaced by that field of a row.
        held_out: JSON Lines files of prompts to evaluate on. Training prompts that contain one are left out.
        source: ``"module:attribute"`` of a function that makes a `bass_jax.training.PromptSource`.
        options: read by `source`.
        max_prompt_tokens: longer prompts, counted with the chat template, are left out.
    """

    files: tuple[str, ...] = ()
    template: str = "{prompt}"
    held_out: tuple[str, ...] = ()
    source: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_prompt_tokens: int = 256

    def __post_init__(self):
        if bool(self.files) == (self.source is not None):
            raise ValueError(f"files={self.files}, source={self.source!r}: expected one of them")


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How the target answers the prompts.

    Attributes:
        num_tokens: response tokens to generate.
        max_new_tokens: per prompt.
        batch: prompts decoded together.
        temperatures: maps each temperature to its share of the prompts; 0 is greedy.
        top: tokens of the target's distribution stored per position, the most probable ones.
        dtype: of the target. On a CPU, bfloat16 is twice as fast with AVX-512 BF16 and ten times slower without.
        keep_hidden_states: also store the target's final hidden states, ``2 D`` bytes per token, for a draft that reads
            them.
    """

    num_tokens: int = 1_000_000
    max_new_tokens: int = 224
    batch: int = 64
    temperatures: Mapping[float, float] = dataclasses.field(default_factory=lambda: {0.0: 1.0})
    top: int = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    keep_hidden_states: bool = False

    def __post_init__(self):
        _check_positive(self, "num_tokens", "max_new_tokens", "batch", "top")
        if not self.temperatures or min(self.temperatures) < 0 or min(self.temperatures.values()) < 0:
            raise ValueError("temperatures: expected shares of temperatures, none negative")
        if not sum(self.temperatures.values()) > 0:
            raise ValueError("temperatures: expected a share above 0")

    def draw_temperature(self, draw: float) -> float:
        """Maps a uniform draw from [0, 1) to a temperature, in proportion to the shares."""
        values, shares = zip(*self.temperatures.items(), strict=True)
        ends = np.cumsum(np.array(shares, float) / sum(shares))
        return values[min(int(np.searchsorted(ends, draw, side="right")), len(values) - 1)]


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The draft. The vocabulary, the context and the rotary base are the target's.

    Attributes:
        kind: ``"decoder"``, a small model; or a head on hidden states of the target, which are computed during the
            training: ``"eagle3"``, or ``"peagle"``, which drafts all tokens in one pass. Or ``"early_exit"``, an
            adapter of `mlp_width` between the target's first `num_layers` layers and its head.
        hidden_layers: the hidden states that a head reads, as in `bass_jax.models.Model.forward`; default
            ``(2, L // 2, L - 3)``.
        width: D; for a head the target's.
        num_layers: L.
        num_heads: N.
        num_kv_heads: K.
        head_dim: H.
        mlp_width: F.
        output_vocab_size: O, tokens that the draft can propose: the most frequent ones of the corpus, all single bytes
            and all special tokens. None: the target's vocabulary.
        reads_hidden: a decoder that also reads the target's final hidden state at the previous token.
        target_layers: layers of the target, in order, that the draft starts as. Its size is then the target's, except
            for `output_vocab_size`.
        start: path of a draft for this target to continue from. It must have the size above, with three exceptions:
            it may have fewer layers, a smaller output vocabulary, or not read hidden states although `reads_hidden` is
            set. What is added does not change the draft's predictions at first.
    """

    kind: Literal["decoder", "eagle3", "peagle", "early_exit"] = "decoder"
    hidden_layers: tuple[int, ...] = ()
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
            raise ValueError(f"start={self.start!r}, target_layers={self.target_layers}: expected one of them")
        if self.kind == "early_exit":
            for name in ("output_vocab_size", "start"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name}={value!r}: expected null with kind='early_exit'")
        if self.kind != "decoder" and (self.reads_hidden or self.target_layers):
            name = "reads_hidden" if self.reads_hidden else "target_layers"
            raise ValueError(f"{name}={getattr(self, name)}: expected none with kind={self.kind!r}")
        if not self.is_head and self.hidden_layers:
            raise ValueError(f"hidden_layers={self.hidden_layers}: expected () with kind={self.kind!r}")

    @property
    def is_head(self) -> bool:
        """Whether the draft is a head on hidden states of chosen layers of the target."""
        return self.kind in ("eagle3", "peagle")


type Schedule = float | int | tuple[tuple[float | int, float | int], ...]
"""A weight, or points ``(share of the steps, weight)`` in ascending order with linear interpolation between them."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The loss per response token: a weighted sum whose weights may change during training.

    Only the target's most probable tokens are stored. For the reverse divergence and the total variation, all other
    tokens count as one more token.

    Attributes:
        soft_weight: of the cross-entropy to the target's stored distribution, renormalized over the output vocabulary.
            It equals the forward KL divergence plus a constant.
        hard_weight: of the cross-entropy to the target's most probable token.
        reverse_weight: of the KL divergence from the draft's distribution to the target's.
        total_variation_weight: of the total variation distance, which is the rejection rate at temperature 1.
        hidden_weight: of the relative squared error of the predicted hidden states, for a draft that reads them.
        unroll: consecutive drafts that a draft that reads hidden states is trained for, with one pass each. The first
            pass reads the target's hidden states. In the last one, ``unroll - 1`` of every ``2 unroll`` positions read
            hidden states that the draft predicted. A P-EAGLE head needs one further pass in all.
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
        _check_positive(self, "unroll")

    def weight_at(self, name: str, share: float) -> float:
        """Returns the weight `name` after that share of the steps."""
        shares, weights = zip(*_points(getattr(self, name)), strict=True)
        return float(np.interp(share, shares, weights))


def _points(weight: Schedule) -> tuple[tuple[float | int, float | int], ...]:
    return ((0.0, weight),) if isinstance(weight, float | int) else weight


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer. The learning rate rises linearly from 0 to its peak and then decays.

    Attributes:
        kind: ``"adamw"``; or ``"muon"`` for the matrices of the layers and AdamW for everything else.
        learning_rate: AdamW's peak.
        muon_learning_rate: Muon's peak.
        schedule: ``"cosine"`` decays over the whole run. ``"wsd"`` (warm-up, stable, decay) keeps the peak and decays
            linearly over the last `decay_share` of the steps.
        warmup_steps: steps to the peak.
        final_share: the last learning rate relative to the peak.
        decay_share: see `schedule`.
        weight_decay: on matrices only.
        beta2: of the second moment.
        clip_norm: maximum norm of the whole gradient.
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
        _check_positive(self, "learning_rate")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The length of the training and its batches.

    Attributes:
        num_steps: optimizer steps.
        batch_tokens: maximum number of response tokens per batch.
        length_grain: sequences are padded to a multiple of this; one step is compiled per length.
        log_every: steps between two lines of the log.
        save_every: steps between two training checkpoints.
        held_out_share: share of the corpus's prompts that is not trained on; checkpoints are evaluated on it.
        accumulate: batches per optimizer step.
        patience: stop after this many checkpoints without more tokens per target pass on the held-out share, and return
            the best checkpoint. None: train for `num_steps`.
        on_policy_share: share of the batches in which the draft writes the answers and the target scores them.
        data_shards: devices that a batch is split over.
        param_shards: devices that attention heads, MLP and vocabulary are split over.
        dtype: of the passes. Parameters, gradients and the optimizer's state are float32.
        product_dtype: of the inputs of products with weights in float32 passes, and of the gradients with respect to
            activations; see `ModelConfig`.
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
        _check_positive(self, "num_steps", "batch_tokens", "length_grain", "log_every", "save_every")
        _check_positive(self, "accumulate", "patience", "data_shards", "param_shards")
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
        target: the target: what `bass_jax.checkpoint.load_model` takes, or ``"package:module"`` for the only ``.gguf``
            file of an installed package.
        prompts: where the prompts come from.
        output_dir: directory of everything that is written; see ``docs/how_to/draft_training.md``.
        rollout: how the target answers them.
        draft: the size of the draft.
        loss: the loss.
        optimizer: the optimizer.
        training: the length of the training and its batches.
        seed: of all random numbers.
        draft_len: draft length of the reported tokens per target pass.
        corpus_dir: `output_dir` of another run whose corpus and held-out answers are used, so that several drafts can
            learn from one corpus.
        extra_corpora: directories of further runs with the same target whose corpora are trained on too.
        is_packed: store the draft's matrices in INT8 instead of bfloat16; they are converted on loading.
        held_out_temperatures: temperatures above 0 at which the held-out prompts are answered too, to measure the
            acceptance of sampled answers.
    """

    target: str
    prompts: PromptsConfig
    output_dir: str = "runs/distill"
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
        if self.is_packed and self.draft.kind != "decoder":
            raise ValueError(f"is_packed=True: expected False with kind={self.draft.kind!r}, stored in bfloat16")
        if (self.draft.reads_hidden or self.draft.kind != "decoder") and self.training.on_policy_share:
            share = self.training.on_policy_share
            raise ValueError(f"on_policy_share={share}: expected 0 for a draft that reads hidden states or layers")

    @property
    def corpus_root(self) -> Path:
        """The directory of the corpus and the held-out answers."""
        return Path(self.output_dir if self.corpus_dir is None else self.corpus_dir)


forbid_extra(PromptsConfig, RolloutConfig, DraftConfig, LossConfig, OptimizerConfig, TrainingConfig, DistillConfig)


def load_distill_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> DistillConfig:
    """Reads a configuration; see `bass_jax.runtime.yaml_config.read_yaml`."""
    return read_yaml(DistillConfig, path, overrides)
