"""gpt-oss: experts in MXFP4, and heads and experts that are spread over a mesh."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bass_jax as bass
from bass_jax.checkpoint.load import load_model
from bass_jax.checkpoint.save import save_hugging_face
from bass_jax.drafters import NgramDrafter
from bass_jax.models import Model, tensor_parallel_mesh
from bass_jax.models.families import FAMILIES
from bass_jax.models.families.gpt_oss import dequantize
from bass_jax.models.flax_model import init_model
from tests.models.cases import CONFIGS

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
EXPERTS = "model.layers.{}.mlp.experts.{}"


def test_numbers_of_mxfp4():
    """Every byte with several scales, by the definition of the format."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scales = np.arange(120, 136, dtype=np.uint8).reshape(1, 16)
    found = dequantize(blocks, scales)
    assert found.shape == (1, 512)
    for byte in range(256):
        for half, code in enumerate((byte % 16, byte // 16)):
            sign, number = (-1 if code >= 8 else 1), NUMBERS[code % 8]
            assert found[0, 2 * byte + half] == sign * number * 2.0 ** (int(scales[0, byte // 16]) - 127)


@pytest.fixture
def packed(tmp_path):
    """Returns a checkpoint with experts in MXFP4, and the values of these experts."""
    config = FAMILIES["gpt_oss"].read_config(CONFIGS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32})
    save_hugging_face(tmp_path / "plain", init_model(config, jax.random.key(0)))
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    random, values = np.random.default_rng(1), {}
    for layer in range(config.num_layers):
        for name in ("gate_up_proj", "down_proj"):
            name = EXPERTS.format(layer, name)
            num, num_in, num_out = tensors.pop(name).shape
            blocks = random.integers(0, 256, (num, num_out, num_in // 32, 16), np.uint8)
            scales = random.integers(118, 124, (num, num_out, num_in // 32), np.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = dequantize(blocks, scales).swapaxes(1, 2)
    path = tmp_path / "packed"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    written = json.loads((tmp_path / "plain" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"quantization_config": {"quant_method": "mxfp4"}}))
    return path, values


def test_packed_experts_are_loaded(packed, tmp_path):
    """Exported again, they are the plain matrices that the bytes stand for."""
    path, values = packed
    save_hugging_face(tmp_path / "again", load_model(path))
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, value in values.items():
        np.testing.assert_array_equal(again[name], value)


def test_other_quantizations_and_packed_tensors_elsewhere_are_refused(packed):
    path, _ = packed
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quant_method='gptq': expected 'mxfp4'"):
        load_model(path)
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(64, np.uint8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has the dtype U8"):
        load_model(path)


@pytest.mark.slow
def test_two_devices_give_the_tokens_of_one(tmp_path):
    """Heads with their sinks, and experts with their biases, are spread over the mesh."""
    config = FAMILIES["gpt_oss"].read_config(CONFIGS["gpt_oss"] | {"vocab_size": 132})
    model = init_model(config, jax.random.key(0))
    noise = iter(jax.random.split(jax.random.key(1), 1000))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(noise), x.shape, x.dtype), model.params)
    save_hugging_face(tmp_path / "model", Model(params, config))
    outputs = []
    for mesh in (None, tensor_parallel_mesh(2)):
        pair = bass.Pair(load_model(tmp_path / "model", mesh=mesh), NgramDrafter(3, 2))
        outputs.append(bass.generate(pair, [[*range(1, 13)], [5, 6], [7]], bass.SpecConfig(3), max_new_tokens=16))
    for row in range(3):
        assert outputs[0].tokens[row].tolist() == outputs[1].tokens[row].tolist()
        np.testing.assert_allclose(outputs[0].logprobs[row], outputs[1].logprobs[row], atol=3e-5)
