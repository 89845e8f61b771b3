"""Measuring a pair: the numbers are times, the fits are of them, and policies run on the file."""

import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.analysis import profiler
from bass_jax.cost_model import measure_device, read_profile
from bass_jax.drafters import NgramDrafter
from tests import tiny
from tests.cost_model.profiles import made_up


@pytest.fixture(scope="module")
def measured():
    """Few and short repeats: what is tested is the bookkeeping, not the clock."""
    patch = pytest.MonkeyPatch()
    patch.setattr(profiler, "SECONDS_PER_CELL", 0.0)
    target = tiny.model(1, num_layers=1)
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))
    cells = []
    profile = profiler.measure_profile(
        pair, tiny.PROMPTS, bass.SpecConfig(2), name="tiny", max_new_tokens=40, batches=(1, 4), draft_lens=(0, 2),
        contexts=(20,), on_cell=cells.append,
    )  # fmt: skip
    patch.undo()
    return pair, profile, cells


def test_every_cell_is_measured(measured):
    _, profile, cells = measured
    table = profile.table
    assert np.asarray(table.target).shape == (2, 2, 1)
    assert (np.asarray(table.widths) == [1, 3]).all()
    assert (np.asarray(table.target) > 0).all() and (np.asarray(table.first_draft) > 0).all()
    where = [f"sweep {sweep} of 3, batch {batch}, context 20" for sweep in (1, 2, 3) for batch in (1, 4)]
    assert cells == [f"{cell}: {what}" for cell in where for what in ("drafts", "steps of 0, 2 drafts")]
    assert profile.about["pair"] == "tiny"


def test_acceptance_is_that_of_the_run(measured):
    """The same as decoding says, where there were enough drafts."""
    pair, profile, _ = measured
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(2), max_new_tokens=40)
    assert profile.rates == pytest.approx(run.summary.acceptance_by_position)


def test_a_profile_survives_the_disk(measured, tmp_path):
    _, profile, _ = measured
    profile.write(tmp_path / "profile.json")
    again = read_profile(tmp_path / "profile.json")
    np.testing.assert_allclose(again.table.target, profile.table.target)
    assert (again.rates, again.about, again.target_shape) == (profile.rates, profile.about, profile.target_shape)
    assert policies.find_policy(f"goodput(profile={str(tmp_path / 'profile.json')!r})").lengths[0] == 0


def test_fits_of_a_made_up_profile():
    """Times that are linear in the drafts are fitted without error; the errors of others are told."""
    errors = made_up().fit_errors()
    assert errors["synergy_max"] < 1e-5
    assert 0 < errors["roofline_mean"] <= errors["roofline_max"]
    assert made_up().synergy().beta == pytest.approx(1e-3, rel=1e-4)


def test_a_drafter_that_is_no_model_has_no_catching_up(monkeypatch):
    monkeypatch.setattr(profiler, "SECONDS_PER_CELL", 0.0)
    pair = bass.Pair(tiny.model(1, num_layers=1), NgramDrafter())
    table = profiler.measure_costs(pair, bass.SpecConfig(2), batches=(1,), draft_lens=(0,), contexts=(20,))
    assert float(table.catch_up[0, 0]) == 0.0 < float(table.first_draft[0, 0])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 1, "table": {}}'])
def test_what_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="profile"):
        read_profile(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_profile(tmp_path / "nowhere.json")


def test_grids_that_cannot_be_are_refused(measured):
    pair, *_ = measured
    with pytest.raises(ValueError, match="batches="):
        profiler.measure_costs(pair, bass.SpecConfig(2), batches=(4, 1))
    with pytest.raises(ValueError, match="num_sweeps=0"):
        profiler.measure_costs(pair, bass.SpecConfig(2), num_sweeps=0)
    with pytest.raises(ValueError, match="prompts"):
        profiler.measure_acceptance(pair, [], bass.SpecConfig(2))


def test_this_device_has_a_peak_and_a_bandwidth():
    device = measure_device(size=128, repeats=2)
    assert device.peak_flops > 1e6 and device.bandwidth > 1e6
