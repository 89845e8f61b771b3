"""The configuration of a traffic experiment, read from one YAML file in which an unknown key is an error."""

import dataclasses
from pathlib import Path
from typing import Literal

from bass_jax.engine import EngineConfig
from bass_jax.experiments.traffic.arrivals import Phase
from bass_jax.runtime.yaml_config import forbid_extra, read_yaml

DEFAULT_POLICIES = (
    "fixed(draft_len=0)",
    "fixed(draft_len=2)",
    "fixed(draft_len=4)",
    "batch_table",
    "bass_heuristic(limit=8)",
    "auto",
)


@dataclasses.dataclass(frozen=True)
class SimulatedDevice:
    """A device by its public figures, and a pair by its shapes.

    Attributes:
        device: a name of `bass_jax.cost_model.DEVICES`.
        target: a name of `bass_jax.models.PRESETS`.
        draft: a name of `bass_jax.models.PRESETS`.
        c: ``c s^gamma`` of s drafts are accepted.
        gamma: see `c`.
        host_seconds: assumed time between two steps, while the device waits.
    """

    device: str
    target: str
    draft: str
    c: float = 0.9
    gamma: float = 0.548
    host_seconds: float = 1e-4


@dataclasses.dataclass(frozen=True)
class RealPair:
    """A pair on the device of this process.

    Attributes:
        path: of the pair.
        prompts: a text file with one prompt per line, or a JSONL data set.
        field: key of the prompt in a JSONL line.
        profile: of ``bass-jax profile``, for policies that need one; default one is measured at the engine's capacity.
    """

    path: str
    prompts: str
    field: str = "prompt"
    profile: str | None = None


@dataclasses.dataclass(frozen=True)
class TrafficPattern:
    """A pattern of arrivals: a constant rate (`inter_arrival` and `cv`), `phases`, or a recorded `file`.

    Attributes:
        name: in tables and plots.
        inter_arrival: mean seconds between requests.
        cv: coefficient of variation of the inter-arrival times.
        phases: periods of different rates, in place of `inter_arrival`; the first follows the last.
        file: JSONL of recorded arrivals, in place of both, with times in `TrafficConfig.unit`.
        num: requests; None means `RequestsConfig.num`.
    """

    name: str
    inter_arrival: float | None = None
    cv: float = 1.0
    phases: tuple[Phase, ...] = ()
    file: str | None = None
    num: int | None = None

    def __post_init__(self):
        if self.num is not None and self.num < 1:
            raise ValueError(f"traffic {self.name!r}: num={self.num}: expected at least 1")
        if sum((self.inter_arrival is not None, bool(self.phases), self.file is not None)) != 1:
            raise ValueError(f"traffic {self.name!r}: expected one of inter_arrival, phases and file")
        if self.inter_arrival is not None:
            Phase(1.0, self.inter_arrival, self.cv)

    def scaled_phases(self, unit: float) -> list[Phase]:
        """Returns the phases in seconds, given the seconds of the configuration's unit of time."""
        return [Phase(one.seconds * unit, one.inter_arrival * unit, one.cv) for one in self.phases]


@dataclasses.dataclass(frozen=True)
class RequestsConfig:
    """The number and the lengths of requests.

    Attributes:
        num: requests per run.
        prompt_tokens: smallest and largest length of a prompt. In real time the prompts are given, and cut at the
            largest length.
        new_tokens: smallest and largest length of an output. In real time they bound the limits, and an output may end
            earlier.
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
                raise ValueError(f"{name}={low}, {high}: expected 1 <= smallest <= largest")


@dataclasses.dataclass(frozen=True)
class TrafficConfig:
    """A traffic experiment: every pattern with every kind of batching and every policy, on the same requests.

    Attributes:
        name: of the experiment.
        output_dir: of results and plots.
        traffic: patterns of arrivals.
        simulated: a simulated device in simulated time.
        real: a pair in real time; exactly one of the two is given.
        requests: number and lengths of the requests.
        engine: its `batching` is replaced by that of each run.
        batching: kinds of batching to compare.
        policies: draft-length policies to compare, by name.
        unit: of the times in `traffic` and of `objective`: ``"seconds"``, or ``"service"``, the time of a request of
            mean length by itself without speculation (simulated time only).
        objective: largest acceptable latency; None for none.
        seed: of arrivals, lengths and simulated acceptance.
    """

    name: str
    output_dir: str
    traffic: tuple[TrafficPattern, ...]
    simulated: SimulatedDevice | None = None
    real: RealPair | None = None
    requests: RequestsConfig = RequestsConfig()
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    batching: tuple[Literal["static", "continuous"], ...] = ("static", "continuous")
    policies: tuple[str, ...] = DEFAULT_POLICIES
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
        names = [pattern.name for pattern in self.traffic]
        if len(set(names)) < len(names):
            raise ValueError(f"traffic: expected distinct names, not {names}")
        largest = self.requests.prompt_tokens[1] + self.requests.new_tokens[1]
        if self.simulated is not None and largest > self.engine.capacity:
            raise ValueError(f"requests can have {largest} tokens: expected at most capacity={self.engine.capacity}")


def load_traffic_config(path: Path) -> TrafficConfig:
    """Reads a configuration.

    Raises:
        ValueError: one line with the file and the dotted path of the wrong key.
    """
    return read_yaml(TrafficConfig, path)


forbid_extra(Phase, SimulatedDevice, RealPair, TrafficPattern, RequestsConfig, EngineConfig, TrafficConfig)
