"""Closed forms of the tokens per pass, compared with sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.cost_model import expected_emitted, fit_power_law, geometric_tokens_per_pass


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("draft_len", [0, 1, 4, 16])
def test_the_closed_form_equals_the_sum(rate, draft_len):
    expected = sum(rate**i for i in range(draft_len + 1))
    assert geometric_tokens_per_pass(rate, draft_len) == pytest.approx(expected)
    by_position = expected_emitted(jnp.full(16, rate), jnp.int32(draft_len))
    assert float(by_position) == pytest.approx(expected, rel=1e-5)


def test_one_rejection_stops_a_synchronized_batch():
    """BASS, section 3: with acceptance 0.8 and five rows, 1.48 tokens per step instead of 3.36."""
    assert geometric_tokens_per_pass(0.8**5, 4) == pytest.approx(1.48, abs=0.01)
    assert geometric_tokens_per_pass(0.8, 4) == pytest.approx(3.36, abs=0.01)


def test_rates_by_position():
    emitted = expected_emitted(jnp.asarray([0.5, 0.4, 0.2]), jnp.asarray([[0, 1], [2, 9]]))
    np.testing.assert_allclose(emitted, [[1.0, 1.5], [1.7, 1.74]], rtol=1e-6)


def test_the_fit_recovers_a_power_law():
    accepted = 0.9 * np.arange(1, 9) ** 0.548
    survival = np.diff(accepted, prepend=0)
    rates = survival / np.concatenate([[1.0], survival[:-1]])
    assert fit_power_law(rates) == pytest.approx((0.9, 0.548))


@pytest.mark.parametrize("rate, draft_len", [(-0.1, 3), (1.1, 3), (0.5, -1)])
def test_wrong_arguments_are_refused(rate, draft_len):
    with pytest.raises(ValueError, match="expected 0 <= rate"):
        geometric_tokens_per_pass(rate, draft_len)
    with pytest.raises(ValueError, match="accepted drafts"):
        fit_power_law([0.0, 0.5])
