"""Properties of every policy: the registered ones, the template and a user's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax import policies
from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.policies import Plan, Policy, PolicyStats, find_policy, register_policy, registered_policies
from tests.cost_model.profiles import made_up

NEEDS_PROFILE = {"goodput", "batch_table"}
NAMES = sorted(
    {*registered_policies(), "oracle", "bass_jax.policies.template:OneMore", "tests.policies.test_protocol:mine"}
)
B = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mine:
    """A user's policy: drafts as many tokens as the shortest row has, at most 5."""

    lengths = (1, 2, 3, 4, 5)

    def init(self, num_rows):
        return None

    def update(self, state, stats):
        return state, Plan(jnp.clip(jnp.full_like(stats.lengths, stats.lengths.min()), 1, 5))


mine = Mine()


def make(name) -> Policy:
    if name == "oracle":
        return policies.oracle(made_up().table)
    return find_policy(name, profile=made_up()) if name in NEEDS_PROFILE else find_policy(name)


def stats_of(step: int, draft_lens=None) -> PolicyStats:
    """Returns the stats of a made-up step. Row 3 finishes early, and row 2 comes close to its limit."""
    random = np.random.default_rng(step)
    wanted = np.zeros(B, np.int32) if draft_lens is None else np.asarray(draft_lens, np.int32)
    room = np.array([200, 150, max(1, 12 - step), 50], np.int32)
    is_active = np.array([step > 0, step > 0, step > 0, 0 < step < 4])
    drafted = np.where(is_active, np.minimum(wanted, room), 0)
    accepted = random.integers(0, drafted + 1).astype(np.int32)
    emitted = np.where(is_active, accepted + 1, 0)
    return PolicyStats(
        is_active=is_active,
        is_running=np.array([True, True, True, step < 3]),
        num_wanted=wanted,
        num_drafted=drafted.astype(np.int32),
        num_accepted=accepted,
        num_emitted=emitted.astype(np.int32),
        was_clipped=drafted < wanted,
        lengths=np.array([20, 30, 9, 40], np.int32) + 3 * step,
        room=room,
        seconds=np.float32(0.0 if step < 2 else 0.01 + 0.001 * step),
        num_acceptable=np.array([3, 0, 9, 1], np.int32),
    )


def run(policy, num_steps=12, update=None):
    update = policy.update if update is None else update
    state, plan, plans = policy.init(B), None, []
    for step in range(num_steps):
        stats = jax.tree.map(jnp.asarray, stats_of(step, None if plan is None else plan.draft_lens))
        state, plan = update(state, stats)
        plans.append(plan)
    return state, plans


@pytest.mark.parametrize("name", NAMES)
def test_plans_have_the_right_shapes_and_range(name):
    policy = make(name)
    assert isinstance(policy, Policy)
    assert list(policy.lengths) == sorted(set(policy.lengths))
    assert 0 <= policy.lengths[0] <= policy.lengths[-1] <= DRAFT_LEN_BUCKETS[-1]
    _, plans = run(policy)
    for plan in plans:
        assert (plan.draft_lens.shape, plan.draft_lens.dtype) == ((B,), jnp.int32)
        assert ((plan.draft_lens >= 0) & (plan.draft_lens <= policy.lengths[-1])).all()
        assert (plan.min_confidence is None) == (plans[0].min_confidence is None)
        if plan.min_confidence is not None:
            assert (plan.min_confidence.shape, plan.min_confidence.dtype) == ((B,), jnp.float32)
    if len(set(policy.lengths)) == 1:
        assert all((plan.draft_lens == policy.lengths[0]).all() for plan in plans)


@pytest.mark.parametrize("name", NAMES)
def test_host_and_device_plan_the_same(name):
    """Compares eager steps, compiled steps and one compiled loop."""
    policy = make(name)
    _, eager = run(policy)
    _, compiled = run(policy, update=jax.jit(policy.update))

    @jax.jit
    def loop(policy, all_stats):
        def advance(carry, stats):
            state, draft_lens = carry
            state, plan = policy.update(state, stats._replace(num_wanted=draft_lens))
            return (state, plan.draft_lens), plan

        return jax.lax.scan(advance, (policy.init(B), jnp.zeros(B, jnp.int32)), all_stats)[1]

    # The steps of the eager run with their random counts.
    recorded = [stats_of(0), *(stats_of(step, eager[step - 1].draft_lens) for step in range(1, 12))]
    looped = loop(policy, jax.tree.map(lambda *leaves: jnp.stack(leaves), *recorded))
    for step, plan in enumerate(eager):
        np.testing.assert_array_equal(plan.draft_lens, compiled[step].draft_lens)
        np.testing.assert_array_equal(plan.draft_lens, looped.draft_lens[step])


@pytest.mark.parametrize("name", NAMES)
def test_the_state_keeps_its_structure_and_shapes(name):
    """A compiled loop can only carry such a state."""
    policy = make(name)
    start = jax.eval_shape(lambda: policy.init(B))
    stats = jax.tree.map(jnp.asarray, stats_of(1, jnp.ones(B, jnp.int32)))
    state, plan = jax.eval_shape(policy.update, start, stats)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), start
    )
    assert plan == jax.eval_shape(policy.update, state, stats)[1]


def test_a_policy_is_found_by_name():
    assert {"fixed", "bass_heuristic", "batch_table", "goodput", "confidence", "bandit"} <= set(registered_policies())
    assert find_policy(mine) is mine
    assert find_policy("bass_heuristic(start=4, limit=8)") == policies.bass_heuristic(start=4, limit=8)
    with pytest.raises(ValueError, match="registered already"):
        register_policy("fixed", policies.fixed)


@pytest.mark.parametrize(
    "name, message",
    [
        ("adaptive", "expected one of"),
        ("nowhere:policy", "nowhere"),
        ("tests.policies.test_protocol:B", "expected an object with lengths|not callable"),
        ("fixed(4)", "expected arguments as in"),
        ("fixed(draft_len=", "expected arguments as in"),
        ("fixed(length=4)", "length"),
        ("goodput", "expected a profile"),
        ("batch_table", "expected a profile, or cost and rates"),
        ("goodput(profile='nowhere.json')", "nowhere.json"),
    ],
)
def test_an_unknown_policy_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_policy(name)
