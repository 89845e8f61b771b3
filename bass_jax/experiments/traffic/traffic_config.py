"""The configuration of a traffic experiment: one YAML file, checked to the last key."""

import dataclasses
from pathlib import Path
from typing import Literal

from bass_jax.engine import EngineConfig
from bass_jax.experiments.traffic.arrivals import Phase
from bass_jax.runtime.yaml_config import forbid_extra, read_yaml

POLICIES = (
    "fixed(draft_len=0)", "fixed(draft_len=2)", "fixed(draft_len=4)", "batch_table", "bass_heuristic(limit=8)",
    "goodput(objective='rate')",
)  # fmt: skip
"""Those that are compared unless told otherwise."""


@dataclasses.dataclass(frozen=True)
class SimulatedDevice:
    """A device by its public figures, and a pair by its shapes.

    Attributes:
        device: a name of `bass_jax.cost_model.DEVICES`.
        target: a name of `bass_jax.models.PRESETS`.
        draft: likewise.
        c: of the accepted drafts, ``c s^gamma``.
        gamma: see `c`.
        host_seconds: assumed between two steps, while the device waits.
    """

    device: str
    target: str
    draft: str
    c: float = 0.9
    gamma: float = 0.548
    host_seconds: float = 1e-4


@dataclasses.dataclass(frozen=True)
class RealPair:
    """A pair on the device at hand.

    Attributes:
        path: of the pair.
        prompts: a text file with one prompt per line, or a JSONL data set.
        field: key of the prompt in a JSONL line.
        profile: of `bass-jax profile`, for policies that need one; None measures one first, at the engine's capacity.
    """

    path: str
    prompts: str
    field: str = "prompt"
    profile: str | None = None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One pattern of arrivals: a steady one of `gap` and `cv`, `phases` that follow each other, or a recorded `file`.

    Attributes:
        name: for tables and plots.
        gap: mean seconds between requests.
        cv: coefficient of variation of the gaps.
        phases: in place of `gap`; the first follows the last.
        file: JSONL of recorded arrivals, in place of both; times are in `ExperimentConfig.unit`.
        num: requests; None means as many as `Requests.num` says.
    """

    name: str
    gap: float | None = None
    cv: float = 1.0
    phases: tuple[Phase, ...] = ()
    file: str | None = None
    num: int | None = None

    def __post_init__(self):
        if self.num is not None and self.num < 1:
            raise ValueError(f"traffic {self.name!r}: num={self.num}: expected at least 1")
        if sum((self.gap is not None, bool(self.phases), self.file is not None)) != 1:
            raise ValueError(f"traffic {self.name!r}: expected one of gap, phases and file")
        if self.gap is not None:
            Phase(1.0, self.gap, self.cv)


@dataclasses.dataclass(frozen=True)
class Requests:
    """What is asked for.

    Attributes:
        num: requests per run.
        prompt_tokens: least and most tokens of a prompt; in real time prompts are what they are, cut at the most.
        new_tokens: least and most tokens of an answer; in real time they are limits, and a stop token may come first.
    """

    num: int = 1000
    prompt_tokens: tuple[int, int] = (64, 192)
    new_tokens: tuple[int, int] = (64, 192)

    def __post_init__(self):
        if self.num < 1:
            raise ValueError(f"num={self.num}: expected at least 1")
        for name in ("prompt_tokens", "new_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name}={low}, {high}: expected 1 <= least <= most")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """A traffic experiment: every pattern, with every way of batching and every policy, on the same requests.

    Attributes:
        name: for people.
        output_dir: of results and plots.
        traffic: patterns of arrivals.
        simulated: in simulated time on such a device.
        real: in real time with such a pair; one of the two.
        requests: what is asked for.
        engine: slots and sizes; its `batching` is that of each run.
        batching: ways of batching to compare.
        policies: draft-length policies to compare, by name.
        unit: of all times in `traffic` and of `objective`: ``"seconds"``, or ``"service"``, the time that a request of
            mean length takes alone without speculation (simulated time alone).
        objective: latency that a request shall not exceed; None for none.
        seed: of arrivals, lengths and simulated texts.
    """

    name: str
    output_dir: str
    traffic: tuple[Traffic, ...]
    simulated: SimulatedDevice | None = None
    real: RealPair | None = None
    requests: Requests = Requests()
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    batching: tuple[Literal["static", "continuous"], ...] = ("static", "continuous")
    policies: tuple[str, ...] = POLICIES
    unit: Literal["seconds", "service"] = "seconds"
    objective: float | None = None
    seed: int = 0

    def __post_init__(self):
        if (self.simulated is None) == (self.real is None):
            raise ValueError("expected one of simulated and real")
        if self.real is not None and self.unit != "seconds":
            raise ValueError("unit='service': expected 'seconds' in real time")
        for name in ("traffic", "batching", "policies"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: expected at least one")
        names = [traffic.name for traffic in self.traffic]
        if len(set(names)) < len(names):
            raise ValueError(f"traffic: expected distinct names, not {names}")
        most = self.requests.prompt_tokens[1] + self.requests.new_tokens[1]
        if self.simulated is not None and most > self.engine.capacity:
            raise ValueError(f"requests may grow to {most} tokens: expected at most capacity={self.engine.capacity}")


def load_config(path: Path) -> ExperimentConfig:
    """Reads a configuration.

    Raises:
        ValueError: one line naming the file and the dotted path of what is wrong.
    """
    return read_yaml(ExperimentConfig, path)


forbid_extra(Phase, SimulatedDevice, RealPair, Traffic, Requests, EngineConfig, ExperimentConfig)
