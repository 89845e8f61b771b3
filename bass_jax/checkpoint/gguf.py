"""Reads GGUF files of the llama architecture; quantised tensors are dequantised to float32."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from bass_jax.checkpoint.manifest import one_line

_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}


class GgufFile:
    """A GGUF file under Hugging Face's tensor names.

    Attributes:
        path: of the file.
        config: the Hugging Face configuration that its metadata amounts to.
        dtype: that holds every tensor without loss, if one of ours does; else float32.
    """

    def __init__(self, path: Path):
        """Opens a file.

        Raises:
            ValueError: naming file and key, if it is damaged or of another architecture.
        """
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # Damage shows as whatever NumPy or the reader trips over.
            raise ValueError(f"{path}: not readable as GGUF: {one_line(error)}") from None
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.dtype = "bfloat16" if all(map(_is_bfloat16, self._tensors.values())) else "float32"
        self.config = self._read_config()

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a metadata value as Python's own type; `default` when it is absent.

        Raises:
            ValueError: if it cannot be read.
        """
        field = self._reader.get_field(name)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise ValueError(f"{self.path}: {name}: not readable: {one_line(error)}") from None

    def names(self) -> Iterable[str]:
        """Hugging Face names of all tensors."""
        return list(self._tensors)

    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(int(tensor.n_elements) for tensor in self._tensors.values())

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor as float32, by its Hugging Face name.

        Raises:
            ValueError: naming file and tensor, if its quantisation is unknown or its shape cannot be.
        """
        tensor = self._tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        try:
            array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: tensor {tensor.name!r}: unknown quantisation {kind}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: tensor {tensor.name!r}: {one_line(error)}") from None
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if name.endswith((f"{projection}.weight", f"{projection}.bias")):
                return self._unpermute(tensor.name, array, self.config[heads])
        return array

    def _read_config(self) -> dict[str, Any]:
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{self.path}: general.architecture={architecture!r}: expected 'llama'")
        config = {key: self.field(f"llama.{name}") for key, name in _KEYS.items()}
        for key, name in _KEYS.items():
            if not isinstance(config[key], int) or config[key] < 1:
                raise ValueError(f"{self.path}: llama.{name}={config[key]!r}: expected a positive integer")
        if "model.embed_tokens.weight" not in self._tensors:
            raise ValueError(f"{self.path}: missing tensor 'token_embd.weight'")
        scaling = self.field("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ValueError(f"{self.path}: llama.rope.scaling.type={scaling!r}: expected 'none' or 'linear'")
        if scaling == "linear":
            config["rope_scaling"] = {"rope_type": "linear", "factor": self._number("rope.scaling.factor", 1.0)}
        num_heads = config["num_attention_heads"]
        return config | {
            "model_type": "llama",
            "vocab_size": int(self._tensors["model.embed_tokens.weight"].shape[-1]),
            "num_key_value_heads": self.field("llama.attention.head_count_kv", num_heads),
            "head_dim": self.field("llama.attention.key_length", config["hidden_size"] // num_heads),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 1e-6),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self._tensors,
        }

    def _number(self, name: str, default: float) -> float:
        value = self.field(f"llama.{name}", default)
        if not isinstance(value, int | float):
            raise ValueError(f"{self.path}: llama.{name}={value!r}: expected a number")
        # Stored as float32: 9.999999747378752e-06 was written as 1e-5.
        return float(str(np.float32(value)))

    def _unpermute(self, name: str, weight: np.ndarray, heads: int) -> np.ndarray:
        """Undoes llama.cpp's interleaved order of rotary lanes: ``[out, in]`` with half-split lanes."""
        if not isinstance(heads, int) or heads < 1 or weight.shape[0] % (2 * heads):
            raise ValueError(f"{self.path}: misshapen tensor {name!r} {list(weight.shape)}: {heads} heads")
        pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return pairs.swapaxes(1, 2).reshape(weight.shape)


def _is_bfloat16(tensor: Any) -> bool:
    return tensor.tensor_type == GGMLQuantizationType.BF16


_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        layer, _, part = stem.removeprefix("blk.").partition(".")
        return f"model.layers.{layer}.{_NAMES.get(part, part)}.{suffix}"
    return f"{_NAMES.get(stem, stem)}.{suffix}"
