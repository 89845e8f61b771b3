"""The Synergy model of Su et al.: its optimum and its fit."""

import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.cost_model import step_seconds
from bass_jax.cost_model.synergy import SynergyModel, fit_synergy

C, GAMMA, BETA = 0.9, 0.548, 20.0


def model(slope, draft=0.5, beta=BETA):
    return SynergyModel(jnp.float32([1, 32]), jnp.float32([slope - draft, 4 * slope]), beta, draft, C, GAMMA)


@pytest.mark.parametrize("slope, expected", [(1.0, 15.7), (2.5, 4.7), (6.0, 1.3)])
def test_three_numeric_cases(slope, expected):
    assert model(slope).optimum(1) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("slope", [0.3, 1.0, 2.5, 6.0])
def test_the_optimum_has_the_shortest_time(slope):
    """Compared with a fine grid of the objective, and with whole lengths."""
    synergy = model(slope)
    grid = np.linspace(0.01, 80, 80_000)
    times = (slope * grid + BETA) / (C * grid**GAMMA + 1)
    assert synergy.optimum(1) == pytest.approx(grid[times.argmin()], abs=0.01)
    whole = synergy.best_draft_len(1)
    assert whole in (int(synergy.optimum(1)), int(synergy.optimum(1)) + 1, 32)


def test_no_drafts_if_none_pays():
    """With a slope near beta, one draft costs more than it gains."""
    assert model(19.0).optimum(1) < 0.2
    assert model(19.0).best_draft_len(1) == 0
    assert model(2.5).best_draft_len(32) < model(2.5).best_draft_len(1)


def test_the_fit_recovers_the_parameters():
    widths = np.array([1, 2, 3, 5, 9])
    alphas = np.array([0.2, 0.5, 1.4])
    seconds = alphas[:, None] * (widths - 1) + 7.0
    fitted = fit_synergy([1, 4, 16], widths.tolist(), seconds, 0.3, (C, GAMMA))
    np.testing.assert_allclose(fitted.alphas, alphas, rtol=1e-5)
    assert fitted.beta == pytest.approx(7.0)
    assert float(step_seconds(fitted, 4, 4, 100)) == pytest.approx(0.5 * 4 + 7 + 0.3 * 4)
    assert float(step_seconds(fitted, 4, 5, 100)) == pytest.approx(
        0.5 * 6 + 7 + 0.3 * 5
    )  # the bucket for 5 drafts is 6


@pytest.mark.parametrize("wrong", [(0, 1, 1, 0.5), (1, 0, 1, 0.5), (1, 1, 0, 0.5), (1, 1, 1, 1.0)])
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match="expected above 0"):
        SynergyModel(jnp.float32([1]), jnp.float32([wrong[0]]), wrong[1], 0.0, *wrong[2:]).optimum(1)
