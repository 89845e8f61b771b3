"""The configuration of an experiment, read from one YAML file in which an unknown key is an error."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bass_jax.acceptance import find_rule
from bass_jax.acceptance.base import check_greedy
from bass_jax.policies import find_policy
from bass_jax.runtime.names import expected_one_of
from bass_jax.runtime.yaml_config import forbid_extra, parse_yaml, read_yaml
from bass_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """The target and the drafter.

    Attributes:
        path: a pair or a target, as in `bass_jax.load_pair`.
        target: in place of `path`, a name of `bass_jax.models.PRESETS`: random weights of that shape, for speed only.
        draft: the drafter, as in `bass_jax.load_pair`: ``"ngram"``, ``"ensemble"``, a path, ``"module:name"`` …;
            default the pair's draft. With `target`, a preset, a registered name (default ``"ngram"``) or
            ``"module:name"``.
        dtype: of weights and activations; default as stored, for presets bfloat16.
        quantize: of the target's weights, as in `bass_jax.load_pair`.
        cache_dtype: of the target's cache, as in `bass_jax.load_pair`.
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
    """The task and a selection of its problems.

    Attributes:
        name: of a registered task, or ``"module:name"``.
        data: source of the data, see `bass_jax.experiments.data_sources.read_data`; default the task's own.
        limit: maximum number of problems.
        categories: use only problems of these categories.
        per_category: maximum number of problems of each category.
        chat: ask in the target's chat template; default if it has one.
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
    """How tokens are sampled; see `bass_jax.SamplingParams`.

    Attributes:
        temperature: 0 is greedy.
        top_k: sample from this many most probable tokens; 0 is off.
        top_p: sample from the smallest set of tokens with this probability; 1 is off.
        min_p: sample from tokens with at least this share of the largest probability; 0 is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        self.params()

    def params(self) -> SamplingParams:
        """Returns the settings as `bass_jax.generate` takes them."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """A method of decoding; a run compares several.

    Attributes:
        step: ``"speculate"``, ``"decode"`` (regular decoding), or ``"synchronized"`` (all rows advance by the minimum).
        batch: rows decoded together; with several numbers, each is a variant of its own. Samples of one problem share
            a batch; a batch that is larger takes several problems.
        draft_len: drafts per step; default: chosen by `policy`.
        policy: chooses the draft length: ``"auto"`` (the default), ``"bass_heuristic"``, ``"module:name"``.
        profile: file written by ``bass-jax profile``, for policies that need one.
        acceptance: acceptance rule; ``"synthetic(0.8)"`` forces acceptance, for studies of speed.
        draft: another drafter than the pair's, see `PairConfig.draft`.
        attention: ``"ragged"``, ``"pad"``, ``"split"`` or ``"xla"``; default the models' own.
        quantize: of the target, instead of the pair's setting. The target's distribution then changes.
        num_samples: of each problem; default the experiment's.
    """

    step: Literal["speculate", "decode", "synchronized"] = "speculate"
    batch: int | tuple[int, ...] = 8
    draft_len: int | None = None
    policy: str | None = None
    profile: str | None = None
    acceptance: str = "token"
    draft: str | None = None
    attention: Literal["ragged", "pad", "split", "xla"] | None = None
    quantize: Literal["int8", "int8_activations"] | None = None
    num_samples: int | None = None

    def __post_init__(self):
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise ValueError(f"batch={self.batch}: expected distinct numbers of at least 1 row")
        if self.draft_len is not None and not 0 <= self.draft_len <= 32:
            raise ValueError(f"draft_len={self.draft_len}: expected 0 to 32")
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: expected at least 1")
        if self.step != "speculate" and self.policy is not None:
            raise ValueError(f"policy={self.policy!r}: expected none with step={self.step!r}")
        if self.profile is not None and self.policy is None:
            raise ValueError("profile: expected a policy that reads it")
        find_rule(self.acceptance)
        if self.policy is not None and self.profile is None and ":" not in self.policy:
            find_policy(self.policy)  # A policy with a profile is made when the run begins.

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes."""
        return (self.batch,) if isinstance(self.batch, int) else self.batch


class Variant(NamedTuple):
    """A method at one batch size."""

    label: str  # in tables and files
    name: str  # of the method
    method: MethodConfig
    batch: int
    num_samples: int  # of each problem


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """An experiment: one task, decoded with several methods.

    Attributes:
        title: of the report.
        output_dir: the run directory.
        pair: target and drafter.
        task: the problems.
        methods: methods of decoding, by name.
        baseline: the method that speed-ups are relative to; default the first with regular decoding.
        sampling: how tokens are sampled.
        num_samples: answers per problem.
        max_new_tokens: per answer.
        budget: seconds per problem after which its rows are stopped; rows that had not finished count as failed.
        seeds: the answers are sampled once per seed.
        repeats: number of times that each seed's answers are decoded, for the spread of the times.
        trace: also write traces of the drafts, for ``bass-jax simulate``.
        device: its peak FLOP/s are the reference of utilization: ``"h200"``, ``"a100"``; default the device of the run
            if it has one of these names, else a measurement.
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
            raise ValueError(f"seeds={self.seeds}: expected distinct numbers of at least 0")
        if self.baseline is not None and self.baseline not in self.methods:
            raise ValueError(f"baseline={self.baseline!r}: {expected_one_of(self.baseline, self.methods)}")
        for name, method in self.methods.items():
            try:
                check_greedy(find_rule(method.acceptance), self.sampling.params())
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
        """Returns the label of the variant that the speed-up of `variant` is relative to; None without a baseline.

        It is the baseline method at the same batch size if there is one, else at the method's first batch size.
        """
        names = [name for name, method in self.methods.items() if method.step == "decode"]
        name = self.baseline or (names[0] if names else None)
        labels = {one.batch: one.label for one in self.variants() if one.name == name}
        return labels.get(variant.batch, next(iter(labels.values()), None))


forbid_extra(PairConfig, TaskConfig, SamplingConfig, MethodConfig, ExperimentConfig)


def load_experiment(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Reads a configuration; see `bass_jax.runtime.yaml_config.read_yaml`."""
    return read_yaml(ExperimentConfig, Path(path), overrides)


def parse_experiment(content: Mapping[str, Any], name: str = "config") -> ExperimentConfig:
    """Checks a parsed configuration; see `load_experiment`."""
    return parse_yaml(ExperimentConfig, content, name)
