"""Tests of the planner: rows that join or move get the policy's state of their own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.decoding.policy_runner import no_times
from bass_jax.decoding.state import FinishReason
from bass_jax.drafters import NgramDrafter
from bass_jax.engine.planner import Planner
from bass_jax.experiments.traffic.backends import simulate_traffic
from bass_jax.experiments.traffic.serving_costs import NUM_CONTEXTS, ServingCosts
from bass_jax.experiments.traffic.workload import Workload
from bass_jax.policies.protocol import Plan
from bass_jax.testing.tiny_models import tiny_target
from tests import tiny
from tests.cost_model.profiles import made_up


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountingPolicy:
    """Plans as many drafts as a row has emitted tokens; has a random key per row, and a number of updates."""

    lengths: tuple[int, ...] = dataclasses.field(default=(0, 1, 2, 3, 4), metadata={"static": True})

    def init(self, num_rows: int) -> Any:
        keys = jax.random.split(jax.random.key(0), num_rows)
        return {"emitted": jnp.zeros(num_rows, jnp.int32), "keys": keys, "updates": jnp.int32(0)}

    def update(self, state: Any, stats: Any) -> tuple[Any, Plan]:
        state = state | {"emitted": state["emitted"] + stats.num_emitted, "updates": state["updates"] + 1}
        return state, Plan(state["emitted"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RefilledPolicy:
    """Drafts where other requests take the rows of those that end."""

    lengths: tuple[int, ...] = dataclasses.field(default=(0, 1), metadata={"static": True})

    def init(self, num_rows: int) -> Any:
        return jnp.int32(0)

    def update(self, state: Any, stats: Any) -> tuple[Any, Plan]:
        return state, Plan(jnp.full(stats.lengths.shape, stats.is_refilled, jnp.int32))


def plan(planner: Planner, emitted: list[int]) -> tuple[list[int], list[int]]:
    num_rows = len(emitted)
    lengths, limits, counts = (np.asarray(x, np.int32) for x in ([10] * num_rows, [20] * num_rows, emitted))
    finish, zeros = np.full(num_rows, FinishReason.RUNNING, np.int32), np.zeros(num_rows, np.int32)
    times = no_times(CountingPolicy())
    planned, wanted = planner.plan((lengths, limits, finish, zeros), (counts > 0, zeros, zeros, counts), times)
    return planned.draft_lens.tolist(), wanted.tolist()


def test_rows_that_join_or_move_keep_or_lose_their_state():
    planner = Planner(CountingPolicy(), 3)
    assert plan(planner, [1, 2, 0]) == ([1, 2, 0], [2, 2])
    planner.insert(1)
    assert plan(planner, [1, 1, 1]) == ([2, 1, 1], [2, 2])
    keys = jax.random.key_data(planner.state["keys"])
    planner.insert(2)
    planner.regroup(np.array([2, 0]))  # The new row has not been in a step yet.
    assert plan(planner, [1, 2]) == ([1, 4], [4, 4])
    assert int(planner.state["updates"]) == 3
    moved = jax.random.key_data(planner.state["keys"])
    np.testing.assert_array_equal(moved[1], keys[0])
    np.testing.assert_array_equal(moved[0], jax.random.key_data(CountingPolicy().init(2)["keys"])[0])


@pytest.mark.parametrize("max_batch", [2, 4])
def test_a_policy_knows_whether_prompts_wait(max_batch):
    pair = bass.Pair(tiny_target(16), NgramDrafter())
    found = bass.generate(pair, [[5, 6, 7, 5, 6]] * 3, policy=RefilledPolicy(), max_new_tokens=8, max_batch=max_batch)
    assert (found.metrics.num_drafted > 0) == (max_batch < 3)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_policy_knows_the_kind_of_batching(batching):
    """On a device and in a simulation."""
    pair = bass.Pair(tiny_target(16), NgramDrafter())
    config = bass.EngineConfig(num_slots=1, capacity=64, buckets=(1,), batching=batching)
    engine = bass.Engine(pair, policy=RefilledPolicy(), config=config, warm_up=False)
    engine.submit([5, 6, 7, 5, 6], max_new_tokens=8)
    engine.run()
    ones = np.ones(1, int)
    requests = Workload(np.zeros(1), ones, 8 * ones, 8 * ones, [np.zeros(8, int)])
    costs = ServingCosts(made_up(0.12).table, np.zeros(NUM_CONTEXTS), 0.0, {}, 0.0)
    simulated = simulate_traffic(requests, config, RefilledPolicy(), costs)
    assert [engine.counts.num_drafted > 0, simulated.counts.num_drafted > 0] == [batching == "continuous"] * 2


def test_the_models_can_be_on_another_device_than_the_policy(monkeypatch):
    monkeypatch.setattr("bass_jax.engine.planner._host_device", lambda: jax.devices()[1])
    pair = bass.Pair(tiny_target(16), NgramDrafter())
    policy = policies.auto(lengths=(0, 5))  # of no other test, which would have compiled it for device 0
    found = bass.generate(pair, tiny.PROMPTS, policy=policy, max_new_tokens=20)
    regular = bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=20)
    for tokens, expected in zip(found.tokens, regular.tokens, strict=True):
        np.testing.assert_array_equal(tokens, expected)


def test_the_policy_runs_on_the_hosts_processor():
    with jax.default_device(jax.devices()[1]):
        planner = Planner(CountingPolicy(), 2)
        plan(planner, [1, 1])
    assert all(leaf.devices() == {jax.local_devices(backend="cpu")[0]} for leaf in jax.tree.leaves(planner.state))
