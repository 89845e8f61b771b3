"""GGUF files of every supported architecture and quantization are read; others are refused."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGUFReader

from bass_jax.checkpoint import load_model
from bass_jax.checkpoint.gguf import GgufFile
from bass_jax.checkpoint.gguf_architectures import ARCHITECTURES, LEFT_OUT
from bass_jax.models.families import FAMILIES
from bass_jax.models.model_config import DenseMLP, MoEConfig, RopeScaling
from tests.checkpoint.gguf_writer import finish, write_gguf
from tests.checkpoint.small import random_model, small_config
from tests.models.cases import CONFIGS as CASES

WINDOWS = {"window": 6, "windowed_layers": (True, False)}
GEMMA = {"norm_offset": 1.0, "embedding_scale": 4.0, "activation": "gelu_tanh"}
SANDWICH = GEMMA | WINDOWS | {"block": "sandwich", "attention_scale": 0.5}
CONFIGS = {
    "llama": {"num_kv_heads": 2},
    "llama biases": {"is_tied": False, "has_attention_bias": True, "has_mlp_bias": True},
    "llama linear": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama yarn": {"rope_scaling": RopeScaling("yarn", 4.0, original_context=32)},
    "llama 3.1": {"rope_base": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), "head_dim": 64},
    "llama 3.2": {"rope_base": 5e5, "rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), "head_dim": 64},
    "qwen2": {"family": "qwen2", "is_tied": False, "has_attention_bias": True, "has_out_bias": False},
    "qwen3": {"family": "qwen3", "has_qk_norm": True, "head_dim": 6},
    "gemma": {"family": "gemma"} | GEMMA,
    "gemma2": {"family": "gemma2", "attention_softcap": 50.0, "logit_softcap": 30.0} | SANDWICH,
    "gemma3": {"family": "gemma3_text", "has_qk_norm": True, "rope_base": 1e6, "window_rope_base": 10000.0}
    | SANDWICH
    | {"num_layers": 6, "windowed_layers": (True,) * 5 + (False,)},
    "qwen2moe": {"family": "qwen2_moe", "is_tied": False, "has_attention_bias": True, "has_out_bias": False}
    | {"moe": MoEConfig(4, 2, 24, is_normalized=False, shared=DenseMLP(40), has_shared_gate=True)},
    "qwen3moe": {"family": "qwen3_moe", "has_qk_norm": True, "head_dim": 6, "moe": MoEConfig(5, 2, 24)},
    "phi3": {"family": "phi3", "window": 9, "num_kv_heads": 2, "is_tied": False},
    "gpt2": {"family": "gpt2", "has_learned_positions": True, "norm": "layer", "has_attention_bias": True}
    | {"has_mlp_bias": True, "is_gated": False, "activation": "gelu_tanh"},
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_YARN_BETAS = _YARN | {"beta_fast": 8.0, "beta_slow": 2.0}
_LOCAL_BASE = {"rope_theta": 70.0}
_NO_PADDING = {"pad_token_id": None}
CONVERTED = {
    "mixtral": {},
    "olmo2": {"rope_parameters": _YARN_BETAS},
    "olmo3": {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL_BASE}},
    "olmoe": {"tie_word_embeddings": True},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4} | _NO_PADDING,
    "granite": {"attention_bias": True, "mlp_bias": True},
    "glm4": {"head_dim": 16, "num_key_value_heads": 1} | _NO_PADDING,
    "starcoder2": {"tie_word_embeddings": True},
    "starcoder2-no-bias": {"use_bias": False},
    "cohere": {"use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "gpt_oss": {"rope_parameters": _YARN | {"truncate": False}},
    "neox": {"rotary_pct": 0.5, "tie_word_embeddings": True},
    "neox-sequential": {"rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False},
    "bigcode-mqa": {"multi_query": True, "n_inner": 50},
}
"""Hugging Face configurations, as changes of those in `tests.models.cases`, of the other families."""


def converted_config(name: str) -> dict:
    """Returns a configuration of `CONVERTED`."""
    base = name if name in CASES else name.split("-")[0]
    return CASES[base] | CONVERTED[name]


@pytest.mark.parametrize("name", CONVERTED)
def test_every_other_family_is_read(name, tmp_path):
    source = converted_config(name)
    model = random_model(FAMILIES[source["model_type"]].read_config(source))
    write_gguf(tmp_path / "model.gguf", model)
    found = load_model(tmp_path / "model.gguf")
    assert found.config == model.config
    jax.tree.map(np.testing.assert_array_equal, found.params, model.params)


def test_every_read_family_is_tested():
    families = {family for one in ARCHITECTURES.values() for family in (one.family, *one.others)}
    assert families == {one.get("family", "llama") for one in CONFIGS.values()} | {
        converted_config(name)["model_type"] for name in CONVERTED
    }


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_every_architecture_is_read(changes, tmp_path):
    model = random_model(small_config(**changes))
    write_gguf(tmp_path / "model.gguf", model)
    found = load_model(tmp_path / "model.gguf")
    assert found.config == model.config
    assert jax.tree.structure(found) == jax.tree.structure(model)
    # GGUF stores Gemma's norms plus one, which rounds them.
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-7 if model.config.layers[0].norm.offset else 0)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("F32", 0), ("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", 2**-7), ("Q4_0", 2**-3), ("Q4_1", 2**-3), ("MXFP4", 2**-2)],
)
def test_quantized_tensors_are_dequantized(kind, error, tmp_path):
    changes = {"width": 64, "mlp_width": 64, "head_dim": 16, "num_kv_heads": 2, "is_tied": False}
    model = random_model(small_config(**changes), 1)
    write_gguf(tmp_path / "model.gguf", model, kind=kind)
    found = load_model(tmp_path / "model.gguf")
    assert found.config == model.config
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(model.params), strict=True):
        # The error is at most one quantization step, a fraction of the block's largest magnitude.
        np.testing.assert_allclose(a, b, rtol=0, atol=error * float(jnp.abs(b).max()))


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "neox", "cohere"])
def test_quantized_experts_and_fused_matrices_are_dequantized(name, kind, tmp_path):
    source = converted_config(name) | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    model = random_model(FAMILIES[source["model_type"]].read_config(source), 2)
    write_gguf(tmp_path / "model.gguf", model, kind=kind)
    found = load_model(tmp_path / "model.gguf")
    assert found.config == model.config
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=(2**-7 if kind == "Q8_0" else 2**-2) * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("deepseek2", "not read from GGUF, because files have two layouts of the projections"),
        ("qwen35moe", "not read from GGUF, because files hold the decays"),
        ("bloom", r"expected one of \['llama', "),
    ],
)
def test_other_architectures_are_refused_by_name(architecture, message, tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(small_config()), architecture=architecture)
    with pytest.raises(ValueError, match=f"model.gguf: general.architecture={architecture!r}: {message}"):
        load_model(tmp_path / "model.gguf")


def test_the_reasons_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "families.md").read_text()
    for architecture in LEFT_OUT:
        assert f"`{architecture}`" in page


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_a_factor_of_yarn_that_is_not_the_usual_one_is_refused(key, tmp_path):
    """llama.cpp multiplies the usual factor by the first key and replaces the second, unlike `transformers`."""
    model = random_model(small_config(**CONFIGS["llama yarn"]))
    write_gguf(tmp_path / "model.gguf", model, extra={f"rope.scaling.{key}": 1.1386294})
    assert load_model(tmp_path / "model.gguf").config == model.config
    write_gguf(tmp_path / "model.gguf", model, extra={f"rope.scaling.{key}": 1.2})
    with pytest.raises(ValueError, match=rf"rope.scaling.{key}=1.2: expected 1 or 1.1386$"):
        load_model(tmp_path / "model.gguf")


def test_a_glm_with_vision_is_refused(tmp_path):
    """Its queries and keys are stored in another order."""
    model = random_model(FAMILIES["glm4"].read_config(converted_config("glm4")))
    write_gguf(tmp_path / "model.gguf", model, extra={"rope.dimension_sections": [8, 12, 12, 0]})
    with pytest.raises(ValueError, match=r"rope.dimension_sections=\[8, 12, 12, 0\]: expected none"):
        load_model(tmp_path / "model.gguf")


def q4_k(block: np.ndarray) -> np.ndarray:
    """Dequantizes a Q4_K block by its definition: 256 numbers in eight groups with a 6-bit scale and minimum each."""
    scale, minimum_scale = block[:4].view(np.float16).astype(np.float32)
    packed, nibbles = block[4:16].astype(int), block[16:].astype(int)
    numbers = []
    for group in range(8):
        if group < 4:
            factor, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            factor = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        part = nibbles[group // 2 * 32 : group // 2 * 32 + 32] >> 4 * (group % 2) & 15
        offset = minimum_scale * np.float32(minimum)
        numbers += [scale * np.float32(factor) * np.float32(q) - offset for q in part]
    return np.array(numbers, np.float32)


def q6_k(block: np.ndarray) -> np.ndarray:
    """Dequantizes a Q6_K block by its definition: 256 numbers of 6 bits in sixteen groups with a signed scale each."""
    low, high = block[:128].astype(int), block[128:192].astype(int)
    factors, scale = block[192:208].view(np.int8), block[208:].view(np.float16).astype(np.float32)[0]
    numbers = np.zeros(256, np.float32)
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                nibble = low[64 * half + 32 * (quarter % 2) + i] >> 4 * (quarter // 2) & 15
                q = (nibble | (high[32 * half + i] >> 2 * quarter & 3) << 4) - 32
                at = 128 * half + 32 * quarter + i
                numbers[at] = scale * np.float32(factors[at // 16]) * np.float32(q)
    return numbers


def write_embedding(path, data: np.ndarray, kind: str) -> None:
    """Writes a GGUF file of a Llama that contains only an embedding of 3 tokens and width 256."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_tensor("token_embd.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)


@pytest.mark.parametrize(("kind", "size", "numbers_of"), [("Q4_K", 144, q4_k), ("Q6_K", 210, q6_k)])
def test_k_quants_are_dequantized_by_their_definition(kind, size, numbers_of, tmp_path):
    """The blocks are random bytes with plausible scales, because no installed library quantizes to these types."""
    blocks = np.random.default_rng(0).integers(0, 256, (3, size), np.uint8)
    for block in blocks:
        scales = np.array([0.013, 0.21], np.float16).view(np.uint8)
        block[slice(0, 4) if kind == "Q4_K" else slice(208, 210)] = scales[: 4 if kind == "Q4_K" else 2]
    write_embedding(tmp_path / "model.gguf", blocks, kind)
    found = GgufFile(tmp_path / "model.gguf").read("model.embed_tokens.weight")
    np.testing.assert_allclose(found, [numbers_of(block) for block in blocks], rtol=1e-6)


def test_an_unknown_quantization_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_embedding(path, np.zeros((3, 292), np.uint8), "Q8_K")
    with pytest.raises(ValueError, match=r"model.gguf: tensor 'token_embd.weight': unknown quantization Q8_K$"):
        GgufFile(path).read("model.embed_tokens.weight")
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    assert content[at : at + 4] == (15).to_bytes(4, "little")
    path.write_bytes(content[:at] + (999).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(
        ValueError, match=r"model.gguf: not readable as GGUF: tensor 'token_embd.weight': unknown quantization 999$"
    ):
        load_model(path)


def test_the_error_of_a_truncated_file_names_the_truncated_tensor(tmp_path, model):
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    last = max(GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset)
    path.write_bytes(path.read_bytes()[: last.data_offset + last.n_bytes - 4])
    with pytest.raises(
        ValueError,
        match=rf"model.gguf: not readable as GGUF: tensor {last.name!r}: a value is beyond the end of the file",
    ):
        load_model(path)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RopeScaling("llama3", 8.0, 2.0, 5.0, 8192), "'rope_freqs.weight': expected the divisors of Llama 3's rotary"),
        (RopeScaling("llama3", 8.0, 1.0, 4.0, 8000), "'rope_freqs.weight': expected the divisors of Llama 3's rotary"),
    ],
)
def test_rotary_divisors_that_are_not_those_of_llama_3_are_refused(scaling, message, tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(small_config(head_dim=64, rope_base=5e5, rope_scaling=scaling)))
    with pytest.raises(ValueError, match=f"model.gguf: tensor {message}"):
        load_model(tmp_path / "model.gguf")


def test_an_unknown_scaling_type_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(small_config(rope_scaling=RopeScaling("linear", 4.0))))
    path.write_bytes(path.read_bytes().replace(b"linear", b"longer"))
    with pytest.raises(
        ValueError, match=r"model.gguf: rope.scaling.type='longer': expected 'none', 'linear' or 'yarn'"
    ):
        load_model(path)


def test_the_original_context_is_derived_from_the_rotary_divisors(tmp_path):
    """The file has no key for it. It follows from the scaling factor and the new context."""
    scaling = RopeScaling("llama3", 4.0, 1.0, 4.0, 1024)
    config = small_config(head_dim=64, rope_base=5e5, rope_scaling=scaling, context=4096)
    write_gguf(tmp_path / "model.gguf", random_model(config))
    assert load_model(tmp_path / "model.gguf").config == config


def test_a_bfloat16_file_loads_as_float32_unless_bfloat16_is_requested(tmp_path):
    model = random_model(small_config(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, context=64))
    write_gguf(tmp_path / "model.gguf", model, kind="BF16")
    assert load_model(tmp_path / "model.gguf").config.dtype == "float32"  # The norms are float32.
    assert load_model(tmp_path / "model.gguf", dtype="bfloat16").params["embedding"].dtype == jnp.bfloat16
