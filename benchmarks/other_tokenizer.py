"""Measures the acceptance of a draft model that was trained with another tokenizer than the target's.

    python benchmarks/other_tokenizer.py stories260K.bin tok512.bin

The draft is a model of llama2.c (https://github.com/karpathy/llama2.c) with its tokenizer, which are converted to a
Hugging Face directory first. The target answers requests for stories, which the draft was trained on, and other
questions, both greedily, and the tokens are compared with those of regular decoding. The acceptance by position ends at
the last position that was verified. The last line is JSON.
"""

import argparse
import datetime
import json
import struct
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

import bass_jax as bass

PROMPTS = {
    "stories": (
        "Write a short story for small children about a girl named Lily and her red ball. Use very simple words.",
        "Once upon a time, there was a little dog. Continue the story.",
        "Tell me a bedtime story about a cat and a bird that become friends.",
        "Write a story for a three-year-old about Tom and his mom in the park.",
    ),
    "questions": (
        "What is the capital of France?",
        "Write a Python function that reverses a string.",
        "Explain why the sky is blue.",
        "How do I bake bread?",
    ),
}
SPECIAL = ("<unk>", "<s>", "</s>")
SPACE = "\u2581"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--target", default="checkpoints/quickstart")
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        convert(options.weights, options.tokenizer, Path(directory))
        pair = bass.load_pair(options.target, drafter=directory, dtype="float32")
    found = {}
    for name, prompts in PROMPTS.items():
        spec, length = bass.SpecConfig(draft_len=options.draft_len), {"max_new_tokens": options.max_new_tokens}
        output = bass.generate(pair, prompts, spec, policy="fixed", **length)
        regular = bass.generate(pair, prompts, spec, step="decode", **length)
        same = all(map(np.array_equal, output.tokens, regular.tokens))
        metrics = output.metrics
        found[name] = {
            "tokens": metrics.num_emitted,
            "acceptance_by_position": [
                round(rate, 3) for rate in map(float, metrics.acceptance_by_position) if rate == rate
            ],
            "tokens_per_pass": round(metrics.tokens_per_pass, 3),
            "same_tokens": same,
        }
        print(name, found[name], flush=True)
    print(json.dumps({"date": datetime.date.today().isoformat(), "draft_len": options.draft_len, "prompts": found}))


def convert(weights: Path, tokenizer: Path, directory: Path) -> None:
    """Converts a model of llama2.c, with weights in float32, and its tokenizer to a Hugging Face directory."""
    data = weights.read_bytes()
    width, mlp, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data)
    values, place, head_dim = np.frombuffer(data, "<f4", offset=28), 0, width // heads

    def read(*shape: int) -> np.ndarray:
        nonlocal place
        place += (size := int(np.prod(shape)))
        return values[place - size : place].reshape(shape)

    def half_split(matrix: np.ndarray) -> np.ndarray:
        """Reorders the rows of every head from pairs of neighbors to two halves."""
        return matrix.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2).reshape(matrix.shape)

    tensors = {"model.embed_tokens.weight": read(abs(vocab), width)}
    sizes = {  # in the order of the file
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_heads * head_dim, width),
        "self_attn.v_proj": (kv_heads * head_dim, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
        "mlp.up_proj": (mlp, width),
    }
    for name, shape in sizes.items():
        for layer, matrix in enumerate(read(layers, *shape)):
            is_rotated = name.endswith(("q_proj", "k_proj"))
            tensors[f"model.layers.{layer}.{name}.weight"] = half_split(matrix) if is_rotated else matrix
    tensors["model.norm.weight"] = read(width)
    read(2, context, head_dim // 2)  # sines and cosines
    if vocab < 0:
        tensors["lm_head.weight"] = read(-vocab, width)
    if place != len(values):
        raise ValueError(f"{weights}: {len(values)} numbers: expected {place}")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": abs(vocab),
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": vocab > 0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    convert_tokenizer(tokenizer).save(str(directory / "tokenizer.json"))
    names = {"unk_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def convert_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer of llama2.c: byte-pair encoding with three special tokens, all bytes and the merged pieces."""
    data, place, pieces = path.read_bytes(), 4, []
    while place < len(data):
        _, size = struct.unpack_from("<fi", data, place)
        place += 8 + size
        pieces.append(data[place - size : place].decode().replace(" ", SPACE))
    first = len(SPECIAL) + 256
    pieces[:first] = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = []  # A piece with a lower id is merged first.
    for piece in pieces[first:]:
        parts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in parts if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: max(ids[pair[0]], ids[pair[1]]))
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


if __name__ == "__main__":
    main()
