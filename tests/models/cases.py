"""Configurations and prompts that are compared with `transformers`; see `transformers_reference`."""

import numpy as np

VOCAB = 131
LENGTHS = (40, 17, 29)

_LLAMA = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip

CONFIGS = {
    "llama": _LLAMA,
    "llama-tied-mqa": _LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama-mha-attention-bias": _LLAMA | {"num_key_value_heads": 4, "attention_bias": True},
    "llama-mlp-bias-head-10": _LLAMA | {"mlp_bias": True, "head_dim": 10},
    "llama-head-22-sharded": _LLAMA
    | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22}
    | {"attention_bias": True, "mlp_bias": True},
    "llama-rope-llama3": _LLAMA | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama-rope-linear": _LLAMA
    | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}, "rms_norm_eps": 1e-3},
}  # fmt: skip


def prompts(seed: int) -> list[list[int]]:
    """Ragged prompts of random tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, n).tolist() for n in LENGTHS]


def cases() -> list[dict]:
    """What `transformers_reference` is asked to do for the random models."""
    sharded = {"max_shard_size": "40KB"}
    return [
        {"name": name, "config": config, "prompts": prompts(i), "seed": i} | (sharded if "sharded" in name else {})
        for i, (name, config) in enumerate(CONFIGS.items())
    ]
