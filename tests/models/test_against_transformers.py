"""Logits equal those of `transformers`: prefill, decoding, verification, ragged batches."""

import jax
import numpy as np
import pytest

from bass_jax.checkpoint import load_model, save_hugging_face
from tests.models.cases import CONFIGS, PICKLED, cases
from tests.models.passes import read_texts, relative_error

pytestmark = pytest.mark.peer

TOLERANCE = 2e-5
"""Two float32 passes of up to 30 layers that add in different orders; a fault is above 1e-2."""


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_random_models_score_and_continue_as_in_transformers(case, reference):
    """Teacher-forced: where every logit agrees and every maximum is the same, so is the greedy continuation."""
    expected = np.load(reference / f"{case['name']}.npz")
    texts = [[*prompt, *expected[f"greedy_{i}"]] for i, prompt in enumerate(case["prompts"])]
    for i, logits in enumerate(read_texts(load_model(reference / case["name"]), texts, capacity=128)):
        assert relative_error(logits, expected[f"logits_{i}"]) < TOLERANCE
        found = logits[len(case["prompts"][i]) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(found, expected[f"greedy_{i}"])


@pytest.mark.parametrize("name", PICKLED)
def test_what_torch_pickled_is_what_it_saved_as_safetensors(name, reference):
    expected = load_model(reference / name)
    for suffix in ("bin", "bins"):
        found = load_model(reference / f"{name}.{suffix}")
        assert found.config == expected.config
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_writing_a_model_back_gives_the_very_tensors(name, reference, tmp_path):
    from safetensors.numpy import load_file

    save_hugging_face(tmp_path / "again", load_model(reference / name))
    again = load_file(tmp_path / "again" / "model.safetensors")
    files = (reference / name).glob("*.safetensors")
    original = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert again.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(again[key], tensor)
    reread = load_model(tmp_path / "again")
    assert reread.config == load_model(reference / name).config


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_model(smollm2_gguf)


def test_smollm2_scores_and_continues_as_in_transformers(smollm2, smollm2_prompts, smollm2_reference):
    expected = smollm2_reference
    texts = [np.concatenate([prompt, expected[f"greedy_{i}"]]) for i, prompt in enumerate(smollm2_prompts)]
    for i, logits in enumerate(read_texts(smollm2, texts, capacity=128)):
        assert relative_error(logits, expected[f"logits_{i}"]) < TOLERANCE
        found = logits[len(smollm2_prompts[i]) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(found, expected[f"greedy_{i}"])


def test_smollm2_is_half_a_gigabyte(smollm2):
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.params)) == 134_515_008
