"""Profiles: the file, the fits, and the measured device."""

import numpy as np
import pytest

from bass_jax import policies
from bass_jax.cost_model import measure_device, read_profile
from tests.cost_model.profiles import made_up


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path, profile = tmp_path / "profile.json", made_up()
    profile.write(path)
    again = read_profile(path)
    np.testing.assert_allclose(again.table.target, profile.table.target)
    assert (again.rates, again.about, again.target_shape) == (profile.rates, profile.about, profile.target_shape)
    assert policies.find_policy(f"auto(profile={str(path)!r})").lengths[0] == 0


def test_fits_of_a_made_up_profile():
    """The Synergy model fits times that are linear in the drafts exactly; the roofline model does not."""
    errors = made_up().fit_errors()
    assert errors["synergy_max"] < 1e-5
    assert 0 < errors["roofline_mean"] <= errors["roofline_max"]
    assert made_up().synergy().beta == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 1, "table": {}}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="profile"):
        read_profile(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_profile(tmp_path / "absent.json")


def test_the_device_has_a_peak_and_a_bandwidth():
    device = measure_device(repeats=2)
    assert device.peak_flops > 1e6 and device.bandwidth > 1e6
