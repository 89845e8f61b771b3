"""The configurations of experiments and distillations are valid and short."""

from pathlib import Path

import pytest

from bass_jax.experiments import find_task, load_experiment, parse_experiment
from bass_jax.experiments.experiment_config import PairConfig
from bass_jax.models import PRESETS, preset
from bass_jax.runtime.yaml_config import as_plain
from bass_jax.training import load_distill_config

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "bass", "synergy", "quickstart")
EXPERIMENTS = [path for folder in FOLDERS for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))]
ALL = [*EXPERIMENTS, *sorted((ROOT / "configs" / "distill").glob("*.yaml"))]


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_config_is_read_and_short(path):
    assert len(path.read_text().splitlines()) < 40
    assert path.read_text().startswith("# ")
    if path not in EXPERIMENTS:
        assert load_distill_config(path)
        return
    config = load_experiment(path)
    assert parse_experiment(as_plain(config)) == config
    assert find_task(config.task.name)
    assert any(variant.method.step == "decode" for variant in config.variants())
    assert all(config.baseline_of(variant) for variant in config.variants())


def test_experiments_have_directories_of_their_own():
    directories = [load_experiment(path).output_dir for path in EXPERIMENTS]
    assert len(set(directories)) == len(directories)


@pytest.mark.parametrize("folder", ["bass", "synergy"])
def test_shapes_without_checkpoints_are_presets(folder):
    """The papers' drafts share their target's vocabulary."""
    for path in (ROOT / "configs" / folder).glob("*.yaml"):
        config = load_experiment(path)
        names = {config.pair.target, config.pair.draft, *(method.draft for method in config.methods.values())} - {None}
        if config.pair.target is not None:
            assert names <= set(PRESETS)
            assert len({preset(name).vocab_size for name in names}) == 1


def test_a_pair_is_a_path_or_shapes():
    with pytest.raises(ValueError, match="not both"):
        PairConfig(path="x", target="opt-125m")
    with pytest.raises(ValueError, match="expected a path"):
        PairConfig()
