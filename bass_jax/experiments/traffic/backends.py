"""The backends of a traffic experiment: a simulated device in simulated time, or this device in real time."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bass_jax.config import SpecConfig
from bass_jax.cost_model import (
    DEVICES,
    CostModel,
    Profile,
    pass_shape,
    power_law_rates,
    read_profile,
    roofline,
    step_seconds,
)
from bass_jax.decoding.load_pair import load_pair
from bass_jax.engine import Counts, Engine, EngineConfig, Loop, RequestHandle, Scheduler
from bass_jax.experiments.traffic.arrivals import Phase, arrival_times, read_arrivals
from bass_jax.experiments.traffic.calibration import measure_step_costs
from bass_jax.experiments.traffic.drive import RealClock, SimulatedClock, drive
from bass_jax.experiments.traffic.serving_costs import ServingCosts, device_costs
from bass_jax.experiments.traffic.simulated_executor import SimulatedExecutor, SimulatedRequest
from bass_jax.experiments.traffic.traffic_config import TrafficConfig, TrafficPattern
from bass_jax.experiments.traffic.workload import MAX_DRAFTS, Workload, sample_acceptable, sample_lengths
from bass_jax.models import preset
from bass_jax.policies import Policy, find_policy
from bass_jax.runtime.names import expected_one_of

type OnStep = Callable[[Loop], None]

_POLICY_ARGUMENTS = {"bandit": ("cost",), "batch_table": ("cost", "rates", "context")}
"""What policies need to know of the device and the pair. `auto` measures it where there is a clock."""


class ServedTraffic(NamedTuple):
    """The outcome of one run."""

    handles: list[RequestHandle]  # finished
    counts: Counts


def with_batching(config: EngineConfig, batching: Any) -> EngineConfig:
    """Returns the same sizes with another kind of batching, and an unlimited queue."""
    return dataclasses.replace(config, batching=batching, max_waiting=10**9)


def pattern_times(pattern: TrafficPattern, num: int, unit: float, seed: int) -> np.ndarray:
    """Returns the arrival times of a pattern: ``[R]`` seconds."""
    num = num if pattern.num is None else pattern.num
    if pattern.file is not None:
        return read_arrivals(pattern.file).times[:num] * unit
    constant = Phase(1e9, (pattern.inter_arrival or 1.0) * unit, pattern.cv)
    return arrival_times(num, pattern.scaled_phases(unit) or [constant], seed)


def make_policy(
    name: str, cost: CostModel, rates: Sequence[float], context: float | None = None, *, has_clock: bool = True
) -> Policy:
    """Makes a policy; one that needs costs gets those of the device it runs on."""
    known = {"cost": cost, "rates": rates} | ({} if context is None else {"context": context})
    arguments = _POLICY_ARGUMENTS if has_clock else _POLICY_ARGUMENTS | {"auto": ("cost", "rates")}
    needed = arguments.get(name.partition("(")[0], ())
    return find_policy(name, **{argument: known[argument] for argument in needed if argument in known})


class SimulatedBackend:
    """A simulated device, with costs from public figures and sampled acceptance.

    Attributes:
        identity: what results depend on besides the configuration: nothing.
    """

    identity = ""

    def __init__(self, config: TrafficConfig):
        """Looks up the device and the models.

        Raises:
            ValueError: if there is no such device or model.
        """
        simulated = config.simulated
        assert simulated is not None, "a simulated experiment"
        if simulated.device not in DEVICES:
            raise ValueError(f"device={simulated.device!r}: {expected_one_of(simulated.device, sorted(DEVICES))}")
        self._config, self._device = config, DEVICES[simulated.device]
        self._host_seconds = simulated.host_seconds
        target, draft = (pass_shape(preset(name)) for name in (simulated.target, simulated.draft))
        self._model = roofline(target, draft, self._device)
        self._rates = power_law_rates(simulated.c, simulated.gamma, MAX_DRAFTS)
        requests = config.requests
        self._context = sum(requests.prompt_tokens) / 2 + sum(requests.new_tokens) / 4

    @property
    def unit_seconds(self) -> float:
        """Seconds per unit of the configuration's times."""
        if self._config.unit == "seconds":
            return 1.0
        step = float(step_seconds(self._model, 1, 0, self._context))
        return step * sum(self._config.requests.new_tokens) / 2

    def workload(self, pattern: TrafficPattern) -> Workload:
        """Samples arrivals, lengths and acceptance."""
        config = self._config
        times = pattern_times(pattern, config.requests.num, self.unit_seconds, config.seed)
        random = np.random.default_rng((config.seed, 1))
        prompts = sample_lengths(config.requests.prompt_tokens, len(times), random)
        lengths = sample_lengths(config.requests.new_tokens, len(times), random)
        if pattern.file is not None:
            recorded = read_arrivals(pattern.file)
            prompts = prompts if recorded.prompt_tokens is None else recorded.prompt_tokens[: len(times)]
            lengths = lengths if recorded.new_tokens is None else recorded.new_tokens[: len(times)]
            if (prompts + lengths).max() > config.engine.capacity:
                raise ValueError(f"{pattern.file}: expected at most {config.engine.capacity} tokens per request")
        return Workload(times, prompts, lengths, lengths, sample_acceptable(self._rates, lengths, config.seed))

    def serve(self, workload: Workload, batching: str, policy: str, on_step: OnStep | None = None) -> ServedTraffic:
        """Serves the requests in simulated time."""
        engine = with_batching(self._config.engine, batching)
        costs = device_costs(self._model, self._device, engine, self._host_seconds)
        chosen = make_policy(policy, self._model, self._rates, self._context)
        return simulate_traffic(workload, engine, chosen, costs, on_step)


def simulate_traffic(
    workload: Workload, engine: EngineConfig, policy: Policy, costs: ServingCosts, on_step: OnStep | None = None
) -> ServedTraffic:
    """Serves `workload` in simulated time with the engine's own loop and scheduler."""
    clock = SimulatedClock()
    loop = Loop(Scheduler(engine), SimulatedExecutor(policy, costs, engine, clock), clock, on_step)

    def submit(index: int) -> RequestHandle:
        request = SimulatedRequest(
            prompt=np.zeros(workload.prompt_tokens[index], np.int32),
            max_new_tokens=int(workload.limits[index]),
            num_tokens=int(workload.new_tokens[index]),
            acceptable=workload.acceptable[index],
        )
        handle = RequestHandle(request, on_cancel=loop.cancel)
        loop.submit(handle)
        return handle

    return ServedTraffic(drive(loop, clock, workload.times.tolist(), submit), loop.counts)


class RealBackend:
    """A pair on this device, which serves greedy requests with real prompts.

    Attributes:
        pair: of the configuration.
        unit_seconds: 1.
    """

    unit_seconds = 1.0

    def __init__(self, config: TrafficConfig, texts: Sequence[str], on_note: Callable[[str], None] = lambda note: None):
        """Loads the pair; each request uses a random one of `texts` as its prompt.

        Raises:
            ValueError: if the pair cannot be loaded.
        """
        assert config.real is not None, "an experiment in real time"
        self._config, self._real, self._on_note = config, config.real, on_note
        self.pair = load_pair(config.real.path)
        longest = config.requests.prompt_tokens[1]
        tokenizer: Any = self.pair.tokenizer
        self._prompts = [tokenizer.encode_prompt(text)[:longest] for text in texts]
        self._context = config.engine.capacity / 2

    @property
    def identity(self) -> str:
        """Hashes the prompts, and the names, sizes and times of the files that the configuration names."""
        digest = hashlib.sha256(b"".join(row.tobytes() for row in self._prompts))
        for root in (Path(one) for one in (self._real.path, self._real.profile) if one is not None):
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                status = path.stat()
                if path.is_file():
                    digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def profile(self) -> Profile:
        """The profile of the configuration; without one, it is measured on first use."""
        if self._real.profile is not None:
            return read_profile(self._real.profile)
        return measure_step_costs(self.pair, self._prompts, self._config.engine, self._on_note)

    def workload(self, pattern: TrafficPattern) -> Workload:
        """Samples arrivals, prompts and limits."""
        config = self._config
        times = pattern_times(pattern, config.requests.num, 1.0, config.seed)
        limits = sample_lengths(config.requests.new_tokens, len(times), np.random.default_rng((config.seed, 1)))
        lengths = np.array([len(prompt) for prompt in self.prompts(len(times))])
        return Workload(times, lengths, limits, limits, [])

    def prompts(self, num: int) -> list[np.ndarray]:
        """Returns the prompts of the first `num` requests."""
        rows = np.random.default_rng((self._config.seed, 2)).integers(0, len(self._prompts), num)
        return [self._prompts[row] for row in rows]

    def policy(self, name: str) -> Policy:
        """Makes a policy; one that needs costs gets those of the profile."""
        if name.partition("(")[0] not in _POLICY_ARGUMENTS:
            return find_policy(name)
        return make_policy(name, self.profile.table, self.profile.rates, self._context)

    def engine(self, batching: str, policy: str, clock: Callable[[], float], on_step: OnStep | None = None) -> Engine:
        """Returns an engine with all its steps compiled."""
        chosen = self.policy(policy)
        spec = SpecConfig(chosen.lengths[-1], "greedy")
        config = with_batching(self._config.engine, batching)
        return Engine(self.pair, spec, policy=chosen, config=config, clock=clock, on_step=on_step)

    def serve(self, workload: Workload, batching: str, policy: str, on_step: OnStep | None = None) -> ServedTraffic:
        """Serves the requests in real time. The clock starts after compilation."""
        engine = self.engine(batching, policy, lambda: 0.0, on_step)
        prompts = self.prompts(len(workload.times))

        def submit(index: int) -> RequestHandle:
            return engine.submit(prompts[index], max_new_tokens=int(workload.limits[index]))

        engine.loop.clock = clock = RealClock()
        return ServedTraffic(drive(engine.loop, clock, workload.times.tolist(), submit), engine.counts)


type Backend = SimulatedBackend | RealBackend
"""Makes the requests of a pattern (`workload`) and serves them at their arrival times (`serve`)."""
