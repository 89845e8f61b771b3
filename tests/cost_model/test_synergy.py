"""The optimum of Su et al. against its closed form, and the fit against what made the numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.cost_model import SynergyModel, fit_synergy, step_seconds, synergy_optimum

C, GAMMA, BETA = 0.9, 0.548, 20.0


def model(slope, draft=0.5, beta=BETA):
    return SynergyModel(jnp.float32([1, 32]), jnp.float32([slope - draft, 4 * slope]), beta, draft, C, GAMMA)


@pytest.mark.parametrize("slope, expected", [(1.0, 15.7), (2.5, 4.7), (6.0, 1.3)])
def test_the_three_numeric_cases(slope, expected):
    assert synergy_optimum(slope, BETA, C, GAMMA) == pytest.approx(expected, abs=0.05)
    assert model(slope).optimum(1) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("slope", [0.3, 1.0, 2.5, 6.0])
def test_the_closed_form_is_the_least_time(slope):
    """By brute force over a fine grid of the objective itself, and over whole lengths."""
    synergy = model(slope)
    grid = np.linspace(0.01, 80, 80_000)
    times = (slope * grid + BETA) / (C * grid**GAMMA + 1)
    assert synergy_optimum(slope, BETA, C, GAMMA) == pytest.approx(grid[times.argmin()], abs=0.01)
    whole = synergy.best_draft_len(1)
    assert whole in (int(synergy.optimum(1)), int(synergy.optimum(1)) + 1, 32)


def test_no_drafts_where_none_pay():
    """A slope near beta: even the first whole draft costs more than it brings."""
    assert model(19.0).optimum(1) < 0.2
    assert model(19.0).best_draft_len(1) == 0
    assert model(2.5).best_draft_len(32) < model(2.5).best_draft_len(1)


def test_the_fit_finds_what_made_the_numbers():
    widths = np.array([1, 2, 3, 5, 9])
    alphas = np.array([0.2, 0.5, 1.4])
    seconds = alphas[:, None] * (widths - 1) + 7.0
    fitted = fit_synergy([1, 4, 16], widths.tolist(), seconds, 0.3, (C, GAMMA))
    np.testing.assert_allclose(fitted.alphas, alphas, rtol=1e-5)
    assert fitted.beta == pytest.approx(7.0)
    assert float(step_seconds(fitted, 4, 4, 100)) == pytest.approx(0.5 * 4 + 7 + 0.3 * 4)
    assert float(step_seconds(fitted, 4, 5, 100)) == pytest.approx(0.5 * 6 + 7 + 0.3 * 5)  # the bucket of 6


@pytest.mark.parametrize("wrong", [(0, 1, 1, 0.5), (1, 0, 1, 0.5), (1, 1, 0, 0.5), (1, 1, 1, 1.0)])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="expected above 0"):
        synergy_optimum(*wrong)
