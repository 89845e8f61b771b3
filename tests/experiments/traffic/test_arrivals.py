"""Arrival times follow their configuration."""

import numpy as np
import pytest

from bass_jax.experiments.traffic.arrivals import Phase, arrival_times, gamma_intervals, read_arrivals


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 5.0])
def test_intervals_have_the_mean_and_the_variation(cv):
    intervals = gamma_intervals(200_000, cv, np.random.default_rng(0))
    # The mean's standard error is cv / sqrt(n); the variation's is larger, by the fourth moment of a Gamma.
    assert intervals.mean() == pytest.approx(1.0, abs=5 * cv / 200_000**0.5)
    assert intervals.std() / intervals.mean() == pytest.approx(cv, rel=0.05)


def test_a_variation_of_zero_gives_equal_intervals():
    np.testing.assert_allclose(arrival_times(4, [Phase(1e9, 0.5, 0.0)]), [0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_every_phase_has_its_own_rate(cv):
    """An interval that starts in a quiet phase must not skip the busy one."""
    phases = [Phase(30.0, 3.0, cv), Phase(2.0, 0.05, cv)]
    times = arrival_times(20_000, phases, seed=1)
    assert (np.diff(times) >= 0).all()
    place = times % 32.0
    num_cycles = times[-1] / 32.0
    for is_in, rate in ((place < 30.0, 10.0), (place >= 30.0, 40.0)):
        assert is_in.sum() / num_cycles == pytest.approx(rate, rel=0.1)


def test_arrivals_depend_on_the_seed_alone():
    phases = [Phase(5.0, 0.3)]
    np.testing.assert_array_equal(arrival_times(50, phases, 3), arrival_times(50, phases, 3))
    assert (arrival_times(50, phases, 3) != arrival_times(50, phases, 4)).all()


def test_recorded_arrivals(tmp_path):
    path = tmp_path / "arrivals.jsonl"
    path.write_text(
        '{"time": 7.5, "prompt_tokens": 3, "new_tokens": 9}\n\n{"time": 5, "prompt_tokens": 8, "new_tokens": 1}\n'
    )
    found = read_arrivals(path)
    np.testing.assert_allclose(found.times, [0.0, 2.5])
    assert found.prompt_tokens.tolist() == [8, 3] and found.new_tokens.tolist() == [1, 9]
    path.write_text('{"time": 1}\n')
    assert read_arrivals(path).prompt_tokens is None


@pytest.mark.parametrize(
    "text", ["", "{}\n", "hello\n", '{"time": "soon"}\n', '{"time": 1, "prompt_tokens": 0, "new_tokens": 1}\n']
)
def test_invalid_recordings_are_refused(tmp_path, text):
    path = tmp_path / "arrivals.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"arrivals\.jsonl"):
        read_arrivals(path)


@pytest.mark.parametrize("settings", [{"inter_arrival": 0.0}, {"seconds": 0.0}, {"cv": -1.0}])
def test_invalid_phases_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Phase(**({"seconds": 1.0, "inter_arrival": 1.0} | settings))
