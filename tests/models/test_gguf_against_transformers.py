"""GGUF files give the logits of `transformers` reading the same file, for every architecture that it reads.

`transformers` takes some values of Gemma, GPT-2 and StarCoder2 from its defaults instead of the file. The models here
have these values. For the other architectures, the file is written from a checkpoint of `transformers`, whose logits
the file must give.
"""

import pytest

from bass_jax.checkpoint import load_model
from bass_jax.models import DenseMLP, MoEConfig
from tests.checkpoint.gguf_writer import write_gguf
from tests.checkpoint.small import random_model, small_config
from tests.checkpoint.test_gguf import CONFIGS, CONVERTED, converted_config
from tests.models.cases import prompts
from tests.models.conftest import load_arrays, run_reference
from tests.models.passes import read_texts, relative_error, tolerance_of

pytestmark = pytest.mark.peer

_DEFAULTS = {"head_dim": 256, "attention_scale": 1 / 16, "num_heads": 2, "num_kv_heads": 2}
CHANGES = {
    "llama": {"is_tied": False},
    "qwen2": {"num_kv_heads": 1},
    "qwen3": {"head_dim": 128, "num_kv_heads": 2},
    "gemma2": _DEFAULTS,
    "gemma3": _DEFAULTS,
    "qwen2moe": {
        "moe": MoEConfig(4, 2, 1408, is_normalized=False, shared=DenseMLP(5632), has_shared_gate=True),
        "num_kv_heads": 2,
    },
    "qwen3moe": {"head_dim": 128, "num_kv_heads": 2, "moe": MoEConfig(4, 2, 768)},
    "phi3": {"window": None, "vocab_size": 32064},
    "gpt2": {"vocab_size": 50257, "context": 1024, "mlp_width": 64},
    "starcoder2": {"family": "starcoder2", "norm": "layer", "has_attention_bias": True, "has_mlp_bias": True}
    | {"is_gated": False, "activation": "gelu_tanh", "num_kv_heads": 2, "vocab_size": 49152},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Writes the GGUF files and the logits of `transformers`."""
    directory, cases = tmp_path_factory.mktemp("gguf"), []
    for i, (name, changes) in enumerate(CHANGES.items()):
        path = directory / name / "model.gguf"
        path.parent.mkdir()
        write_gguf(path, random_model(small_config(**(CONFIGS.get(name, {}) | changes)), i))
        cases.append({"name": name, "gguf": str(path), "prompts": prompts(i), "num_new": [0, 0, 0]})
    for i, name in enumerate(CONVERTED):
        case = {"name": f"{name}-converted", "config": converted_config(name), "seed": i}
        cases.append(case | {"prompts": prompts(i), "num_new": [0, 0, 0]})
    return run_reference(directory, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTED)
def test_converted_models_have_the_logits_of_transformers(name, files):
    directory = files / f"{name}-converted"
    expected = load_arrays(files / f"{name}-converted.npz")
    write_gguf(directory / "model.gguf", load_model(directory))
    model = load_model(directory / "model.gguf")
    for i, logits in enumerate(read_texts(model, prompts(list(CONVERTED).index(name)))):
        assert relative_error(logits, expected[f"logits_{i}"]) < tolerance_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_gguf_models_have_the_logits_of_transformers(name, files):
    expected = load_arrays(files / f"{name}.npz")
    texts = prompts(list(CHANGES).index(name))
    model = load_model(files / name / "model.gguf")
    for i, logits in enumerate(read_texts(model, texts)):
        assert relative_error(logits, expected[f"logits_{i}"]) < tolerance_of(model)
