"""The choices of the policies in cases where the right choice is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax import policies
from bass_jax.policies import PolicyStats
from bass_jax.policies.batch_table import fastest_draft_len
from bass_jax.policies.goodput import expected_max
from tests.cost_model.profiles import made_up
from tests.marks import mostly_slow


def stats(num_rows, *, accepted=None, drafted=None, seconds=float("nan"), room=500, num_acceptable=None) -> PolicyStats:
    """Returns the stats of equal rows. Without `accepted` they are those before the first step."""

    def full(value):
        return jnp.full(num_rows, value, jnp.int32)

    has_stepped = accepted is not None
    return PolicyStats(
        is_active=jnp.full(num_rows, has_stepped),
        is_running=jnp.ones(num_rows, bool),
        num_wanted=full(drafted or 0),
        num_drafted=full(drafted or 0),
        num_accepted=full(accepted or 0),
        num_emitted=full((accepted or 0) + has_stepped),
        was_clipped=jnp.zeros(num_rows, bool),
        lengths=full(100),
        room=full(room),
        seconds=jnp.float32(seconds),
        num_acceptable=None if num_acceptable is None else jnp.asarray(num_acceptable, jnp.int32),
    )


@jax.jit
def update(policy, state, seen):
    """Updates a policy; compiled once per class, because the numbers of a policy are traced."""
    return policy.update(state, seen)


def first(policy, num_rows, **options):
    _, plan = update(policy, policy.init(num_rows), stats(num_rows, **options))
    return int(plan.draft_lens[0])


def by_hand(profile, num_rows, lengths):
    """Computes the tokens per second of each length for the costs of `made_up`."""
    steepness = 0.1 * np.log2(2 * num_rows)
    rates = [*profile.rates] + [profile.rates[-1]] * 8
    buckets = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 6, 8: 8}
    return [
        (1 + sum(np.prod(rates[: i + 1]) for i in range(s))) / (1 + steepness * buckets[s] + 0.1 * s) for s in lengths
    ]


@pytest.mark.parametrize("num_rows", mostly_slow([1, 2, 4, 8, 16], lambda num_rows: num_rows in (1, 16)))
@pytest.mark.parametrize("slope", [0.1, 0.3])
def test_goodput_starts_with_the_best_length_of_the_profile(num_rows, slope):
    profile, lengths = made_up(slope), (0, 1, 2, 3, 4, 6, 8)
    found = first(policies.goodput(profile=profile, margin=0.0, row_weight=1e9, objective="rate"), num_rows)
    if slope == 0.1:
        assert found == lengths[int(np.argmax(by_hand(profile, num_rows, lengths)))]
    table = policies.batch_table(profile=profile)
    rates = jnp.asarray(profile.rates)
    assert first(table, num_rows) == fastest_draft_len(profile.table, rates, num_rows, 200.0)
    assert first(policies.goodput(profile=profile), 16) <= first(policies.goodput(profile=profile), 1)


def test_the_objective_finish_counts_the_slowest_row():
    """A row's speed-up is the same at both batch sizes, but the slowest of 16 rows is slower than an average row."""
    profile = made_up(0.1)
    flat = dataclasses.replace(
        profile.table, target=jnp.broadcast_to(profile.table.target[:1], profile.table.target.shape)
    )
    profile = dataclasses.replace(profile, table=flat)
    together, replaced = (policies.goodput(profile=profile, objective=name) for name in ("finish", "rate"))
    assert first(together, 1) == first(replaced, 1) == first(replaced, 16) > 0

    def num_prices_accepted(policy, num_rows):
        """Counts the prices of a draft, in steps of 0.1 ms, at which the policy still drafts."""
        prices = range(40)
        costs = [dataclasses.replace(flat, first_draft=flat.first_draft + 1e-4 * price) for price in prices]
        return sum(first(dataclasses.replace(policy, cost=cost), num_rows, room=64) > 0 for cost in costs)

    assert num_prices_accepted(together, 16) < num_prices_accepted(together, 1)
    assert num_prices_accepted(replaced, 16) == num_prices_accepted(replaced, 1)


@pytest.mark.slow
def test_expected_max_equals_the_mean_maximum_of_samples():
    mean = jnp.asarray([[10.0, 3.0], [11.0, -50.0], [9.0, 3.0], [99.0, 99.0]])
    variance = jnp.asarray([[4.0, 1.0], [1.0, 1.0], [9.0, 1.0], [1.0, 1.0]])
    is_counted = jnp.asarray([True, True, True, False])
    found = expected_max(mean, variance, is_counted)
    draws = np.random.default_rng(0).normal(mean[:3], np.sqrt(variance[:3]), (200_000, 3, 2)).max(axis=1)
    np.testing.assert_allclose(found, draws.mean(axis=0), atol=0.02)
    alone = expected_max(mean[:1], variance[:1], is_counted[:1])
    np.testing.assert_allclose(alone, mean[0], rtol=1e-3)


def test_a_length_is_rated_as_if_it_were_used_in_all_steps():
    """Acceptance depends on the previous step: 0.3 after a rejection and 0.9 otherwise."""
    policy = policies.goodput(profile=made_up(rates=(0.5,) * 8), prior_weight=1e-3, row_weight=1e9, lengths=(0, 1, 4))
    seen = jnp.broadcast_to(jnp.asarray([[0.3], [0.9]]), (2, 8))
    state = policy.init(1)._replace(reached=1e6 * jnp.ones((2, 8)), accepted=1e6 * seen)
    emitted, _ = policy._emitted_per_step(state, stats(1))
    share = 0.3 / (1 - 0.9 + 0.3)  # steps with one draft that follow an accepted one
    np.testing.assert_allclose(emitted[0, :2], [1.0, 1 + 0.3 + 0.6 * share], rtol=1e-4)
    after_rejection, after_all = (sum(rate**i for i in range(5)) for rate in (0.3, 0.9))
    share = 0.3**4 / (1 - 0.9**4 + 0.3**4)
    np.testing.assert_allclose(emitted[0, 2], after_rejection + share * (after_all - after_rejection), rtol=1e-4)


def test_goodput_turns_speculation_off_if_it_is_slower():
    assert first(policies.goodput(profile=made_up(0.9), exploration_share=0.0), 1) == 0
    assert first(policies.goodput(profile=made_up(0.1), exploration_share=0.0), 1) > 0
    # Algorithm 1 uses no costs.
    assert first(policies.bass_heuristic(), 1) == 7


CHUNK = 50
"""Steps per compiled loop of `drive`."""


def drive(policy, num_rows, rate, num_steps, seed=0, state=None):
    """Runs steps whose drafts are accepted with probability `rate`, one for all steps or one per step.

    Returns:
        The lengths that were used, and the last state.
    """
    random, lengths = np.random.default_rng(seed), []
    state, plan = update(policy, policy.init(num_rows) if state is None else state, stats(num_rows))
    rates = np.broadcast_to(rate, num_steps).astype(np.float32).reshape(-1, CHUNK)
    for some in rates:
        draws = random.random((CHUNK, max(policy.lengths)), np.float32)
        state, plan, used = _drive(policy, state, plan, some, draws)
        lengths += used.tolist()
    return lengths, state


@jax.jit
def _drive(policy, state, plan, rates, draws):
    num_rows = len(plan.draft_lens)

    def step(carry, now):
        state, plan = carry
        rate, draws = now
        drafted = plan.draft_lens[0]
        is_accepted = (draws <= rate) & (jnp.arange(len(draws)) < drafted)
        accepted = jnp.cumprod(is_accepted).sum()
        drafts, accepted = (jnp.full(num_rows, value, jnp.int32) for value in (drafted, accepted))
        seen = stats(num_rows, accepted=0)._replace(
            num_wanted=drafts, num_drafted=drafts, num_accepted=accepted, num_emitted=accepted + 1
        )
        return policy.update(state, seen), drafted

    (state, plan), lengths = jax.lax.scan(step, (state, plan), (rates, draws))
    return state, plan, lengths


def test_goodput_follows_the_acceptance_rate():
    """The length falls to 0 if no draft is accepted, and rises if all are."""
    policy = policies.goodput(profile=made_up())
    worse, _ = drive(policy, 2, 0.0, 150)
    assert worse[0] > 0 and worse[-20:].count(0) >= 19
    better, _ = drive(policy, 2, 1.0, 150)
    assert better[-1] > better[0]
    assert better[-1] >= 6


def test_goodput_explores_and_resumes_drafting():
    """While drafting is off, about 2 % of the time is used for exploration steps."""
    profile = made_up()
    quick = dataclasses.replace(profile.table, catch_up=profile.table.catch_up / 10)
    policy = policies.goodput(profile=dataclasses.replace(profile, table=quick))
    _, state = drive(policy, 2, 0.0, 150)
    off, _ = drive(policy, 2, 0.0, 1000, state=state)
    num_explorations = sum(length > 0 for length in off)
    # An exploration step of one draft takes 0.3 ms more than a regular step, and reads 8 tokens in 0.02 ms.
    assert 1 <= num_explorations <= 0.03 * 1000 / 0.34
    back, _ = drive(policy, 2, 1.0, 4000, state=state)
    assert min(back[-10:]) > 0


def test_exploration_is_possible_from_the_start_of_a_long_batch():
    """1 % of the time of 512 steps is enough for an exploration step, and one bad step does not end drafting."""
    policy = policies.goodput(profile=made_up(0.9))
    assert first(policy, 1, room=512) > 0
    assert first(policy, 1, room=16) == 0
    # One step without an accepted draft turns drafting off. All later drafts would be accepted.
    policy = policies.goodput(profile=made_up(0.05, rates=(0.6,) * 8))
    lengths, _ = drive(policy, 8, np.r_[0.0, np.ones(49)], 50)
    assert min(lengths[-10:]) > 0


def test_exploration_costs_the_time_that_it_delays_the_batch():
    """15 rows accept every draft and one accepts none, so drafting does not shorten the batch."""
    profile = made_up(0.1, rates=(0.8,))
    expensive = dataclasses.replace(profile.table, first_draft=profile.table.first_draft + 2e-4)
    policy = policies.goodput(cost=expensive, rates=(0.8,), lengths=(0, 1), margin=0.0)
    room = np.full(16, 256)
    before = stats(16, room=256)
    state, plan = update(policy, policy.init(16), before)
    num_drafting = num_steps = 0
    while room.any():
        drafted = int(plan.draft_lens.max())
        accepted = np.where((np.arange(16) > 0) & (room > 1), drafted, 0)
        is_active, emitted = room > 0, np.where(room > 0, accepted + 1, 0)
        room = room - emitted
        num_steps, num_drafting = num_steps + 1, num_drafting + (drafted > 0)
        after = before._replace(
            is_active=jnp.asarray(is_active),
            is_running=jnp.asarray(room > 0),
            room=jnp.asarray(room),
            num_drafted=jnp.where(is_active, drafted, 0),
            num_accepted=jnp.asarray(accepted),
            num_emitted=jnp.asarray(emitted),
        )
        state, plan = update(policy, state, after)
    assert num_steps == 256  # those of the slow row
    # It drafts until the estimate of the slow row is low, and later for exploration.
    assert 1 <= num_drafting <= 32


def test_goodput_plans_within_the_token_limit():
    policy = policies.goodput(profile=made_up())
    assert first(policy, 1, room=1) == 0
    assert first(policy, 1, room=2) <= 1


def test_goodput_includes_the_cost_of_catching_up():
    """If the drafter has many tokens to read, drafting is only worth it if many tokens remain."""
    profile = made_up(0.05)
    slow = dataclasses.replace(profile.table, catch_up=40 * profile.table.catch_up)
    policy = policies.goodput(profile=dataclasses.replace(profile, table=slow))
    behind = policy.init(1)._replace(num_behind=jnp.int32(400))
    choices = [int(update(policy, behind, stats(1, room=room))[1].draft_lens[0]) for room in (8, 5000)]
    assert choices[0] == 0 < choices[1]


def test_batch_table_uses_the_largest_size_reached():
    policy = policies.batch_table({1: 6, 8: 3, 32: 0})
    assert [first(policy, num_rows) for num_rows in (1, 4, 8, 16, 32, 64)] == [6, 6, 3, 3, 0, 0]
    assert policy.lengths == (0, 3, 6)


@pytest.mark.parametrize("has_clock", [True, False])
def test_the_bandit_finds_the_best_length(has_clock):
    """With a clock, whose seconds come one step late, and with a cost model."""
    profile = made_up(0.1, rates=(0.9,) * 8)
    policy = policies.bandit(cost=None if has_clock else profile.table, lengths=(0, 2, 8))
    random, lengths, last = np.random.default_rng(0), [], 0.0
    update = jax.jit(policy.update)
    state, plan = update(policy.init(1), stats(1, seconds=0.0 if has_clock else float("nan")))
    for _ in range(300):
        drafted = int(plan.draft_lens[0])
        lengths.append(drafted)
        misses = np.flatnonzero(random.random(drafted) > 0.9)
        accepted = int(misses[0]) if len(misses) else drafted
        seconds, last = last, 1e-3 * (1 + 0.2 * drafted)
        state, plan = update(
            state, stats(1, accepted=accepted, drafted=drafted, seconds=seconds if has_clock else float("nan"))
        )
    assert lengths[:3] == [0, 2, 8]
    # Tokens per ms: 1 for no drafts, 2.71 / 1.4 for two, 6.13 / 2.6 for eight.
    assert lengths[-100:].count(8) > 60
    assert lengths[-100:].count(0) < 20


def test_the_oracle_plans_only_drafts_that_are_accepted():
    policy = policies.oracle(made_up().table)
    _, plan = policy.update(policy.init(3), stats(3, num_acceptable=[5, 0, 2]))
    best = int(plan.draft_lens.max())
    np.testing.assert_array_equal(plan.draft_lens, np.minimum([5, 0, 2], best))
    assert best > 0
    with pytest.raises(ValueError, match="num_acceptable"):
        policy.update(policy.init(3), stats(3))


def test_confidence_plans_a_threshold():
    policy = policies.confidence(threshold=0.3, max_len=6)
    _, plan = policy.update(policy.init(2), stats(2))
    assert plan.draft_lens.tolist() == [6, 6]
    np.testing.assert_allclose(plan.min_confidence, 0.3)
