"""The synthetic rule accepts at the given rates, and is marked as lossy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.acceptance import RuleKeys, find_rule
from bass_jax.cost_model import geometric_tokens_per_pass
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.sampling import TokenDistribution
from bass_jax.sampling.keys import row_keys
from tests import tiny


@pytest.mark.parametrize(
    "name, rates", [("synthetic(0.8)", [0.8] * 4), ("synthetic(0.9, 0.5, 0.25)", [0.9, 0.5, 0.25, 0.25])]
)
def test_drafts_are_accepted_at_the_given_rates(name, rates):
    num = 100_000
    keys = [row_keys(jax.random.key(seed), jnp.arange(num, dtype=jnp.uint32)) for seed in (0, 1)]
    distribution = TokenDistribution(jnp.full((num, 5, 3), 1 / 3, jnp.float32), jnp.zeros((num, 5), jnp.int32))
    accept = jax.jit(find_rule(name).accept)
    drafts, drafted = jnp.zeros((num, 4), jnp.int32), jnp.full(num, 4, jnp.int32)
    result = accept(drafts, drafted, None, distribution, RuleKeys(*keys, keys[0][:, None]))
    found = np.asarray(result.num_accepted)
    expected = 1 + np.cumsum(np.cumprod(rates))[-1]
    assert 1 + found.mean() == pytest.approx(expected, rel=0.01)
    for position, rate in enumerate(rates):
        reached = found >= position
        assert (found[reached] > position).mean() == pytest.approx(rate, abs=5 * np.sqrt(0.25 / reached.sum()))


@pytest.mark.slow
def test_tokens_per_pass_of_the_decoder_matches_the_closed_form():
    """Also, the result is marked as lossy, so that it is not taken for samples of the target."""
    pair = bass.Pair(tiny.model(1), RepeatDrafter())
    run = bass.generate(
        pair, [[1 + i % 9] for i in range(64)], bass.SpecConfig(4, "synthetic(0.8)"), max_new_tokens=200, stop_tokens=()
    )
    # About 3,800 passes with a standard deviation of 1.6. The token limit cuts the last pass of a row.
    assert run.metrics.tokens_per_pass == pytest.approx(geometric_tokens_per_pass(0.8, 4), abs=0.1)
    assert run.metrics.acceptance_rate == pytest.approx(2.36 / 4, abs=0.03)
    assert not run.is_lossless


@pytest.mark.slow
def test_rates_of_0_and_1_are_exact():
    assert not find_rule("synthetic(1)").lossless
    pair = bass.Pair(tiny.model(1), RepeatDrafter())
    for rate, efficiency in ((0, 1.0), (1, 3.0)):
        run = bass.generate(pair, [[1]], bass.SpecConfig(2, f"synthetic({rate})"), max_new_tokens=30, stop_tokens=())
        assert run.metrics.tokens_per_pass == efficiency


@pytest.mark.parametrize("name", ["synthetic(1.1)", "synthetic(-0.1)", "synthetic(nan)", "synthetic()", "synthetic(x)"])
def test_an_invalid_rate_is_refused(name):
    with pytest.raises(ValueError, match="expected numbers"):
        find_rule(name)


def test_a_rule_name_can_have_arguments():
    assert find_rule("typical(0.2, 0.5)").name == "typical"
    with pytest.raises(ValueError, match="fraction=2"):
        find_rule("threshold(2)")
