"""Keys of a ``config.json`` that are easily misread. The slow `test_config_edits` covers all keys."""

import numpy as np
import pytest

from bass_jax.models import rotary
from bass_jax.models.families import FAMILIES
from bass_jax.models.families.base import check_common
from bass_jax.models.model_config import ModelConfig, RopeConfig, RopeScaling
from tests.models.cases import CONFIGS

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(name, **changes):
    content = {key: value for key, value in (CONFIGS[name] | changes).items() if value is not ...}
    check_common(content)
    return FAMILIES[content["model_type"]].read_config(content)


def rope(config: ModelConfig) -> RopeConfig | None:
    return config.layers[0].attention.rope


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def activation(config: ModelConfig) -> str:
    return config.layers[0].mlp.activation


def test_rope_scaling_overrides_rope_parameters():
    config = read(
        "llama",
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
        rope_scaling={"rope_type": "linear", "factor": 3.0},
        rope_theta=55.0,
    )
    assert rope(config) == RopeConfig(55.0, scaling=RopeScaling("linear", 3.0))
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        read("llama", rope_parameters={"rope_type": "default"}, rope_scaling={"type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_an_original_context_at_the_top_level_overrides_the_nested_one(scaling):
    inside = scaling | {"original_max_position_embeddings": 64}
    found = read("llama", rope_parameters=inside, original_max_position_embeddings=32)
    assert rope(found).scaling.original_context == 32
    assert rope(read("llama", rope_parameters=inside)).scaling.original_context == 64
    assert rope(read("llama", rope_parameters=scaling)).scaling.original_context == 256


def test_the_factors_of_longrope_depend_on_the_context_of_the_model_only():
    """`transformers` chooses them by the longest row of a batch."""
    config = read("phi3-longrope-tied-mqa", max_position_embeddings=512)
    scaling = rope(config).scaling
    short, long = (rotary.frequencies(rope(config), 12, context) for context in (256, 257))
    np.testing.assert_allclose(short * scaling.short_factors, long * scaling.long_factors, rtol=1e-6)
    assert not np.allclose(short, long)
    scaled = CONFIGS["phi3-longrope-tied-mqa"]["rope_parameters"] | {"long_factor": [1.0, 2.0]}
    with pytest.raises(ValueError, match=r"rope_scaling\.long_factors: expected 6 numbers, not 2"):
        read("phi3-longrope-tied-mqa", rope_parameters=scaled)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0: expected None"),
        ("falcon", {"alibi": True}, "alibi=True: expected False"),
        ("qwen3_moe", {"num_local_experts": 7}, "num_local_experts=7 and num_experts=6: expected only num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_active=7: expected a whole number from 1 to 6"),
        (
            "phi3-longrope-beyond-the-original-context",
            {"original_max_position_embeddings": 1},
            "original_context=1: expected more than 1",
        ),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear': expected 'default' or"),
        ("gemma3_vision", {"text_config": None}, "text_config=None: expected a dictionary"),
    ],
)
def test_what_a_new_family_lacks_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        read(name, **changes)


def test_tensors_of_a_gemma_3_with_vision_have_several_names():
    canonical = FAMILIES["gemma3"].canonical
    for prefix in ("language_model.model.", "model.language_model.", "model."):
        assert canonical(f"{prefix}layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert canonical("language_model.lm_head.weight") == canonical("lm_head.weight") == "lm_head.weight"
    for name in ("vision_tower.x", "model.vision_tower.x", "multi_modal_projector.x", "model.multi_modal_projector.x"):
        assert canonical(name) is None


def test_mistral_with_layer_types_is_ministral():
    config = read("mistral", sliding_window=7, layer_types=["sliding_attention", "full_attention"])
    assert (config.family, windows(config)) == ("ministral", [7, None])
    written = FAMILIES["ministral"].write_config(config)
    assert FAMILIES["ministral"].read_config(written) == config
    with pytest.raises(ValueError, match="sliding_window: expected a size"):
        read("mistral", sliding_window=None, layer_types=["sliding_attention", "full_attention"])


def test_gelu_in_a_gemma_configuration_is_the_tanh_approximation():
    assert activation(read("gemma", hidden_act="gelu")) == "gelu_tanh"
    assert activation(read("gemma", hidden_act="gelu_fast", hidden_activation="relu")) == "gelu_tanh"
    assert activation(read("gemma", hidden_act="silu")) == "silu"


@pytest.mark.parametrize("value", [False, None, 0])
def test_a_model_without_a_causal_mask_is_refused(value):
    with pytest.raises(ValueError, match=f"is_causal={value}: expected True"):
        read("llama", is_causal=value)
    assert read("llama", is_causal=True) == read("llama")


def test_a_missing_window_has_the_default_size_of_transformers():
    assert windows(read("mistral", sliding_window=...)) == [4096, 4096]
    assert windows(read("mistral", sliding_window=None)) == [None, None]
    qwen = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": ...}
    config = read("qwen2", **qwen)
    assert windows(config) == [None, 4096]
    assert windows(read("qwen2", **qwen | {"sliding_window": None})) == [None, None]
    assert windows(read("qwen2", **qwen | {"use_sliding_window": False})) == [None, None]


def test_two_names_of_a_key_with_different_values_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads=2 and n_head=4: expected only n_head"):
        read("gpt2", num_attention_heads=2)
    assert read("gpt2", num_attention_heads=4) == read("gpt2")
