"""Reads GGUF files of the llama architecture; quantised tensors are dequantised to float32."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize


class GgufFile:
    """A GGUF file under Hugging Face's tensor names.

    Attributes:
        path: of the file.
        config: the Hugging Face configuration that its metadata amounts to.
        dtype: that holds every tensor without loss, if one of ours does; else float32.
    """

    def __init__(self, path: Path):
        self.path = path
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path}: general.architecture={architecture!r}: expected 'llama'")
        num_heads = self.field("llama.attention.head_count")
        width = self.field("llama.embedding_length")
        types = {tensor.tensor_type.name for tensor in self._tensors.values()}
        self.dtype = "bfloat16" if types == {"BF16"} else "float32"
        self.config: dict[str, Any] = {
            "model_type": "llama",
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": width,
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv", num_heads),
            "head_dim": self.field("llama.attention.key_length", width // num_heads),
            "intermediate_size": self.field("llama.feed_forward_length"),
            "max_position_embeddings": self.field("llama.context_length"),
            "rope_theta": self.field("llama.rope.freq_base", 10000.0),
            # Stored as float32: 9.999999747378752e-06 was written as 1e-5.
            "rms_norm_eps": float(
                str(np.float32(self.field("llama.attention.layer_norm_rms_epsilon", 1e-6)))
            ),
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a metadata value as Python's own type; `default` when it is absent."""
        field = self._reader.get_field(name)
        if field is None:
            return default
        return field.contents()

    def names(self) -> Iterable[str]:
        """Hugging Face names of all tensors."""
        return [_hugging_face_name(name) for name in self._tensors]

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor as float32, by its Hugging Face name."""
        tensor = self._tensors[_gguf_name(name)]
        array = dequantize(tensor.data, tensor.tensor_type)
        array = array.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        for projection, heads in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
            if projection in tensor.name:
                array = _unpermute(array, self.config[heads])
        return array


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's interleaved order of rotary lanes: ``[out, in]`` with half-split lanes."""
    out = weight.shape[0]
    return weight.reshape(heads, out // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GGUF_NAMES = {theirs: ours for ours, theirs in _NAMES.items()}


def _hugging_face_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_NAMES.get(part, part)}.{suffix}"
    return f"{_NAMES.get(stem, stem)}.{suffix}"


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{suffix}"
    return f"{_GGUF_NAMES[stem]}.{suffix}"
