"""From a configuration file to a draft on disk, in the three stages of the command."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from bass_jax.checkpoint import Tokenizer, load_model, load_tokenizer, read_datastore, save_model
from bass_jax.cli.main import main
from bass_jax.models import init_model
from bass_jax.training import run_corpus, run_distill
from bass_jax.training.agreement import measure_agreement
from bass_jax.training.corpus import Corpus
from tests.checkpoint.small import small_tokenizer
from tests.flat_config import flat_config


@pytest.fixture
def config_path(tmp_path):
    from bass_jax.checkpoint.tokenizer import import_transformers

    fast = import_transformers().PreTrainedTokenizerFast(tokenizer_object=small_tokenizer()._backend, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer = Tokenizer(fast)
    shape = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 16}
    target = init_model(flat_config(vocab_size=tokenizer.vocab_size, context=256, **shape), jax.random.key(0))
    save_model(tmp_path / "target", target, tokenizer=tokenizer)
    for name, count in (("train", 24), ("test", 3)):
        lines = [json.dumps({"text": f"{name} number {index}"}) for index in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    source = {"kind": "jsonl", "name": "train", "file": "train.jsonl", "templates": ["{text}"]}
    held_out = {"name": "test", "file": "test.jsonl", "templates": ["{text}"], "num_prompts": 2}
    content = {
        "target": str(tmp_path / "target"),
        "output_dir": str(tmp_path / "run"),
        "prompts": {"data_dir": str(tmp_path), "sources": [source], "held_out": [held_out]},
        "rollout": {
            "num_tokens": 100,
            "max_new_tokens": 12,
            "batch": 8,
            "temperatures": {0.0: 0.5, 1.0: 0.5},
            "top": 4,
        },
        "draft": shape | {"output_vocab_size": tokenizer.vocab_size - 1},
        "training": {"num_steps": 4, "batch_tokens": 64, "length_grain": 64, "save_every": 2, "held_out_share": 0.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_three_stages_and_a_second_run(config_path):
    first = run_distill(config_path, show_progress=False)
    assert set(first.agreements) == {"test"}
    shards = sorted((config_path.parent / "run" / "corpus").glob("shard_*.npz"))
    written = [shard.stat().st_mtime_ns for shard in shards]
    assert len(shards) == 2  # 8 answers of at most 12 tokens each; 100 were asked for.

    embedding = load_model(config_path.parent / "target").params["embedding"]
    draft = load_model(first.directory, dtype="float32", embedding=embedding)
    # Stored in bfloat16: 8 bits.
    np.testing.assert_allclose(draft.params["head"], first.draft.params["head"], rtol=2**-8)
    np.testing.assert_array_equal(draft.output_ids, first.draft.output_ids)

    # Nothing is left to do: the same draft comes out, and no shard is written again. Sampled answers join greedy ones.
    answers = config_path.parent / "run" / "held_out"
    assert first.acceptances == {} and len(list(answers.glob("shard_*.npz"))) == 1
    for _ in range(2):
        second = run_distill(config_path, {"held_out_temperatures": [0.2, 1.0]}, show_progress=False)
        assert len(list(answers.glob("shard_*.npz"))) == 3
    assert set(second.acceptances["test"]) == {0.2, 1.0}
    report = json.loads((config_path.parent / "run" / "agreement.json").read_text())
    assert report["test"]["acceptance"]["0.2"] == second.acceptances["test"][0.2]
    # What is there is not evaluated where the configuration does not ask for it.
    third = run_distill(config_path, {"held_out_temperatures": [1.0]}, stages=("evaluate",), show_progress=False)
    assert third.acceptances == {"test": {1.0: second.acceptances["test"][1.0]}}
    assert [shard.stat().st_mtime_ns for shard in shards] == written
    np.testing.assert_array_equal(second.draft.params["head"], first.draft.params["head"])
    assert second.agreements == first.agreements


@pytest.mark.slow
def test_more_of_the_same_corpus_and_another_recipe(config_path):
    run_distill(config_path, {"training.num_steps": 2}, show_progress=False)
    run_distill(config_path, {"rollout.num_tokens": 200}, show_progress=False)
    assert len(list((config_path.parent / "run" / "corpus").glob("shard_*.npz"))) == 3
    with pytest.raises(ValueError, match=r"corpus: seed differs .* use another output_dir"):
        run_distill(config_path, {"seed": 1}, show_progress=False)


@pytest.mark.slow
def test_distill_plots_its_log_and_build_datastore_uses_its_corpus(config_path, capsys, monkeypatch):
    """The commands, as a user runs them behind the corpus stage."""
    monkeypatch.chdir(config_path.parent)
    assert main(["distill", str(config_path), "--quiet", "--plot", "run.png"]) == 0
    assert "drawn: run.png" in capsys.readouterr().out and Path("run.png").stat().st_size > 1000
    assert main(["build-datastore", str(config_path), "--output", "store.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "contexts of" in printed and "store.safetensors" in printed and "test" in printed
    arrays, about = read_datastore("store.safetensors", tokenizer=load_tokenizer(config_path.parent / "target"))
    assert about["about"]["num_tokens"] > 50 and len(arrays["keys"]) > 20


def test_a_new_draft_learns_from_a_corpus_that_lies_elsewhere(config_path):
    """Its own directory is new, and no corpus stage makes it."""
    run_corpus(config_path, show_progress=False)
    there = {"output_dir": str(config_path.parent / "on"), "corpus_dir": str(config_path.parent / "run")}
    made = run_distill(config_path, there | {"training.num_steps": 1}, stages=("train",), show_progress=False)
    assert made.directory == config_path.parent / "on" / "draft" and made.directory.is_dir()
    np.testing.assert_array_equal(np.load(config_path.parent / "on" / "output_ids.npy"), made.draft.output_ids)


def test_a_draft_goes_on_from_another_with_its_vocabulary(config_path):
    """And learns from the corpus that the first run wrote."""
    first = run_distill(config_path, {"training.num_steps": 2}, stages=("corpus", "train"), show_progress=False)
    there = {"output_dir": str(config_path.parent / "on"), "corpus_dir": str(config_path.parent / "run")}
    start = {"draft.start": str(first.directory), "training.dtype": "bfloat16"}
    stages = ("corpus", "train")
    # So low a rate leaves the draft where it starts.
    still = {"optimizer.learning_rate": 1e-12, "training.num_steps": 1}
    second = run_distill(config_path, there | start | still, stages=stages, show_progress=False)
    assert not (config_path.parent / "on" / "corpus").exists()
    np.testing.assert_array_equal(second.draft.output_ids, first.draft.output_ids)
    for name, leaf in second.draft.params.items():
        if name != "embedding":
            stored = jax.tree.map(lambda x: np.asarray(x.astype("bfloat16"), np.float32), first.draft.params[name])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), leaf, stored)
    assert jax.tree.leaves(second.draft.params)[0].dtype == np.float32
    # More layers start as the same draft; fewer are another shape.
    deep = {"output_dir": str(config_path.parent / "deep"), "draft.num_layers": 3}
    deeper = run_distill(config_path, there | start | still | deep, stages=("train",), show_progress=False)
    assert deeper.draft.config.num_layers == 3 and "layer_2" in deeper.draft.params
    shallow = there | {"draft.start": str(deeper.directory), "output_dir": str(config_path.parent / "shallow")}
    with pytest.raises(ValueError, match=r"draft\.start: .*: num_layers=3: the configuration asks for 1"):
        run_distill(config_path, shallow, stages=("train",), show_progress=False)
    # A larger vocabulary has the smaller one in it.
    rich = {"output_dir": str(config_path.parent / "rich"), "draft.output_vocab_size": first.draft.config.vocab_size}
    richer = run_distill(config_path, there | start | still | rich, stages=("train",), show_progress=False)
    assert set(np.asarray(richer.draft.output_ids)) > set(np.asarray(first.draft.output_ids))
    poor = there | {"draft.start": str(richer.directory), "output_dir": str(config_path.parent / "poor")}
    with pytest.raises(ValueError, match=r"draft\.start: .*: output_vocab_size=\d+: the configuration asks for \d+"):
        run_distill(config_path, poor, stages=("train",), show_progress=False)
    narrow = there | start | {"draft.mlp_width": 8}
    with pytest.raises(ValueError, match=r"draft\.start: .*: mlp_width=16: the configuration asks for 8"):
        run_distill(config_path, narrow, stages=("train",), show_progress=False)


def test_a_packed_draft_is_evaluated_as_it_was_written(config_path):
    whole = run_distill(config_path, show_progress=False)
    apart = {"output_dir": str(config_path.parent / "packed"), "corpus_dir": str(config_path.parent / "run")}
    packed = run_distill(config_path, apart | {"is_packed": True}, stages=("train", "evaluate"), show_progress=False)
    # The training is the same; what is rounded is what is read.
    np.testing.assert_array_equal(packed.draft.params["head"], whole.draft.params["head"])
    target = load_model(config_path.parent / "target")
    found = load_model(packed.directory, dtype="float32", embedding=target.params["embedding"])
    head = np.asarray(whole.draft.params["head"])
    assert found.params["head"].dtype == np.float32
    # Half a step of INT8, and a rounding to bfloat16 before and after.
    steps = np.abs(head).max(axis=0) * (0.5 / 127 + 2**-7)
    assert (np.abs(found.params["head"] - head) <= steps).all() and not np.array_equal(found.params["head"], head)
    greedy = [rollout for rollout, _ in Corpus(config_path.parent / "run" / "held_out").read()]
    assert packed.agreements["test"] == measure_agreement(found, greedy, 4)


@pytest.mark.parametrize(
    "overrides, stages, message",
    [
        ({}, ("training",), "stages: 'training': expected"),
        ({}, ("train",), "no corpus here"),
        ({"held_out_temperatures": [0.0]}, ("evaluate",), "held_out_temperatures=.*: expected numbers above 0"),
        ({"target": "package:no_such_package"}, ("corpus",), "target: package 'no_such_package' is not installed"),
        ({"prompts.max_prompt_tokens": 1}, ("corpus",), "max_prompt_tokens=1: no prompt is short enough"),
        ({"draft.output_vocab_size": 10**6}, ("corpus", "train"), "output_vocab_size=1000000: expected"),
    ],
)
def test_mistakes_are_named(config_path, overrides, stages, message):
    with pytest.raises(ValueError, match=message):
        run_distill(config_path, overrides, stages=stages, show_progress=False)
