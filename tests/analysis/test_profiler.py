"""The profiler: shapes and bookkeeping of the measurements."""

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.analysis import profiler
from bass_jax.cost_model import read_profile
from bass_jax.drafters import NgramDrafter, early_exit_drafter
from tests import tiny


@pytest.fixture(scope="module")
def measured():
    """A profile with few and short repeats."""
    patch = pytest.MonkeyPatch()
    patch.setattr(profiler, "SECONDS_PER_CELL", 0.0)
    target = tiny.model(2, num_layers=1)
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))
    cells = []
    profile = profiler.measure_profile(
        pair,
        tiny.PROMPTS,
        bass.SpecConfig(2),
        name="tiny",
        max_new_tokens=40,
        batches=(1, 4),
        draft_lens=(0, 2),
        contexts=(20,),
        on_cell=cells.append,
    )
    patch.undo()
    return pair, profile, cells


@pytest.mark.slow
def test_every_cell_is_measured(measured):
    _, profile, cells = measured
    table = profile.table
    assert np.asarray(table.target).shape == (2, 2, 1)
    assert (np.asarray(table.widths) == [1, 3]).all()
    assert (np.asarray(table.target) > 0).all() and (np.asarray(table.first_draft) > 0).all()
    where = [f"sweep {sweep} of 3, batch {batch}, context 20" for sweep in (1, 2, 3) for batch in (1, 4)]
    assert cells == [f"{cell}: {what}" for cell in where for what in ("drafts", "steps of 0, 2 drafts")]
    assert profile.about["pair"] == "tiny"


@pytest.mark.slow
def test_acceptance_equals_that_of_generate(measured):
    """All positions were reached often enough."""
    pair, profile, _ = measured
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(2), max_new_tokens=40)
    assert profile.rates == pytest.approx(run.metrics.acceptance_by_position)


@pytest.mark.slow
def test_a_measured_profile_is_read_as_it_was_written(measured, tmp_path):
    _, profile, _ = measured
    profile.write(tmp_path / "profile.json")
    again = read_profile(tmp_path / "profile.json")
    np.testing.assert_allclose(again.table.target, profile.table.target)
    assert (again.rates, again.about) == (profile.rates, profile.about)
    assert (again.target_shape, again.draft_shape) == (profile.target_shape, profile.draft_shape)


def test_a_drafter_without_a_model_does_not_catch_up(monkeypatch):
    monkeypatch.setattr(profiler, "SECONDS_PER_CELL", 0.0)
    pair = bass.Pair(tiny.model(1, num_layers=1), NgramDrafter())
    table = profiler.measure_costs(pair, bass.SpecConfig(2), batches=(1,), draft_lens=(0,), contexts=(20,))
    assert float(table.catch_up[0, 0]) == 0.0 < float(table.first_draft[0, 0])


@pytest.mark.slow
def test_wrong_grids_are_refused(measured):
    pair, *_ = measured
    with pytest.raises(ValueError, match="batches="):
        profiler.measure_costs(pair, bass.SpecConfig(2), batches=(4, 1))
    with pytest.raises(ValueError, match="num_sweeps=0"):
        profiler.measure_costs(pair, bass.SpecConfig(2), num_sweeps=0)
    with pytest.raises(ValueError, match="prompts"):
        profiler.measure_acceptance(pair, [], bass.SpecConfig(2))


@pytest.mark.slow
def test_a_drafter_in_the_targets_cache_is_measured(monkeypatch):
    """Drafting alone is timed with a copy of the cache, because its arrays are donated."""
    monkeypatch.setattr(profiler, "SECONDS_PER_CELL", 0.0)
    target = tiny.model(2, num_layers=2)
    pair = bass.Pair(target, early_exit_drafter(target, 1))
    options = {"batches": (1,), "draft_lens": (0, 2), "contexts": (20,), "num_sweeps": 1}
    table = profiler.measure_costs(pair, bass.SpecConfig(2), **options)
    assert (np.asarray(table.first_draft) > 0).all() and (np.asarray(table.target) > 0).all()
