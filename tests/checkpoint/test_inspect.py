"""`inspect_checkpoint` describes a checkpoint without its arrays; `why_not_a_pair` compares two descriptions."""

import dataclasses

import jax
import pytest

from bass_jax.checkpoint import inspect_checkpoint, load_model, save_hugging_face, save_model, why_not_a_pair
from tests.checkpoint.gguf_writer import write_gguf
from tests.checkpoint.small import VOCAB, random_model, small_config, small_tokenizer


@pytest.mark.parametrize("kind", ["ours", "theirs", "gguf"])
def test_a_description_matches_the_loaded_model(kind, tmp_path, tokenizer):
    model = random_model(small_config(num_kv_heads=2, dtype="float32" if kind == "gguf" else "bfloat16"))
    path = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    if kind == "ours":
        save_model(path, model, tokenizer=tokenizer, source="somewhere", license="MIT")
    elif kind == "theirs":
        save_hugging_face(path, model, tokenizer=tokenizer)
    else:
        write_gguf(path, model)
    found = inspect_checkpoint(path)
    assert found.config == load_model(path).config == model.config
    assert found.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert found.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert found.num_cache_bytes_per_token == sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(1, 1)))
    assert found.shapes["layer_1/mlp/down"] == (16, 32)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    assert found.num_stored_bytes == sum(len(file.read_bytes()) for file in files)
    assert found.tokenizer_fingerprint == (None if kind == "gguf" else tokenizer.fingerprint)
    assert (found.source, found.license) == (("somewhere", "MIT") if kind == "ours" else (None, None))


def test_why_not_a_pair_gives_the_reason(tmp_path, model, tokenizer):
    def inspect(name, model, tokenizer=tokenizer, **options):
        save_model(tmp_path / name, model, tokenizer=tokenizer, **options)
        return inspect_checkpoint(tmp_path / name)

    target = inspect("target", model)
    padded = inspect("padded", random_model(small_config(vocab_size=VOCAB + 8)))
    assert why_not_a_pair(target, target) is None
    assert why_not_a_pair(target, padded) is None and why_not_a_pair(padded, target) is None
    other = inspect("other", model, small_tokenizer("i n"))
    assert why_not_a_pair(target, other) is None
    missing = dataclasses.replace(other, tokenizer_vocab_size=None)
    assert "their token ids mean different text" in why_not_a_pair(target, missing)
    reads_hidden = inspect("hidden", random_model(small_config(hidden_width=16)), small_tokenizer("i n"))
    assert "their token ids mean different text" in why_not_a_pair(target, reads_hidden)
    small = inspect("small", random_model(small_config(vocab_size=200)))
    assert why_not_a_pair(target, small) == "the draft's vocabulary has 200 tokens, the tokenizer 259"
    config = small_config(is_tied=False, embedding_width=16, output_vocab_size=40, width=8)
    sharing = inspect("sharing", random_model(config), shares_embedding=True)
    assert "embedding" not in sharing.shapes
    assert why_not_a_pair(target, sharing) is None
    wide = dataclasses.replace(config, embedding_width=24)
    assert "the draft shares an embedding of 24 x 264" in why_not_a_pair(
        target, inspect("wide", random_model(wide), shares_embedding=True)
    )


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="absent: no such file"):
        inspect_checkpoint(tmp_path / "absent")
