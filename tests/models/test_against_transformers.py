"""Logits and greedy tokens equal those of `transformers` in prefill, decoding and verification."""

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.checkpoint import load_model, save_hugging_face
from bass_jax.models.families import FAMILIES
from tests.marks import mostly_slow
from tests.models.cases import CONFIGS, NUM_NEW, PICKLED, QUICK, QUICK_FILES, cases
from tests.models.conftest import load_arrays, run_reference
from tests.models.passes import read_texts, relative_error, tolerance_of

pytestmark = pytest.mark.peer


@pytest.mark.parametrize(
    "case", mostly_slow(cases(), lambda case: case["name"] in QUICK), ids=lambda case: case["name"]
)
def test_random_models_have_the_logits_and_greedy_tokens_of_transformers(case, reference):
    """The inputs are the greedy tokens of `transformers`, so equal maxima imply the same greedy continuation."""
    expected = load_arrays(reference / f"{case['name']}.npz")
    texts = [[*prompt, *expected[f"greedy_{i}"]] for i, prompt in enumerate(case["prompts"])]
    model = load_model(reference / case["name"])
    for i, logits in enumerate(read_texts(model, texts, capacity=128)):
        assert relative_error(logits, expected[f"logits_{i}"]) < tolerance_of(model)
        found = logits[len(case["prompts"][i]) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(found, expected[f"greedy_{i}"])


@pytest.mark.parametrize("name", PICKLED)
def test_pickled_weights_equal_safetensors(name, reference):
    pytest.importorskip("torch", reason="pickled weights are read by torch, which is not installed")
    expected = load_model(reference / name)
    for suffix in ("bin", "bins"):
        found = load_model(reference / f"{name}.{suffix}")
        assert found.config == expected.config
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, lambda name: name in QUICK_FILES))
def test_an_exported_model_has_the_original_tensors(name, reference, tmp_path):
    from safetensors.numpy import load_file

    model = load_model(reference / name)
    save_hugging_face(tmp_path / "again", model)
    again = load_file(tmp_path / "again" / "model.safetensors")
    files = (reference / name).glob("*.safetensors")
    canonical = FAMILIES[CONFIGS[name]["model_type"]].canonical
    original = {canonical(key): tensor for file in files for key, tensor in load_file(file).items()}
    original.pop(None, None)  # A vision tower is not exported.
    assert again.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(again[key], tensor)
    assert load_model(tmp_path / "again").config == model.config


@pytest.mark.slow
def test_transformers_reads_exported_models(reference, tmp_path):
    todo, tolerances = cases(), {}
    for case in todo:
        model = load_model(reference / case["name"])
        save_hugging_face(tmp_path / "written" / case["name"], model)
        case |= {"directory": str(tmp_path / "written" / case["name"]), "num_new": [0] * len(NUM_NEW)}
        tolerances[case["name"]] = tolerance_of(model)
    run_reference(tmp_path, todo)
    for case in todo:
        found, expected = (load_arrays(path / f"{case['name']}.npz") for path in (tmp_path, reference))
        for i, prompt in enumerate(case["prompts"]):
            logits = expected[f"logits_{i}"][: len(prompt)]
            assert relative_error(found[f"logits_{i}"], logits) < tolerances[case["name"]], case["name"]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_model(smollm2_gguf)


@pytest.mark.optimized
@pytest.mark.slow
def test_smollm2_has_the_logits_and_greedy_tokens_of_transformers(smollm2, smollm2_reference):
    chats, expected = smollm2_reference(4, 24)
    texts = [np.concatenate([chat, expected[f"greedy_{i}"]]) for i, chat in enumerate(chats)]
    for i, logits in enumerate(read_texts(smollm2, texts, capacity=128)):
        assert relative_error(logits, expected[f"logits_{i}"]) < tolerance_of(smollm2)
        np.testing.assert_array_equal(logits[len(chats[i]) - 1 : -1].argmax(-1), expected[f"greedy_{i}"])


@pytest.mark.slow
def test_generate_gives_the_twenty_answers_of_transformers(smollm2, smollm2_reference, smollm2_tokenizer):
    """The answers of one batch, each up to its stop token."""
    chats, expected = smollm2_reference(20, 64)
    pair = bass.Pair(smollm2, bass.drafters.NgramDrafter(), smollm2_tokenizer)
    run = bass.generate(pair, chats, step="decode", max_new_tokens=64)
    for i, (text, tokens) in enumerate(zip(run.texts, run.tokens, strict=True)):
        greedy = expected[f"greedy_{i}"].tolist()
        stop = next((at + 1 for at, id in enumerate(greedy) if id in smollm2_tokenizer.stop_ids), len(greedy))
        assert tokens.tolist() == greedy[:stop]
        assert text == smollm2_tokenizer.decode(greedy[:stop])
    assert len(set(run.texts)) == 20


@pytest.mark.slow
def test_smollm2_has_135_million_parameters(smollm2):
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.params)) == 134_515_008
