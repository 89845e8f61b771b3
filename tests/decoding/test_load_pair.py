"""Drafters in `load_pair` by name, path, ``"module:name"`` and object."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import bass_jax as bass
from bass_jax.checkpoint import save_model, write_datastore
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.training.build_datastore import build_datastore
from tests.checkpoint.small import random_model, small_config, small_tokenizer
from tests.drafters.test_retrieval import SIZES, answers

REPEAT = RepeatDrafter()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("pair"), small_tokenizer()
    target, draft = random_model(small_config()), random_model(small_config(num_layers=1))
    eagle = random_model(small_config(num_layers=1, hidden_width=target.config.width))
    for name, model in (("target", target), ("draft", draft), ("eagle", eagle)):
        save_model(path / name, model, tokenizer=tokenizer)
    arrays = build_datastore(answers(), **SIZES)._asdict()
    write_datastore(path / "all.safetensors", arrays, **SIZES, vocab_size=7, tokenizer=tokenizer)
    paths = {"target": "target", "draft": "draft", "eagle": "eagle", "datastore": "all.safetensors"}
    (path / "manifest.json").write_text(json.dumps({role: {"path": name} for role, name in paths.items()}))
    return path


@pytest.mark.parametrize(
    "name, expected",
    [
        (None, "ModelDrafter"),
        ("draft_model", "ModelDrafter"),
        ("eagle", "EagleDrafter"),
        ("ngram", "NgramDrafter"),
        ("suffix", "SuffixDrafter"),
        ("retrieval", "RetrievalDrafter"),
        ("ensemble", "EnsembleDrafter"),
        ("ensemble_eagle", "EnsembleDrafter"),
    ],
)
def test_a_drafter_by_name(directory, name, expected):
    pair = bass.load_pair(directory, drafter=name)
    assert type(pair.drafter).__name__ == expected
    assert bass.drafters.reads_hidden_states(pair.drafter) == (name in ("eagle", "ensemble_eagle"))
    assert pair.tokenizer is not None


def test_a_drafter_by_path(directory):
    pair = bass.load_pair(directory / "target", drafter=directory / "all.safetensors")
    by_name = bass.load_pair(directory, drafter="retrieval")
    np.testing.assert_array_equal(pair.drafter.keys, by_name.drafter.keys)
    assert pair.drafter.keys.dtype == jnp.uint32
    draft = bass.load_pair(directory / "target", drafter=str(directory / "draft"))
    assert type(draft.drafter).__name__ == "ModelDrafter"


def test_a_users_own_drafter(directory):
    assert bass.load_pair(directory, drafter=REPEAT).drafter is REPEAT
    by_module = bass.load_pair(directory / "target", drafter="tests.decoding.test_load_pair:REPEAT")
    assert type(by_module.drafter).__name__ == "RepeatDrafter"


@pytest.mark.parametrize(
    "name, message",
    [
        ("draft_model", "has no draft"),
        ("eagle", "has no EAGLE draft"),
        ("ensemble_eagle", "has no EAGLE draft"),
        ("retrieval", "has no retrieval datastore; bass-jax build-datastore writes one"),
        ("./nowhere", "nowhere: no such file or directory"),
        ("nowhere", r"drafter='nowhere': expected one of 'draft_model', .* or a path or 'module:name'"),
        ("math:pi", "drafter='math:pi'"),
    ],
)
def test_a_drafter_that_a_target_does_not_have_is_refused(directory, name, message):
    with pytest.raises(ValueError, match=message):
        bass.load_pair(directory / "target", drafter=name)


def test_a_draft_of_other_hidden_states_is_refused(directory, tmp_path):
    save_model(tmp_path / "draft", random_model(small_config(num_layers=1, hidden_width=12)))
    with pytest.raises(ValueError, match="hidden_width=12: the draft reads hidden states of another width"):
        bass.load_pair(directory, drafter=tmp_path / "draft")


def test_a_datastore_of_another_tokenizer_is_refused(directory, tmp_path):
    with safe_open(directory / "all.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["datastore"])
    about["tokenizer_fingerprint"] = about["tokenizer_fingerprint"][::-1]
    path = tmp_path / "other.safetensors"
    save_file(build_datastore(answers(), **SIZES)._asdict(), path, metadata={"datastore": json.dumps(about)})
    with pytest.raises(ValueError, match=r"the datastore's tokenizer .* is not the target's"):
        bass.load_pair(directory, drafter=path)
