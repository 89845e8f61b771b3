"""Configurations of the quickstart draft's mixture."""

import json

import pytest

from bass_jax.runtime.yaml_config import parse_yaml
from bass_jax.training.distill_config import DistillConfig
from recipes.quickstart_draft.mixture import MixedPrompts


@pytest.fixture
def make_config(tmp_path):
    """Makes a configuration from the options of the mixture; its files are in `tmp_path`."""

    def make(sources, held_out=(), seed=0, **sections) -> DistillConfig:
        options = {"sources": list(sources), "held_out": list(held_out), "data_dir": str(tmp_path)}
        prompts = {"source": "recipes.quickstart_draft.mixture:MixedPrompts", "options": options}
        content = {"target": "tiny", "output_dir": str(tmp_path / "run"), "prompts": prompts, "seed": seed}
        return parse_yaml(DistillConfig, content | sections, "test")

    return make


@pytest.fixture
def make_mixture(make_config):
    """Makes the prompt source from the options of the mixture."""

    def make(sources, held_out=(), **options) -> MixedPrompts:
        return MixedPrompts(make_config(sources, held_out, **options))

    return make


@pytest.fixture
def write(tmp_path):
    """Writes a JSON Lines file."""

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write
