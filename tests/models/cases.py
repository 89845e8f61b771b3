"""Configurations and prompts for comparisons with `transformers`; see `transformers_reference`."""

import numpy as np

VOCAB = 131
LENGTHS = (40, 17, 29)
NUM_NEW = (8, 64, 8)
"""The number of new tokens per prompt."""

_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}

_COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = (
    _COMMON
    | _SHAPE
    | {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 256}
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
)
_WINDOWED = {"sliding_window": 7, "max_window_layers": 1, "use_sliding_window": True}
_QWEN2 = _LLAMA | {"model_type": "qwen2"}
_QWEN3 = _LLAMA | {"model_type": "qwen3", "head_dim": 14}
_MISTRAL = _LLAMA | {"model_type": "mistral"}
_GEMMA = _LLAMA | {"model_type": "gemma", "head_dim": 14, "tie_word_embeddings": True}
_GEMMA2 = (
    _GEMMA
    | {"model_type": "gemma2", "query_pre_attn_scalar": 24, "sliding_window": 6}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
)
_GEMMA3 = (
    _GEMMA
    | {"model_type": "gemma3_text", "query_pre_attn_scalar": 24, "sliding_window": 6}
    | {"sliding_window_pattern": 3, "num_hidden_layers": 3}
)
_GPT2 = _COMMON | {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128}
_BIGCODE = _GPT2 | {"model_type": "gpt_bigcode"}
_CODEGEN = _GPT2 | {"model_type": "codegen", "n_embd": 96, "n_head": 4, "rotary_dim": 8, "n_ctx": 128}
_NEOX = _COMMON | _SHAPE | {"model_type": "gpt_neox", "max_position_embeddings": 128}
_OPT = (
    _COMMON
    | {"model_type": "opt", "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 128, "word_embed_proj_dim": 48, "pad_token_id": 1}
)
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN2_MOE = _LLAMA | _EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
_QWEN3_MOE = _LLAMA | _EXPERTS | {"model_type": "qwen3_moe", "head_dim": 14}
_MIXTRAL = _LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_OLMOE = _LLAMA | _EXPERTS | {"model_type": "olmoe"}
_OLMO2 = _LLAMA | {"model_type": "olmo2"}
_OLMO3 = _LLAMA | {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 7}
_PHI3 = _LLAMA | {"model_type": "phi3"}
_SHORT, _LONG = [1.0, 1.1, 1.3, 1.4, 1.7, 2.0], [1.0, 2.0, 3.0, 5.0, 8.0, 13.0]
_LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": _SHORT, "long_factor": _LONG}
_SMOLLM3 = _LLAMA | {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2}
_GRANITE = (
    _LLAMA
    | {"model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2}
    | {"residual_multiplier": 0.7, "logits_scaling": 2.5}
)
_GLM = _LLAMA | {"model_type": "glm", "head_dim": 12}
_GLM4 = _GLM | {"model_type": "glm4"}
_STARCODER2 = _LLAMA | {"model_type": "starcoder2", "norm_epsilon": 1e-3}
_COHERE = _LLAMA | {"model_type": "cohere", "logit_scale": 0.3, "layer_norm_eps": 1e-3}
_COHERE2 = _COHERE | {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 7}
_GPT_OSS = (
    _LLAMA
    | {"model_type": "gpt_oss", "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2}
    | {"sliding_window": 7, "rope_parameters": _YARN}
)
_DEEPSEEK = (
    _LLAMA
    | {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 18, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10}
    | {"v_head_dim": 7, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24, "first_k_dense_replace": 1}
)
_DEEPSEEK2 = _DEEPSEEK | {"model_type": "deepseek_v2"}
_DEEPSEEK3 = _DEEPSEEK | {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1}
_MSCALE = _YARN | {"mscale": 1.3, "mscale_all_dim": 0.7}
_LLAMA4 = (
    _LLAMA
    | {"model_type": "llama4_text", "head_dim": 12, "num_local_experts": 4, "intermediate_size_mlp": 56}
    | {"num_hidden_layers": 3, "no_rope_layer_interval": 3, "attention_chunk_size": 9}
    | {"floor_scale": 5, "attn_scale": 0.4}
)
_RECURRENT = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10} | {
    "linear_value_head_dim": 6,
    "num_hidden_layers": 4,
    "head_dim": 16,
}
_QWEN3_NEXT = _LLAMA | _EXPERTS | _RECURRENT | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 40}
_QWEN3_5 = _LLAMA | _RECURRENT | {"model_type": "qwen3_5_text"}
_QWEN3_5_MOE = _QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"}
_VISION = {
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    | {"out_hidden_size": 48, "num_position_embeddings": 16}
}
_FALCON = _COMMON | _SHAPE | {"model_type": "falcon", "max_position_embeddings": 128, "layer_norm_epsilon": 1e-3}

CONFIGS = {
    "llama": _LLAMA,
    "llama-tied-mqa": _LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama-mha-attention-bias": _LLAMA | {"num_key_value_heads": 4, "attention_bias": True},
    "llama-mlp-bias-head-10": _LLAMA | {"mlp_bias": True, "head_dim": 10, "hidden_act": "gelu_new"},
    "llama-head-22-sharded": _LLAMA
    | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22}
    | {"attention_bias": True, "mlp_bias": True},
    "llama-rope-llama3": _LLAMA | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama-rope-linear": _LLAMA
    | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}, "rms_norm_eps": 1e-3},
    "llama-rope-yarn": _LLAMA | {"rope_parameters": _YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 0.8}},
    "qwen2-rope-yarn-deepseek": _QWEN2
    | {"rope_parameters": _YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}, "head_dim": 12},
    "mistral": _MISTRAL | {"sliding_window": None},
    "mistral-window-head-10": _MISTRAL | {"sliding_window": 9, "head_dim": 10},
    "mistral-tied-mqa-window": _MISTRAL | {"sliding_window": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2": _QWEN2,
    "qwen2-tied-mqa-windows": _QWEN2 | _WINDOWED | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": _QWEN3,
    "qwen3-tied-bias-windows": _QWEN3 | _WINDOWED | {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3-mqa-head-22": _QWEN3 | {"head_dim": 22, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "gemma": _GEMMA,
    "gemma-untied-mqa": _GEMMA | {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 22},
    "gemma2": _GEMMA2,
    "gemma2-untied-mqa-bias": _GEMMA2
    | {"tie_word_embeddings": False, "num_key_value_heads": 1, "attention_bias": True, "attn_logit_softcapping": 0.7},
    "gemma2-uncapped-other-layers": _GEMMA2
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 10, "num_key_value_heads": 4}
    | {"layer_types": ["full_attention", "sliding_attention"], "query_pre_attn_scalar": 31},
    "gemma3": _GEMMA3,
    "gemma3-rope-mqa-softcap": _GEMMA3
    | {"num_key_value_heads": 1, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 31}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        }
    },
    "gemma3-untied-bias-head-10": _GEMMA3
    | {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 10, "num_key_value_heads": 4},
    "gpt2": _GPT2,
    "gpt2-untied-head-9-relu": _GPT2
    | {"n_embd": 27, "n_head": 3, "tie_word_embeddings": False, "n_inner": 50, "activation_function": "relu"},
    "gpt2-unscaled": _GPT2 | {"scale_attn_weights": False, "layer_norm_epsilon": 1e-3},
    "bigcode-mqa": _BIGCODE | {"multi_query": True},
    "bigcode-mha-untied": _BIGCODE | {"multi_query": False, "tie_word_embeddings": False, "n_inner": 50},
    "codegen": _CODEGEN,
    "codegen-head-14": _CODEGEN | {"n_embd": 112, "n_head": 8, "rotary_dim": 14, "n_inner": 50},
    "codegen-tied-part-rotated": _CODEGEN
    | {"tie_word_embeddings": True, "rotary_dim": 4, "activation_function": "relu"},
    "neox": _NEOX | {"rotary_pct": 0.5},
    "neox-sequential-tied": _NEOX
    | {"use_parallel_residual": False, "tie_word_embeddings": True, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
    "neox-no-attention-bias": _NEOX | {"attention_bias": False, "rotary_pct": 0.34, "layer_norm_eps": 1e-3},
    "opt": _OPT,
    "opt-350m": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
    "opt-untied-no-bias": _OPT | {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
    "opt-projected-untied": _OPT | {"word_embed_proj_dim": 20, "tie_word_embeddings": False},
    "ministral": _MISTRAL
    | {"model_type": "ministral", "head_dim": 14, "sliding_window": 9}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": _QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3_moe-tied-mqa-unnormalized-window": _QWEN3_MOE
    | {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts_per_tok": 5}
    | {"use_sliding_window": True, "sliding_window": 7, "attention_bias": True},
    "qwen3_moe-dense-layers-sharded": _QWEN3_MOE
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 9}
    | {"num_attention_heads": 6, "head_dim": 10, "num_experts_per_tok": 1, "hidden_act": "gelu"},
    "qwen2_moe": _QWEN2_MOE,
    "qwen2_moe-normalized-windows-no-bias": _QWEN2_MOE
    | {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True, "num_experts_per_tok": 3}
    | _WINDOWED,
    "qwen2_moe-one-expert-dense-layer-sharded": _QWEN2_MOE
    | {"mlp_only_layers": [0], "num_experts_per_tok": 1, "num_experts": 3, "num_key_value_heads": 4},
    "mixtral": _MIXTRAL,
    "mixtral-window-mqa-tied": _MIXTRAL
    | {"sliding_window": 9, "num_key_value_heads": 1, "tie_word_embeddings": True, "num_experts_per_tok": 1}
    | {"head_dim": 12},  # Without it `transformers` fails for YaRN.
    "mixtral-head-10-all-experts-sharded": _MIXTRAL
    | {"head_dim": 10, "num_local_experts": 3, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3},
    "gpt_oss": _GPT_OSS,
    "gpt_oss-mqa-tied-no-bias-other-layers": _GPT_OSS
    | {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": False, "num_experts_per_tok": 1}
    | {"layer_types": ["full_attention", "sliding_attention"], "swiglu_limit": 0.4, "swiglu_alpha": 1.1},
    "gpt_oss-head-10-all-experts-sharded": _GPT_OSS
    | {"head_dim": 10, "num_local_experts": 3, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3}
    | {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "olmoe": _OLMOE,
    "olmoe-normalized-tied-mqa": _OLMOE
    | {"norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts_per_tok": 4},
    "olmoe-mha-bias-sharded": _OLMOE
    | {"num_key_value_heads": None, "attention_bias": True, "num_experts": 5, "num_experts_per_tok": 5},
    "olmo2": _OLMO2,
    "olmo2-tied-mqa-rope-linear": _OLMO2
    | {"tie_word_embeddings": True, "num_key_value_heads": 1}
    | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}},
    "olmo2-mha-bias-head-10-sharded": _OLMO2
    | {"num_key_value_heads": 4, "attention_bias": True, "head_dim": 10, "hidden_act": "gelu_new"},
    "olmo3": _OLMO3,
    "olmo3-tied-mqa-yarn": _OLMO3
    | {"tie_word_embeddings": True, "num_key_value_heads": 1}
    | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_theta": 70.0}}},
    "olmo3-bias-other-layers-head-10-sharded": _OLMO3
    | {"attention_bias": True, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    | {"head_dim": 10},
    "phi3": _PHI3,
    "phi3-longrope-tied-mqa": _PHI3
    | {"rope_parameters": _LONGROPE | {"attention_factor": 1.3}, "original_max_position_embeddings": 256}
    | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "phi3-longrope-beyond-the-original-context": _PHI3
    | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 8},
    "phi3-part-rotated-window-sharded": _PHI3
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.5}}
    | {"sliding_window": 9, "num_key_value_heads": 4},
    "smollm3": _SMOLLM3,
    "smollm3-tied-windows-first-layer-not-rotated": _SMOLLM3
    | {"tie_word_embeddings": True, "no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 7}
    | {"attention_bias": True},
    "smollm3-mlp-bias-mqa-sharded": _SMOLLM3
    | {"mlp_bias": True, "num_key_value_heads": 1, "no_rope_layers": [1, 0, 0], "head_dim": 10},
    "granite": _GRANITE,
    "granite-tied-mqa-biases": _GRANITE
    | {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "granite-head-10-yarn-sharded": _GRANITE | {"head_dim": 10, "rope_parameters": _YARN, "logits_scaling": 0.4},
    "glm": _GLM,
    "glm-tied-mqa-no-bias-all-rotated": _GLM
    | {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": False}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 1.0}},
    "glm-head-16-mha-sharded": _GLM | {"head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "glm4": _GLM4,
    "glm4-tied-mqa-no-bias": _GLM4 | {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": False},
    "glm4-head-16-quarter-rotated-sharded": _GLM4
    | {"head_dim": 16}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.25}},
    "starcoder2": _STARCODER2,
    "starcoder2-tied-mqa-window": _STARCODER2
    | {"tie_word_embeddings": True, "num_key_value_heads": 1, "sliding_window": 9},
    "starcoder2-no-bias-relu-sharded": _STARCODER2
    | {"use_bias": False, "hidden_act": "relu", "num_attention_heads": 6, "num_key_value_heads": 3},
    "cohere": _COHERE,
    "cohere-tied-mqa-norms": _COHERE | {"tie_word_embeddings": True, "num_key_value_heads": 1, "use_qk_norm": True},
    "cohere-norms-bias-sharded": _COHERE
    | {"use_qk_norm": True, "attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3},
    "cohere2": _COHERE2,
    "cohere2-tied-mqa-bias": _COHERE2
    | {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True, "sliding_window_pattern": 2},
    "cohere2-other-layers-sharded": _COHERE2
    | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "logit_scale": 2.0},
    "gemma3_vision": {
        "model_type": "gemma3",
        "text_config": _GEMMA3 | {"sliding_window_pattern": 2},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
        "pad_token_id": None,
    },
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v2-groups-no-query-rank-yarn-biases-tied": _DEEPSEEK2
    | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
    | {"q_lora_rank": None, "rope_parameters": _MSCALE, "attention_bias": True, "mlp_bias": True}
    | {"tie_word_embeddings": True, "first_k_dense_replace": 0},
    "deepseek_v2-bias-dense-layers-scaled-sharded": _DEEPSEEK2
    | {"num_attention_heads": 6, "num_key_value_heads": 6, "v_head_dim": 16, "kv_lora_rank": 8, "attention_bias": True}
    | {"num_hidden_layers": 3, "first_k_dense_replace": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 1}
    | {"rms_norm_eps": 1e-3},
    "deepseek_v3": _DEEPSEEK3,
    "deepseek_v3-half-split-yarn-bias-tied": _DEEPSEEK3
    | {"rope_interleave": False, "rope_parameters": _MSCALE, "attention_bias": True, "tie_word_embeddings": True}
    | {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 0.8},
    "deepseek_v3-no-query-rank-unnormalized-sharded": _DEEPSEEK3
    | {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "num_experts_per_tok": 1, "qk_rope_head_dim": 4}
    | {"first_k_dense_replace": 0, "hidden_act": "gelu", "n_routed_experts": 5, "num_attention_heads": 3}
    | {"num_key_value_heads": 3, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}},
    "llama4_text": _LLAMA4,
    "llama4_text-dense-layers-llama3-bias-tied": _LLAMA4
    | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "rope_parameters": _LLAMA3_ROPE, "attention_bias": True}
    | {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts_per_tok": 2},
    "llama4_text-no-norm-untuned-other-layers-sharded": _LLAMA4
    | {"use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1], "moe_layers": [0, 2]}
    | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "attention_chunk_size": 16}
    | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    "llama4_text-yarn-without-chunks": _LLAMA4
    | {"attention_chunk_size": None, "rope_parameters": _YARN, "rms_norm_eps": 1e-2, "num_key_value_heads": 4},
    "llama4_vision": {
        "model_type": "llama4",
        "text_config": _LLAMA4 | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
        "vision_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 16}
        | {"projector_input_dim": 16, "projector_output_dim": 16},
    },
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next-other-layers-dense-bias-tied": _QWEN3_NEXT
    | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False}
    | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "num_key_value_heads": 1},
    "qwen3_next-no-experts-mha-sharded": _QWEN3_NEXT
    | {"num_experts": 0, "num_key_value_heads": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 3}
    | {"full_attention_interval": 2, "hidden_act": "gelu", "rms_norm_eps": 1e-3}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_text-tied-mqa-bias-half-rotated": _QWEN3_5
    | {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True, "linear_num_key_heads": 4}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.5}},
    "qwen3_5_text-one-recurrent-layer-sharded": _QWEN3_5
    | {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "linear_conv_kernel_dim": 2}
    | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 7, "rms_norm_eps": 1e-3},
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_moe_text-one-expert-tied": _QWEN3_5_MOE
    | {"num_experts_per_tok": 1, "num_experts": 3, "tie_word_embeddings": True, "num_hidden_layers": 2}
    | {"full_attention_interval": 2},
    "qwen3_5_moe_text-all-experts-mha-sharded": _QWEN3_5_MOE
    | {"num_experts_per_tok": 4, "num_experts": 4, "num_key_value_heads": 4, "linear_num_value_heads": 6},
    "qwen3_5_vision": _VISION | {"model_type": "qwen3_5", "text_config": _QWEN3_5},
    "qwen3_5_moe_text-vision": _VISION | {"model_type": "qwen3_5_moe", "text_config": _QWEN3_5_MOE},
    "falcon": _FALCON,
    "falcon-new-two-norms-bias": _FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "tie_word_embeddings": False},
    "falcon-new-one-norm-sharded": _FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 50},
    "falcon-mha-sequential": _FALCON
    | {"multi_query": False, "parallel_attn": False, "activation": "gelu_pytorch_tanh", "bias": True},
}


QUICK = {
    "llama",
    "qwen2-rope-yarn-deepseek",
    "qwen3",
    "gemma2",
    "gemma3-rope-mqa-softcap",
    "gpt2",
    "opt",
    "falcon",
    "cohere2",
    "granite",
    "mixtral",
    "gpt_oss",
    "llama4_text",
}
"""Families that contain, with those of `tests.checkpoint.test_native_mtp`, every kind of layer.

The other configurations are tested by the slow tests."""

QUICK_FILES = {
    *QUICK,
    "deepseek_v3",
    "qwen3_next",
    "codegen",
    "glm",
    "mistral",
    "neox",
    "olmo2",
    "phi3",
    "qwen2_moe",
    "smollm3",
    "starcoder2",
}
QUICK_FILES |= {"llama-tied-mqa", "opt-350m"}
"""Configurations of every module of `bass_jax.models.families`, for quick tests that compute no logits."""

PICKLED = ("llama-tied-mqa", "gpt2", "opt-350m")
"""Configurations whose weights torch writes as pickles too."""


def prompts(seed: int) -> list[list[int]]:
    """Returns prompts of random tokens, of different lengths."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, n).tolist() for n in LENGTHS]


def cases() -> list[dict]:
    """Returns the cases of all random models for `transformers_reference`."""
    sharded = {"max_shard_size": "40KB"}
    return [
        {"name": name, "config": config, "prompts": prompts(i), "num_new": NUM_NEW, "seed": i}
        | (sharded if "sharded" in name else {})
        | ({"pickled": True} if name in PICKLED else {})
        for i, (name, config) in enumerate(CONFIGS.items())
    ]
