"""The choices of the policies in cases where the right choice is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax import policies
from bass_jax.policies import PolicyStats
from bass_jax.policies.batch_table import fastest_draft_len
from tests.cost_model.profiles import made_up


def stats(num_rows, *, accepted=None, drafted=None, seconds=(), room=500, context=100, num_acceptable=None):
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
        lengths=full(context),
        room=full(room),
        step_seconds=jnp.asarray(seconds, jnp.float32),
        is_compiled=jnp.ones(len(seconds), bool),
        resume_seconds=jnp.float32(jnp.nan),
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


UNKNOWN = float("nan")


def test_auto_plans_the_length_with_most_tokens_per_second():
    """Steps of 0, 2 and 4 drafts are expected to emit 1, 2.19 and 2.77 tokens, by the acceptance that is assumed."""
    policy = policies.auto(lengths=(0, 2, 4))
    times = {0: (1.0, 2.5, 3.0), 2: (1.0, 1.2, 1.6), 4: (1.0, 1.2, 1.4)}
    for expected, seconds in times.items():
        assert first(policy, 1, seconds=seconds) == expected
    # Lengths without a time get the assumed cost, relative to the measured ones.
    assert first(policy, 1, seconds=(1.0, UNKNOWN, UNKNOWN)) == first(policy, 1, seconds=(UNKNOWN,) * 3) == 4
    assert first(policy, 1, seconds=(1.0, UNKNOWN, 3.0)) == 2
    assert first(policies.auto(lengths=(1, 2)), 1, seconds=(1.0, 1.1)) == 2


def test_auto_compiles_a_further_length_only_for_a_clear_gain():
    """Steps of 1 and 2 drafts are expected to emit 1.7 and 2.19 tokens."""
    policy = policies.auto(lengths=(1, 2))
    for seconds, expected in ((1.25, 1), (1.2, 2)):
        seen = stats(1, seconds=(1.0, seconds))._replace(is_compiled=jnp.asarray([True, False]))
        _, plan = update(policy, policy.init(1), seen)
        assert plan.draft_lens.tolist() == [expected]


@pytest.mark.parametrize("num_rows", [1, 16])
def test_auto_starts_with_the_best_length_of_a_profile(num_rows):
    profile, lengths = made_up(0.1), (0, 1, 2, 3, 4, 6, 8)
    policy = policies.auto(profile=profile, lengths=lengths, row_spread=0.0)
    found = first(policy, num_rows, seconds=[UNKNOWN] * 7)
    assert found == lengths[int(np.argmax(by_hand(profile, num_rows, lengths)))]
    table = policies.batch_table(profile=profile)
    assert first(table, num_rows) == fastest_draft_len(profile.table, jnp.asarray(profile.rates), num_rows, 200.0)


def test_auto_sees_the_context():
    """A draft that is cheap at a short context is not worth it at a long one; the batch size is the same."""
    table = made_up(0.05).table
    longer = table.target.at[:, 1:, -1].mul(8.0)  # At a context of 512 tokens, passes over more than one token.
    policy = policies.auto(cost=dataclasses.replace(table, target=longer), rates=(0.7,), lengths=(0, 4))
    assert [first(policy, 4, seconds=[UNKNOWN] * 2, context=context) for context in (64, 512)] == [4, 0]


CHUNK = 50
"""Steps per compiled loop of `drive`."""


def drive(policy, num_rows, rate, num_steps, seconds, seed=0, state=None):
    """Runs steps of the given times, whose drafts are accepted with probability `rate`.

    Returns:
        The lengths that were used, and the last state.
    """
    random, lengths = np.random.default_rng(seed), []
    state, plan = update(policy, policy.init(num_rows) if state is None else state, stats(num_rows, seconds=seconds))
    rates = np.broadcast_to(rate, num_steps).astype(np.float32).reshape(-1, CHUNK)
    for some in rates:
        draws = random.random((CHUNK, max(policy.lengths)), np.float32)
        state, plan, used = _drive(policy, state, plan, some, draws, jnp.asarray(seconds))
        lengths += used.tolist()
    return lengths, state


@jax.jit
def _drive(policy, state, plan, rates, draws, seconds):
    num_rows = len(plan.draft_lens)

    def step(carry, now):
        state, plan = carry
        rate, draws = now
        drafted = plan.draft_lens[0]
        is_accepted = (draws <= rate) & (jnp.arange(len(draws)) < drafted)
        accepted = jnp.cumprod(is_accepted).sum()
        drafts, accepted = (jnp.full(num_rows, value, jnp.int32) for value in (drafted, accepted))
        seen = stats(num_rows, accepted=0, seconds=seconds)._replace(
            num_wanted=drafts, num_drafted=drafts, num_accepted=accepted, num_emitted=accepted + 1
        )
        return policy.update(state, seen), drafted

    (state, plan), lengths = jax.lax.scan(step, (state, plan), (rates, draws))
    return state, plan, lengths


TIMES = tuple(1 + 0.15 * length for length in policies.auto().lengths)
"""Of steps of each length."""


def test_auto_follows_the_acceptance_rate():
    """The length falls to 0 if no draft is accepted, and rises if all are."""
    worse, _ = drive(policies.auto(), 2, 0.0, 300, TIMES)
    assert worse[0] > 0 and worse[50:150].count(0) >= 95 and worse[-20:].count(0) >= 19
    better, _ = drive(policies.auto(), 2, 1.0, 150, TIMES)
    assert better[-1] == 8


@pytest.mark.parametrize("seconds, drafts", [(1.85, False), (1.20, True)])
def test_auto_drafts_only_for_a_gain(seconds, drafts):
    """A draft that is accepted in 70 % of the steps gives 0.92 or 1.42 times the tokens per second."""
    lengths, _ = drive(policies.auto(lengths=(0, 1)), 4, 0.7, 300, (1.0, seconds))
    assert (lengths[-200:].count(1) > 160) if drafts else (lengths[-200:].count(1) < 20)


def test_auto_bounds_the_time_of_trials_and_resumes_drafting():
    """While no draft is accepted, trials cost about 1 % of the time. When all are, drafting resumes."""
    _, state = drive(policies.auto(), 2, 0.0, 200, TIMES)
    off, _ = drive(policies.auto(), 2, 0.0, 2000, TIMES, state=state)
    lost = sum(0.15 * length for length in off)
    assert 0.003 <= lost / 2000 <= 0.015
    back, _ = drive(policies.auto(), 2, 1.0, 1000, TIMES, state=state)
    assert min(back[-10:]) > 0


def test_auto_saves_for_trials_of_compiled_lengths():
    """Of a step that takes 2 seconds, 1 % is divided among them; the length in use needs none."""
    policy = policies.auto(lengths=(0, 1, 2, 4))
    is_compiled = jnp.asarray([True, True, False, False])
    seen = stats(2, accepted=0, seconds=(2.0, 9.0, 9.0, 9.0))._replace(is_compiled=is_compiled)
    state, plan = update(policy, policy.init(2), seen)
    assert plan.draft_lens.tolist() == [0, 0]
    np.testing.assert_allclose(state.budget, [0.0, 0.01, 0.0, 0.0])


def test_auto_expects_the_next_positions_to_be_like_those_that_drafts_have_reached():
    """Otherwise long drafts are not tried for a text whose drafts are all accepted."""
    policy = policies.auto(lengths=(0, 2, 8), row_spread=0.0)
    for accepted, expected in ((2, 9.0), (0, 1.0)):
        state = policy.init(2)
        for _ in range(50):
            state, _ = update(policy, state, stats(2, seconds=(1.0, 2.0, 3.0), accepted=accepted, drafted=2))
        np.testing.assert_allclose(policy.expected_tokens(state, jnp.ones(2, bool))[-1], expected, rtol=0.1)


def test_auto_forgets_as_fast_in_large_batches():
    """Counts lose weight per step. Counted per row, 64 rows would forget everything within two steps."""
    policy, per_row = policies.auto(lengths=(0, 2)), []
    for num_rows in (1, 64):
        state = policy.init(num_rows)
        for _ in range(100):
            state, _ = update(policy, state, stats(num_rows, seconds=(1.0, 2.0), accepted=1, drafted=2))
        per_row.append(state.num_reached / num_rows)
    np.testing.assert_allclose(per_row[0], per_row[1], rtol=1e-5)
    np.testing.assert_allclose(per_row[0][0], (1 - np.exp(-1)) / (1 - np.exp(-0.01)), rtol=1e-3)


def test_auto_follows_the_times():
    """Another process makes steps with drafts three times as slow."""
    policy = policies.auto()
    before, state = drive(policy, 2, 0.8, 100, TIMES)
    after, _ = drive(policy, 2, 0.8, 100, (1.0, *(3 * seconds for seconds in TIMES[1:])), state=state)
    assert min(before[-10:]) > 0
    assert after[1:].count(0) >= 90


def test_auto_expects_less_of_the_slowest_row_of_a_large_batch():
    """Of 32 rows the slowest is expected 2.07 standard deviations below their mean, until their drafts are known."""
    policy = policies.auto(lengths=(0, 1))
    for num_rows, deviations in ((1, 0.0), (2, 0.59), (32, 2.07)):
        state, running = policy.init(num_rows), jnp.ones(num_rows, bool)
        rate = 0.7 * (1 - 0.1 * deviations)
        np.testing.assert_allclose(policy.expected_tokens(state, running), [1.0, 1 + rate], rtol=1e-3)
        # Fewer rows run.
        alone = policy.expected_tokens(state, running.at[1:].set(False))
        np.testing.assert_allclose(alone, [1.0, 1.7], rtol=1e-3)
        known = state._replace(row_accepted=jnp.full(num_rows, 1e4), row_expected=jnp.full(num_rows, 1e4))
        np.testing.assert_allclose(policy.expected_tokens(known, running), [1.0, 1.7], rtol=1e-2)


def test_auto_counts_the_mean_row_where_other_requests_take_the_rows():
    """One row accepts most drafts and the other few, so that a draft pays for both together, but not for the slower."""
    policy = policies.auto(lengths=(0, 1))
    state = policy.init(2)._replace(row_accepted=jnp.asarray([18.0, 0.0]), row_expected=jnp.full(2, 9.0))
    running = jnp.ones(2, bool)
    np.testing.assert_allclose(policy.expected_tokens(state, running, True), [1.0, 1.7], rtol=1e-6)
    one = policy.expected_tokens(state, running.at[1].set(False), True)
    np.testing.assert_allclose(one, [1.0, 1 + 0.7 * 34 / 25], rtol=1e-6)
    for is_refilled, expected in ((True, 1), (False, 0)):
        now = stats(2, seconds=(1.0, 1.5))._replace(is_refilled=jnp.asarray(is_refilled))
        assert update(policy, state, now)[1].draft_lens.tolist() == [expected] * 2


def test_batch_table_uses_the_largest_size_reached():
    policy = policies.batch_table({1: 6, 8: 3, 32: 0})
    assert [first(policy, num_rows) for num_rows in (1, 4, 8, 16, 32, 64)] == [6, 6, 3, 3, 0, 0]
    assert policy.lengths == (0, 3, 6)


@pytest.mark.parametrize("has_clock", [True, False])
def test_the_bandit_finds_the_best_length(has_clock):
    """With measured times, and with a cost model."""
    profile = made_up(0.1, rates=(0.9,) * 8)
    policy = policies.bandit(cost=None if has_clock else profile.table, lengths=(0, 2, 8))
    times = 1e-3 * jnp.asarray([1.0, 1.4, 2.6]) if has_clock else jnp.full(3, UNKNOWN)
    lengths, _ = drive(policy, 1, 0.9, 300, times)
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


@pytest.mark.parametrize("num_rows", [1, 3])
def test_what_all_rows_have_in_common_is_counted_once(num_rows):
    """The rates of the batch have seen the same drafts; only differences between rows change the expected tokens."""
    policy = policies.auto(lengths=(0, 1, 2), row_spread=0.0)
    running = jnp.ones(num_rows, bool)
    before = policy.init(num_rows)
    equal = before._replace(row_accepted=jnp.zeros(num_rows), row_expected=jnp.full(num_rows, 9.0))
    np.testing.assert_allclose(
        policy.expected_tokens(equal, running), policy.expected_tokens(before, running), rtol=1e-6
    )
    # A finished row is not counted, but its drafts are in the rates.
    alone = running.at[1:].set(False)
    np.testing.assert_allclose(policy.expected_tokens(equal, alone), policy.expected_tokens(before, alone), rtol=1e-6)
    if num_rows > 1:
        best = equal._replace(row_accepted=jnp.asarray([0.0] + [18.0] * (num_rows - 1)))
        assert (policy.expected_tokens(best, alone) < policy.expected_tokens(before, alone))[1:].all()
        # Without a running row, the plan is that of a new one.
        found = policy.expected_tokens(best, jnp.zeros(num_rows, bool))
        np.testing.assert_allclose(found, policy.expected_tokens(before, running), rtol=1e-6)
        slower = equal._replace(row_accepted=jnp.asarray([9.0] * (num_rows - 1) + [0.0]))
        assert (policy.expected_tokens(slower, running) < policy.expected_tokens(before, running))[1:].all()
