"""Random numbers depend on the row's key, the counter and the role, and on nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.sampling.keys import Role, draw_keys, gumbel, position_keys, row_keys, seed_keys, step_draft_keys, uniform

NUM = 20_000
BOUND = 4.5 / NUM**0.5
"""4.5 standard deviations; the correlation of n independent pairs has the standard deviation 1/sqrt(n)."""


def rows(num: int):
    return row_keys(jax.random.key(0), jnp.arange(num, dtype=jnp.uint32))


def test_streams_of_roles_counters_and_drafts_are_uncorrelated():
    """With correlated streams, acceptance depends on the noise that proposed the draft, and is not lossless."""
    keys, counter = rows(NUM), jnp.full(NUM, 7, jnp.int32)
    streams = {role: draw_keys(keys, counter, role) for role in Role}
    streams["next step"] = draw_keys(keys, counter + 1, Role.DRAFT)
    streams["first draft"], streams["second draft"] = step_draft_keys(keys, counter, 2).T
    streams["next position"] = position_keys(keys, counter, 2)[:, 1]
    noise = [np.asarray(uniform(stream, 1))[:, 0] for stream in streams.values()]
    for first, second in itertools.combinations(noise, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < BOUND
        # The upper tails separately, because Gumbel-max uses the largest values.
        assert abs(np.corrcoef(first > 0.9, second > 0.9)[0, 1]) < BOUND


def test_a_rows_random_numbers_do_not_depend_on_the_batch():
    """They are the same alone, in another slot and in another batch."""
    keys = rows(8)
    together = gumbel(draw_keys(keys, jnp.arange(8), Role.ACCEPT), 5)
    shuffled = gumbel(draw_keys(keys[::-1], jnp.arange(8)[::-1], Role.ACCEPT), 5)
    np.testing.assert_array_equal(together, shuffled[::-1])
    np.testing.assert_array_equal(together[3:4], gumbel(draw_keys(keys[3:4], jnp.arange(3, 4), Role.ACCEPT), 5))
    np.testing.assert_array_equal(jax.random.key_data(rows(8)[:3]), jax.random.key_data(rows(3)))


def test_uniform_is_never_zero(monkeypatch):
    """A uniform number of 0 would accept a draft of probability zero. `jax.random.uniform` returns 0 once in 2**23."""
    values = np.asarray(uniform(rows(4), 50_000))
    np.testing.assert_allclose(values.mean(), 0.5, atol=4.5 / (12 * values.size) ** 0.5)
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.zeros(shape, dtype))
    np.testing.assert_array_equal(uniform(rows(4), 3), 1.0)


def test_a_seed_gives_the_same_key_in_every_batch():
    alone, among = seed_keys(jnp.asarray([7], jnp.uint32)), seed_keys(jnp.asarray([1, 7, 2], jnp.uint32))
    np.testing.assert_array_equal(jax.random.key_data(alone[0]), jax.random.key_data(among[1]))
