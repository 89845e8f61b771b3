"""The configuration of an experiment: one YAML file, checked to the last key."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bass_jax.acceptance import find_rule
from bass_jax.acceptance.base import check_greedy
from bass_jax.policies import find_policy
from bass_jax.runtime.yaml_config import forbid_extra, parse_yaml, read_yaml
from bass_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """What decodes.

    Attributes:
        path: of a pair or a target, as `bass_jax.load_pair` takes it; its draft is the drafter unless `draft` names
            another: ``"ngram"``, ``"store"``, ``"combined"``, ``"combined_hidden"``, or the path of one.
        target: instead of a path, a name of `bass_jax.models.PRESETS`: random weights of that shape, for speed alone.
            `draft` is then a preset too, or None for ``"ngram"``.
        draft: see above.
        dtype: of weights and activations; default as stored, for presets bfloat16.
        quantize: of the target's weights, as in `bass_jax.load_pair`.
        cache_dtype: of the target's cache, likewise.
    """

    path: str | None = None
    target: str | None = None
    draft: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    quantize: Literal["int8", "int8_activations"] | None = None
    cache_dtype: Literal["int8"] | None = None

    def __post_init__(self):
        if (self.path is None) == (self.target is None):
            raise ValueError("expected a path, or a target's preset, and not both")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """What is asked.

    Attributes:
        name: of a registered task, or ``"module:name"``.
        data: its source; default the task's own. See `bass_jax.experiments.data_sources.read_rows`.
        limit: take only so many problems.
        categories: take only these.
        per_category: take only the first so many of each category.
        chat: ask in the target's chat template; default where it has one.
    """

    name: str
    data: str | None = None
    limit: int | None = None
    categories: tuple[str, ...] | None = None
    per_category: int | None = None
    chat: bool | None = None

    def __post_init__(self):
        for name in ("limit", "per_category"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn; see `bass_jax.SamplingParams`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        self.sampling()

    def sampling(self) -> SamplingParams:
        """As `generate` takes it."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """One way to decode; several are compared in a run.

    Attributes:
        step: ``"speculate"``, ``"decode"`` (regular decoding), or ``"synchronized"`` (all rows advance alike).
        batch: rows decoded together, or several numbers, each of which is a way of its own. Samples of one problem
            share a batch; where it holds more than those, it takes several problems.
        draft_len: drafts per step.
        policy: chooses them instead: ``"bass_heuristic"``, ``"goodput"``, ``"module:name"``.
        profile: file of ``bass-jax profile``, for policies that need one.
        acceptance: rule; ``"synthetic(0.8)"`` forces acceptance, for speed studies.
        draft: another drafter than the pair's, named like that; for random weights a preset.
        attention: ``"ragged"``, ``"pad"``, ``"split"`` or ``"xla"``; default the models' own.
        quantize: of the target, instead of the pair's; a target of its own then, whose distribution is another.
        num_samples: of each problem; default the experiment's.
    """

    step: Literal["speculate", "decode", "synchronized"] = "speculate"
    batch: int | tuple[int, ...] = 8
    draft_len: int = 4
    policy: str | None = None
    profile: str | None = None
    acceptance: str = "token"
    draft: str | None = None
    attention: Literal["ragged", "pad", "split", "xla"] | None = None
    quantize: Literal["int8", "int8_activations"] | None = None
    num_samples: int | None = None

    def __post_init__(self):
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise ValueError(f"batch={self.batch}: expected at least 1 row, no number twice")
        if not 0 <= self.draft_len <= 32:
            raise ValueError(f"draft_len={self.draft_len}: expected 0 to 32")
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: expected at least 1")
        if self.step != "speculate" and self.policy is not None:
            raise ValueError(f"policy={self.policy!r}: expected none with step={self.step!r}")
        if self.profile is not None and self.policy is None:
            raise ValueError("profile: expected a policy that reads it")
        find_rule(self.acceptance)
        # One that reads a profile is made when it is there.
        if self.policy is not None and self.profile is None and ":" not in self.policy:
            find_policy(self.policy)

    @property
    def batches(self) -> tuple[int, ...]:
        """All batch sizes."""
        return (self.batch,) if isinstance(self.batch, int) else self.batch


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method at one batch size.

    Attributes:
        label: in tables and files.
        name: of the method.
        method: its configuration.
        batch: rows decoded together.
        num_samples: of each problem.
    """

    label: str
    name: str
    method: MethodConfig
    batch: int
    num_samples: int


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """An experiment: one task, decoded in several ways.

    Attributes:
        title: for people.
        output_dir: the run directory.
        pair: what decodes.
        task: what is asked.
        methods: the ways, by name.
        baseline: the method that speed-ups are over; default the first that decodes regularly.
        sampling: how tokens are drawn.
        num_samples: answers per problem.
        max_new_tokens: per answer.
        budget: seconds per problem after which its rows stop; those that had not finished count as failed.
        seeds: each draws answers of its own.
        repeats: each seed's answers are decoded so often, for the spread of the times.
        trace: also record what decided over every draft, for ``bass-jax simulate``.
        device: whose peak the utilization is a share of: ``"h200"``, ``"a100"``; default measured, except on a GPU of
            these names.
    """

    output_dir: str
    pair: PairConfig
    task: TaskConfig
    methods: Mapping[str, MethodConfig]
    title: str = ""
    baseline: str | None = None
    sampling: SamplingConfig = SamplingConfig()
    num_samples: int = 1
    max_new_tokens: int = 128
    budget: float | None = None
    seeds: tuple[int, ...] = (0,)
    repeats: int = 1
    trace: bool = False
    device: Literal["h200", "a100"] | None = None

    def __post_init__(self):
        for name in ("num_samples", "max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.budget is not None and not self.budget > 0:
            raise ValueError(f"budget={self.budget}: expected seconds above 0")
        if not self.methods:
            raise ValueError("methods: expected at least one")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds}: expected at least one, none negative, none twice")
        if self.baseline is not None and self.baseline not in self.methods:
            raise ValueError(f"baseline={self.baseline!r}: expected one of {list(self.methods)}")
        for name, method in self.methods.items():
            try:
                check_greedy(find_rule(method.acceptance), self.sampling.sampling())
            except ValueError as error:
                raise ValueError(f"methods.{name}: {error}") from None
        for variant in self.variants():
            larger, smaller = max(variant.batch, variant.num_samples), min(variant.batch, variant.num_samples)
            if larger % smaller:
                raise ValueError(
                    f"methods.{variant.label}: batch={variant.batch} with num_samples={variant.num_samples}: "
                    "expected one to be a multiple of the other"
                )

    def variants(self) -> tuple[Variant, ...]:
        """Returns every method at each of its batch sizes."""
        found = []
        for name, method in self.methods.items():
            for batch in method.batches:
                label = name if len(method.batches) == 1 else f"{name}, batch {batch}"
                found.append(Variant(label, name, method, batch, method.num_samples or self.num_samples))
        return tuple(found)

    def baseline_of(self, variant: Variant) -> str | None:
        """Returns the label of the variant that the speed-up of `variant` is over.

        That of the baseline method at the same batch size where there is one, else the method's first.
        """
        names = [name for name, method in self.methods.items() if method.step == "decode"]
        name = self.baseline or (names[0] if names else None)
        if name is None:
            return None
        labels = {one.batch: one.label for one in self.variants() if one.name == name}
        return labels.get(variant.batch, next(iter(labels.values())))


forbid_extra(PairConfig, TaskConfig, SamplingConfig, MethodConfig, ExperimentConfig)


def load_experiment(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Reads a configuration; see `bass_jax.runtime.yaml_config.read_yaml`."""
    return read_yaml(ExperimentConfig, Path(path), overrides)


def parse_experiment(content: Mapping[str, Any], name: str = "config") -> ExperimentConfig:
    """Checks a parsed configuration; see `load_experiment`."""
    return parse_yaml(ExperimentConfig, content, name)
