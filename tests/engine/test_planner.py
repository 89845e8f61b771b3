"""Tests of the planner: rows that join or move get the policy's state of their own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bass_jax as bass
from bass_jax import policies
from bass_jax.decoding.policy_runner import no_times
from bass_jax.decoding.state import FinishReason
from bass_jax.drafters import NgramDrafter
from bass_jax.engine.planner import Planner
from bass_jax.policies.protocol import Plan
from bass_jax.testing.tiny_models import tiny_target
from tests import tiny


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
