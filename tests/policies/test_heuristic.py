"""Algorithm 1 of BASS against lengths computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax import policies
from bass_jax.policies import PolicyStats

NAN = jnp.float32(jnp.nan)


def stats(accepted, wanted, is_active=None, drafted=None) -> PolicyStats:
    """Returns the stats of a step whose rows accepted this many of the wanted drafts."""
    accepted = jnp.asarray(accepted, jnp.int32)
    wanted = jnp.broadcast_to(jnp.asarray(wanted, jnp.int32), accepted.shape)
    is_active = jnp.ones(accepted.shape, bool) if is_active is None else jnp.asarray(is_active)
    drafted = wanted if drafted is None else jnp.asarray(drafted, jnp.int32)
    return PolicyStats(
        is_active=is_active,
        is_running=is_active,
        num_wanted=wanted,
        num_drafted=drafted,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        was_clipped=drafted < wanted,
        lengths=jnp.full(accepted.shape, 50, jnp.int32),
        room=jnp.full(accepted.shape, 50, jnp.int32),
        step_seconds=NAN[None],
        is_compiled=jnp.ones(1, bool),
        resume_seconds=NAN,
    )


def on_host(policy, maxima, num_rows=4):
    """Calls the policy once per step. One row accepts the given number of drafts, the others fewer."""
    state, nothing = policy.init(num_rows), jnp.zeros(num_rows, bool)
    state, plan = policy.update(state, stats([0] * num_rows, 0, nothing))
    lengths = [int(plan.draft_lens[0])]
    for i, most in enumerate(maxima):
        accepted = [most // 2] * num_rows
        accepted[i % num_rows] = most
        state, plan = policy.update(state, stats(accepted, plan.draft_lens))
        lengths.append(int(plan.draft_lens[0]))
    return lengths


def on_device(policy, maxima, num_rows=4):
    """Runs the steps in one compiled loop."""

    @jax.jit
    def run(maxima):
        def advance(carry, most):
            state, draft_lens = carry
            state, plan = policy.update(state, stats(jnp.full(num_rows, most), draft_lens))
            return (state, plan.draft_lens), plan.draft_lens[0]

        state, plan = policy.update(policy.init(num_rows), stats([0] * num_rows, 0, [False] * num_rows))
        return plan.draft_lens[0], jax.lax.scan(advance, (state, plan.draft_lens), maxima)[1]

    first, rest = run(jnp.asarray(maxima))
    return [int(first), *np.asarray(rest).tolist()]


@pytest.mark.parametrize("run", [on_host, on_device])
def test_the_published_constants(run):
    policy = policies.bass_heuristic()
    assert run(policy, [7, 9, 4, 4, 4, 4, 0, 0, 0]) == [7, 9, 11, 9, 7, 5, 4, 2, 1, 1]
    full = [*range(7, 33, 2), 32, 32]
    assert run(policy, full) == [*full, 32]
    # From the second time on it shrinks by one more, until a step accepts all drafts.
    assert run(policy, [0, 0, 0, 2, 0, 0]) == [7, 6, 4, 2, 4, 3, 1]


@pytest.mark.parametrize("run", [on_host, on_device])
def test_other_constants(run):
    policy = policies.bass_heuristic(start=4, growth=3, divisor=2, limit=9)
    assert run(policy, [4, 7, 9, 0, 0, 0, 1]) == [4, 7, 9, 9, 4, 1, 1, 4]


def test_finished_rows_are_ignored():
    """Their counts are ignored even if they are not 0."""
    policy = policies.bass_heuristic()
    state, plan = policy.update(policy.init(3), stats([7, 2, 1], 7, [False, True, True]))
    assert plan.draft_lens.tolist() == [6, 6, 6]
    state, plan = policy.update(state, stats([6, 6, 6], 6, [False, False, False]))
    assert plan.draft_lens.tolist() == [6, 6, 6]


def test_a_step_clipped_by_the_token_limit_shrinks_the_length():
    policy = policies.bass_heuristic()
    _, plan = policy.update(policy.init(2), stats([3, 0], 7, drafted=[3, 7]))
    assert plan.draft_lens.tolist() == [6, 6]


@pytest.mark.parametrize(
    "wrong", [{"start": 0}, {"start": 9, "limit": 8}, {"limit": 33}, {"growth": 0}, {"divisor": 0}]
)
def test_invalid_constants_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        policies.bass_heuristic(**wrong)
