"""Where an experiment takes place: a simulated device in simulated time, or this one in real time."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bass_jax.config import SpecConfig
from bass_jax.cost_model import DEVICES, CostModel, Profile, pass_shape, read_profile, roofline, step_seconds
from bass_jax.decoding.load_pair import load_pair
from bass_jax.decoding.pair import Pair
from bass_jax.engine import Counts, Engine, EngineConfig, Loop, RequestHandle, Scheduler
from bass_jax.experiments.traffic.arrivals import Phase, arrival_times, read_arrivals
from bass_jax.experiments.traffic.calibration import measure_step_costs
from bass_jax.experiments.traffic.clocks import RealClock, SimulatedClock
from bass_jax.experiments.traffic.drive import drive
from bass_jax.experiments.traffic.serving_costs import ServingCosts, device_costs
from bass_jax.experiments.traffic.simulated_executor import SimulatedExecutor, SimulatedRequest
from bass_jax.experiments.traffic.traffic_config import ExperimentConfig, Traffic
from bass_jax.experiments.traffic.workload import Workload, acceptance_rates, draw_acceptable, draw_lengths
from bass_jax.models import preset
from bass_jax.policies import Policy, find_policy

type OnStep = Callable[[Loop], None]


class Outcome(NamedTuple):
    """One run."""

    handles: list[RequestHandle]  # finished
    counts: Counts


@runtime_checkable
class World(Protocol):
    """Serves a workload."""

    @property
    def identity(self) -> str:
        """Of what decides over results besides the configuration."""
        ...

    @property
    def unit_seconds(self) -> float:
        """Seconds of one unit of the configuration's times."""
        ...

    def workload(self, traffic: Traffic) -> Workload:
        """The requests of a pattern, the same for every policy and way of batching."""
        ...

    def serve(self, workload: Workload, batching: str, policy: str, on_step: OnStep | None) -> Outcome:
        """Lets them come."""
        ...


def batched(config: EngineConfig, batching: Any) -> EngineConfig:
    """The same sizes with another way of batching, and a queue that refuses nobody."""
    return dataclasses.replace(config, batching=batching, max_waiting=10**9)


def pattern_times(traffic: Traffic, num: int, unit: float, seed: int) -> np.ndarray:
    """When the requests of a pattern come: ``[R]`` seconds."""
    num = num if traffic.num is None else traffic.num
    if traffic.file is not None:
        return read_arrivals(traffic.file).times[:num] * unit
    phases = traffic.phases or (Phase(1e9, traffic.gap or 1.0, traffic.cv),)
    scaled = [dataclasses.replace(one, seconds=one.seconds * unit, mean_gap=one.mean_gap * unit) for one in phases]
    return arrival_times(num, scaled, seed)


NEED_COSTS = ("goodput", "bandit", "batch_table")
"""Policies that are given the costs of where they run."""


def make_policy(name: str, cost: CostModel, rates: Sequence[float], context: float) -> Policy:
    """Builds a policy; those that ask for costs get the world's."""
    both = {"cost": cost, "rates": rates}
    given: dict[str, Any] = dict(zip(NEED_COSTS, (both, {"cost": cost}, both | {"context": context}), strict=True))
    return find_policy(name, **given.get(name.partition("(")[0], {}))


class SimulatedWorld:
    """Costs of public figures, texts of a power distribution.

    Attributes:
        identity: empty, because the configuration says it all.
    """

    identity = ""

    def __init__(self, config: ExperimentConfig):
        """Looks device and models up.

        Raises:
            ValueError: if there is no such device or model.
        """
        simulated = config.simulated
        assert simulated is not None, "a simulated experiment"
        if simulated.device not in DEVICES:
            raise ValueError(f"device={simulated.device!r}: expected one of {sorted(DEVICES)}")
        self._config, self._device = config, DEVICES[simulated.device]
        target, draft = (pass_shape(preset(name)) for name in (simulated.target, simulated.draft))
        self._model = roofline(target, draft, self._device)
        self._rates = acceptance_rates(simulated.c, simulated.gamma)
        requests = config.requests
        self._context = sum(requests.prompt_tokens) / 2 + sum(requests.new_tokens) / 4

    @property
    def unit_seconds(self) -> float:
        """A request of mean length alone, without drafts and without waiting."""
        if self._config.unit == "seconds":
            return 1.0
        step = float(step_seconds(self._model, 1, 0, self._context))
        return step * sum(self._config.requests.new_tokens) / 2

    def workload(self, traffic: Traffic) -> Workload:
        """Draws arrivals, lengths and acceptances."""
        config = self._config
        times = pattern_times(traffic, config.requests.num, self.unit_seconds, config.seed)
        random = np.random.default_rng((config.seed, 1))
        prompts = draw_lengths(config.requests.prompt_tokens, len(times), random)
        news = draw_lengths(config.requests.new_tokens, len(times), random)
        if traffic.file is not None:
            recorded = read_arrivals(traffic.file)
            prompts = prompts if recorded.prompt_tokens is None else recorded.prompt_tokens[: len(times)]
            news = news if recorded.new_tokens is None else recorded.new_tokens[: len(times)]
            if (prompts + news).max() > config.engine.capacity:
                raise ValueError(f"{traffic.file}: expected at most {config.engine.capacity} tokens per request")
        return Workload(times, prompts, news, news, draw_acceptable(self._rates, news, config.seed))

    def serve(self, workload: Workload, batching: str, policy: str, on_step: OnStep | None = None) -> Outcome:
        """Serves in simulated time."""
        engine = batched(self._config.engine, batching)
        assert self._config.simulated is not None, "a simulated experiment"
        costs = device_costs(self._model, self._device, engine, self._config.simulated.host_seconds)
        chosen = make_policy(policy, self._model, self._rates, self._context)
        return simulate_traffic(workload, engine, chosen, costs, on_step)


def simulate_traffic(
    workload: Workload, engine: EngineConfig, policy: Policy, costs: ServingCosts, on_step: OnStep | None = None
) -> Outcome:
    """Serves `workload` in simulated time: the scheduler is the engine's own."""
    clock = SimulatedClock()
    loop = Loop(Scheduler(engine), SimulatedExecutor(policy, costs, engine, clock), clock, on_step)

    def submit(index: int) -> RequestHandle:
        request = SimulatedRequest(
            np.zeros(workload.prompt_tokens[index], np.int32), int(workload.limits[index]),
            num_tokens=int(workload.new_tokens[index]), acceptable=workload.acceptable[index],
        )  # fmt: skip
        handle = RequestHandle(request, on_cancel=loop.cancel)
        loop.submit(handle)
        return handle

    return Outcome(drive(loop, clock, workload.times.tolist(), submit), loop.counts)


class RealWorld:
    """A pair on this device; greedy requests on real prompts.

    Attributes:
        pair: of the configuration.
    """

    def __init__(
        self, config: ExperimentConfig, texts: Sequence[str], on_note: Callable[[str], None] = lambda note: None
    ):
        """Loads the pair and reads or measures its profile.

        Args:
            config: with `ExperimentConfig.real`.
            texts: prompts to draw from.
            on_note: told what is measured next.

        Raises:
            ValueError: if pair or profile cannot be read.
        """
        real = config.real
        assert real is not None, "an experiment in real time"
        self._config, self._real, self.unit_seconds = config, real, 1.0
        self.pair: Pair = load_pair(real.path)
        most = config.requests.prompt_tokens[1]
        self._prompts = [self.pair.tokenizer.encode_prompt(text)[:most] for text in texts]
        self._on_note = on_note
        self._context = config.engine.capacity / 2

    @property
    def identity(self) -> str:
        """A hash of the prompts, and of the names, sizes and times of the files that the configuration names."""
        digest = hashlib.sha256(b"".join(row.tobytes() for row in self._prompts))
        for root in (Path(one) for one in (self._real.path, self._real.profile) if one is not None):
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                status = path.stat()
                if path.is_file():
                    digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def profile(self) -> Profile:
        """Of the configuration's file, or measured when it is first asked for."""
        if self._real.profile is not None:
            return read_profile(self._real.profile)
        return measure_step_costs(self.pair, self._prompts, self._config.engine, self._on_note)

    def workload(self, traffic: Traffic) -> Workload:
        """Draws arrivals, limits and, in place of lengths, which prompt it is; see `prompt_rows`."""
        config = self._config
        times = pattern_times(traffic, config.requests.num, 1.0, config.seed)
        limits = draw_lengths(config.requests.new_tokens, len(times), np.random.default_rng((config.seed, 1)))
        rows = self.prompt_rows(len(times))
        lengths = np.array([len(self._prompts[row]) for row in rows])
        return Workload(times, lengths, limits, limits, [])

    def prompt_rows(self, num: int) -> np.ndarray:
        """Which prompt each request asks: ``[R]`` int."""
        return np.random.default_rng((self._config.seed, 2)).integers(0, len(self._prompts), num)

    def prompts(self, num: int) -> list[np.ndarray]:
        """The prompt of each request."""
        return [self._prompts[row] for row in self.prompt_rows(num)]

    def policy(self, name: str) -> Policy:
        """A policy that knows this pair's costs."""
        if name.partition("(")[0] not in NEED_COSTS:
            return find_policy(name)
        return make_policy(name, self.profile.table, self.profile.rates, self._context)

    def engine(self, batching: str, policy: str, clock: Callable[[], float], on_step: OnStep | None = None) -> Engine:
        """An engine, warmed up."""
        chosen = self.policy(policy)
        spec = SpecConfig(chosen.lengths[-1], "greedy")
        return Engine(
            self.pair, spec, policy=chosen, config=batched(self._config.engine, batching), clock=clock, on_step=on_step
        )

    def serve(self, workload: Workload, batching: str, policy: str, on_step: OnStep | None = None) -> Outcome:
        """Serves in real time; the clock starts when everything is compiled."""
        clocks: list[RealClock] = []
        engine = self.engine(batching, policy, lambda: clocks[0](), on_step)
        prompts = self.prompts(len(workload.times))
        clocks.append(RealClock())
        handles = drive(
            engine.loop, clocks[0], workload.times.tolist(),
            lambda index: engine.submit(prompts[index], max_new_tokens=int(workload.limits[index])),
        )  # fmt: skip
        return Outcome(handles, engine.counts)
