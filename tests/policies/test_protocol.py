"""Every policy passes the conformance test: the registered ones, the template and a user's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax import policies
from bass_jax.policies import Plan, Policy, find_policy, register_policy, registered_policies
from bass_jax.testing import check_policy
from bass_jax.testing.conformance import example_stats
from tests.cost_model.profiles import made_up

NEEDS_PROFILE = {"batch_table"}
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


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_passes_the_conformance_test(name):
    check_policy(make(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_loop_plans_the_same_as_single_steps(name):
    policy = make(name)
    state, draft_lens, recorded, plans = policy.init(B), None, [], []
    for step in range(12):
        recorded.append(example_stats(step, len(policy.lengths), draft_lens))
        state, plan = policy.update(state, recorded[-1])
        draft_lens = plan.draft_lens
        plans.append(plan)

    @jax.jit
    def loop(policy, all_stats):
        def advance(carry, stats):
            state, draft_lens = carry
            state, plan = policy.update(state, stats._replace(num_wanted=draft_lens))
            return (state, plan.draft_lens), plan

        return jax.lax.scan(advance, (policy.init(B), jnp.zeros(B, jnp.int32)), all_stats)[1]

    looped = loop(policy, jax.tree.map(lambda *leaves: jnp.stack(leaves), *recorded))
    np.testing.assert_array_equal(jnp.stack([plan.draft_lens for plan in plans]), looped.draft_lens)


def test_a_policy_is_found_by_name():
    assert {"fixed", "bass_heuristic", "auto", "batch_table", "confidence", "bandit"} <= set(registered_policies())
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
        ("auto(lengths=(4, 2))", "expected ascending draft lengths"),
        ("batch_table", "expected a profile, or cost and rates"),
        ("auto(profile='nowhere.json')", "nowhere.json"),
    ],
)
def test_an_unknown_policy_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_policy(name)
