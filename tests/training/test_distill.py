"""From a configuration file to a draft on disk, in the three stages of the command."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import bass_jax as bass
from bass_jax.checkpoint import (
    Tokenizer,
    load_early_exit,
    load_model,
    load_speculator,
    load_tokenizer,
    read_datastore,
    save_model,
)
from bass_jax.checkpoint.tokenizer import import_transformers
from bass_jax.cli.main import main
from bass_jax.drafters import Eagle3Drafter, EarlyExitDrafter
from bass_jax.training import distill, distill_datastore, generate_corpus, load_distill_config
from bass_jax.training.agreement import measure_agreement
from bass_jax.training.corpus import Corpus
from tests.checkpoint.small import random_model, small_tokenizer
from tests.flat_config import flat_config

SHAPE = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 16}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a target, prompts and ``config.yaml``."""
    root = tmp_path_factory.mktemp("distill")
    fast = import_transformers().PreTrainedTokenizerFast(tokenizer_object=small_tokenizer()._backend, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer = Tokenizer(fast)
    target = random_model(flat_config(vocab_size=tokenizer.vocab_size, context=256, **SHAPE))
    save_model(root / "target", target, tokenizer=tokenizer)
    for name, count in (("train", 24), ("test", 2)):
        lines = [json.dumps({"text": f"{name} number {index}"}) for index in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    prompts = {name: [str(root / f"{file}.jsonl")] for name, file in (("files", "train"), ("held_out", "test"))}
    content = {
        "target": str(root / "target"),
        "output_dir": str(root / "run"),
        "prompts": prompts | {"template": "{text}"},
        "rollout": {
            "num_tokens": 100,
            "max_new_tokens": 12,
            "batch": 8,
            "temperatures": {0.0: 0.5, 1.0: 0.5},
            "top": 4,
        },
        "draft": SHAPE | {"output_vocab_size": tokenizer.vocab_size - 1},
        "training": {"num_steps": 4, "batch_tokens": 64, "length_grain": 64, "save_every": 2, "held_out_share": 0.0},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(content))
    return root


@pytest.fixture(scope="module")
def run(root):
    """Runs the configuration with overrides."""

    def run(overrides=None, **options):
        return distill(load_distill_config(root / "config.yaml", overrides), **options)

    return run


@pytest.fixture(scope="module")
def finished(run):
    """The three stages of the configuration as it is. Other tests read its directory and do not change it."""
    return run()


def test_three_stages_write_a_corpus_and_a_draft(finished, root):
    assert set(finished.agreements) == {"test"} and finished.acceptances == {}
    # 100 tokens were asked for, and 8 answers have at most 12 each.
    assert len(list((root / "run" / "corpus").glob("shard_*.npz"))) == 2
    assert len(list((root / "run" / "held_out").glob("shard_*.npz"))) == 1
    embedding = load_model(root / "target").params["embedding"]
    draft = load_model(finished.directory, dtype="float32", embedding=embedding)
    # Stored in bfloat16, with 8 bits.
    np.testing.assert_allclose(draft.params["head"], finished.draft.params["head"], rtol=2**-8)
    np.testing.assert_array_equal(draft.output_ids, finished.draft.output_ids)


def test_a_second_run_does_only_what_is_left(finished, root, run, tmp_path):
    shutil.copytree(root / "run", tmp_path / "run")
    there = {"output_dir": str(tmp_path / "run")}
    shards = sorted((tmp_path / "run" / "corpus").glob("shard_*.npz"))
    written = [shard.stat().st_mtime_ns for shard in shards]
    answers = tmp_path / "run" / "held_out"
    for _ in range(2):
        second = run(there | {"held_out_temperatures": [0.2, 1.0]})
        assert len(list(answers.glob("shard_*.npz"))) == 3
    assert set(second.acceptances["test"]) == {0.2, 1.0}
    report = json.loads((tmp_path / "run" / "agreement.json").read_text())
    assert report["test"]["acceptance"]["0.2"] == second.acceptances["test"][0.2]
    # Answers at a temperature that the configuration does not name are not evaluated.
    third = run(there | {"held_out_temperatures": [1.0]}, stages=("evaluate",))
    assert third.acceptances == {"test": {1.0: second.acceptances["test"][1.0]}}
    assert [shard.stat().st_mtime_ns for shard in shards] == written
    np.testing.assert_array_equal(second.draft.params["head"], finished.draft.params["head"])
    assert second.agreements == finished.agreements


def test_a_corpus_grows_and_keeps_its_description(finished, root, tmp_path):
    shutil.copytree(root / "run", tmp_path / "run")
    there = {"output_dir": str(tmp_path / "run")}
    config = load_distill_config(root / "config.yaml", there | {"rollout.num_tokens": 200})
    assert len(generate_corpus(config).shards()) == 3
    with pytest.raises(ValueError, match=r"corpus: seed differs .* use another output_dir"):
        generate_corpus(load_distill_config(root / "config.yaml", there | {"seed": 1}))


@pytest.mark.slow
def test_the_commands_distill_and_build_datastore(root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = [str(root / "config.yaml"), "--set", "output_dir=run"]
    assert main(["distill", *config, "--quiet", "--plot", "run.png"]) == 0
    assert "drawn: run.png" in capsys.readouterr().out and Path("run.png").stat().st_size > 1000
    assert main(["build-datastore", *config, "--output", "store.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "contexts of" in printed and "store.safetensors" in printed and "test" in printed


def test_a_datastore_is_built_from_the_corpus(finished, root, tmp_path):
    path = tmp_path / "store.safetensors"
    built = distill_datastore(load_distill_config(root / "config.yaml"), path)
    assert set(built.agreements) == {"test"}
    arrays, about = read_datastore(path, tokenizer=load_tokenizer(root / "target"))
    assert about["about"]["num_tokens"] == built.num_tokens > 50
    assert len(arrays["keys"]) == built.num_entries > 20


@pytest.mark.slow
def test_a_draft_learns_from_the_corpus_of_another_run(finished, root, run, tmp_path):
    """Its own directory is new, and no corpus stage makes it."""
    there = {"output_dir": str(tmp_path / "on"), "corpus_dir": str(root / "run")}
    made = run(there | {"training.num_steps": 1}, stages=("train",))
    assert made.directory == tmp_path / "on" / "draft" and made.directory.is_dir()
    np.testing.assert_array_equal(np.load(tmp_path / "on" / "output_ids.npy"), made.draft.output_ids)


@pytest.fixture
def continue_from(root, run, tmp_path):
    """Continues a draft at such a low learning rate that it stays as it is."""

    def run_on(start, name, **overrides):
        changes = {
            "output_dir": str(tmp_path / name),
            "corpus_dir": str(root / "run"),
            "draft.start": str(start),
            "training.dtype": "bfloat16",
            "training.num_steps": 1,
            "optimizer.learning_rate": 1e-12,
        }
        return run(changes | {f"draft.{key}": value for key, value in overrides.items()}, stages=("train",))

    return run_on


@pytest.mark.slow
def test_a_draft_continues_from_another(finished, continue_from, tmp_path):
    continued = continue_from(finished.directory, "on")
    assert not (tmp_path / "on" / "corpus").exists()
    np.testing.assert_array_equal(continued.draft.output_ids, finished.draft.output_ids)
    for name, leaf in continued.draft.params.items():
        if name != "embedding":
            stored = jax.tree.map(lambda x: np.asarray(x.astype("bfloat16"), np.float32), finished.draft.params[name])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), leaf, stored)
    assert jax.tree.leaves(continued.draft.params)[0].dtype == np.float32
    with pytest.raises(ValueError, match=r"draft\.start: .*: mlp_width=16: the configuration asks for 8"):
        continue_from(finished.directory, "narrow", mlp_width=8)


@pytest.mark.slow
def test_a_draft_continues_with_more_layers_and_not_with_fewer(finished, continue_from):
    deeper = continue_from(finished.directory, "deep", num_layers=3)
    assert deeper.draft.config.num_layers == 3 and "layer_2" in deeper.draft.params
    with pytest.raises(ValueError, match=r"draft\.start: .*: num_layers=3: the configuration asks for 1"):
        continue_from(deeper.directory, "shallow")


@pytest.mark.slow
def test_a_draft_continues_with_a_larger_vocabulary_and_not_with_a_smaller_one(finished, continue_from):
    larger = continue_from(finished.directory, "rich", output_vocab_size=finished.draft.config.vocab_size)
    assert set(np.asarray(larger.draft.output_ids)) > set(np.asarray(finished.draft.output_ids))
    with pytest.raises(ValueError, match=r"draft\.start: .*: output_vocab_size=\d+: the configuration asks for \d+"):
        continue_from(larger.directory, "poor")


def test_a_draft_in_int8_is_evaluated_as_it_is_stored(finished, root, run, tmp_path):
    apart = {"output_dir": str(tmp_path / "packed"), "corpus_dir": str(root / "run")}
    packed = run(apart | {"is_packed": True}, stages=("train", "evaluate"))
    # The training is the same; the stored parameters are rounded.
    np.testing.assert_array_equal(packed.draft.params["head"], finished.draft.params["head"])
    target = load_model(root / "target")
    found = load_model(packed.directory, dtype="float32", embedding=target.params["embedding"])
    head = np.asarray(finished.draft.params["head"])
    assert found.params["head"].dtype == np.float32
    # Half a step of INT8, and a rounding to bfloat16 before and after.
    steps = np.abs(head).max(axis=1, keepdims=True) * (0.5 / 127 + 2**-7)
    assert (np.abs(found.params["head"] - head) <= steps).all() and not np.array_equal(found.params["head"], head)
    greedy = [rollout for rollout, _ in Corpus(root / "run" / "held_out").read()]
    assert packed.agreements["test"] == measure_agreement(found, greedy, 4)


@pytest.mark.parametrize(
    "overrides, stages, message",
    [
        ({}, ("training",), "stages: 'training': expected corpus, train, evaluate"),
        ({}, ("train",), "no corpus here"),
        ({"held_out_temperatures": [0.0]}, ("evaluate",), "held_out_temperatures=.*: expected numbers above 0"),
        ({"target": "package:no_such_package"}, ("corpus",), "target: package 'no_such_package' is not installed"),
        ({"prompts.max_prompt_tokens": 1}, ("corpus",), "max_prompt_tokens=1: no prompt is short enough"),
        ({"draft.output_vocab_size": 10**6}, ("corpus", "train"), "output_vocab_size=1000000: expected"),
    ],
)
def test_mistakes_are_named(run, tmp_path, overrides, stages, message):
    with pytest.raises(ValueError, match=message):
        run({"output_dir": str(tmp_path / "run")} | overrides, stages=stages)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"prompts.files": ["absent.jsonl"]}, "absent.jsonl: cannot be read: .*No such file"),
        ({"prompts.held_out": ["absent.jsonl"]}, "absent.jsonl: cannot be read: .*No such file"),
        ({"prompts.template": "{question}"}, r"test.jsonl:1: template '\{question\}': no field 'question'"),
        ({"extra_corpora": ["absent"]}, "absent/corpus: no corpus here"),
        ({"draft.start": "absent/draft/here"}, "draft.start: absent/draft/here: no such file or directory"),
    ],
)
def test_missing_data_are_found_before_the_target_is_loaded(root, tmp_path, monkeypatch, overrides, message):
    def load(config, dtype):
        pytest.fail("the target was loaded")

    monkeypatch.setattr(sys.modules["bass_jax.training.distill"], "load_target", load)
    config = load_distill_config(root / "config.yaml", {"output_dir": str(tmp_path / "run")} | overrides)
    for begin in (distill, generate_corpus):
        with pytest.raises(ValueError, match=message):
            begin(config)


@pytest.fixture(scope="module")
def eagle3_changes(finished, root, tmp_path_factory):
    """The configuration of an EAGLE-3 head that learns from the same corpus."""
    return {
        "output_dir": str(tmp_path_factory.mktemp("eagle3") / "run"),
        "corpus_dir": str(root / "run"),
        "draft.kind": "eagle3",
        "draft.width": load_model(root / "target").config.width,
        "draft.hidden_layers": [0, 1],
        "loss.unroll": 3,
        "training.num_steps": 12,
    }


@pytest.fixture(scope="module")
def eagle3(eagle3_changes, run):
    """The head of this configuration, and the configuration."""
    return run(eagle3_changes, stages=("train", "evaluate")), eagle3_changes


@pytest.mark.slow
def test_an_eagle3_head_is_written_in_the_format_of_speculators(eagle3, root):
    """The stored head is the trained one, rounded to bfloat16, and generates with its target."""
    made, _ = eagle3
    content = json.loads((made.directory / "config.json").read_text())
    assert content["speculators_model_type"] == "eagle3" and content["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    found = load_speculator(made.directory, load_model(root / "target", dtype="float32"))
    assert (found.config, found.head) == (made.draft.config, made.draft.head)
    np.testing.assert_array_equal(found.output_ids, made.draft.output_ids)
    for one, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(made.draft.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-8)
    pair = bass.load_pair(root / "target", drafter=made.directory)
    prompts, regular = [[1, 2, 3], [4, 5]], bass.SpecConfig()
    speculated = bass.generate(pair, prompts, bass.SpecConfig(3), max_new_tokens=12)
    plain = bass.generate(pair, prompts, regular, max_new_tokens=12, step="decode")
    assert all(map(np.array_equal, speculated.tokens, plain.tokens)) and speculated.metrics.num_drafted > 0


@pytest.mark.slow
def test_the_measured_tokens_per_pass_are_those_of_the_drafter(eagle3, root):
    """`evaluate` computes the hidden states that the corpus does not hold."""
    made, _ = eagle3
    target = load_model(root / "target", dtype="float32")
    rows = [row for row, _ in Corpus(root / "run" / "held_out").read() if row.temperature == 0]
    pair = bass.Pair(target, Eagle3Drafter(load_speculator(made.directory, target), target.vocab_size))
    num_tokens, num_passes = 0, 0
    for row in rows:
        answer = bass.generate(pair, [row.prompt], bass.SpecConfig(4), max_new_tokens=len(row.response), stop_tokens=[])
        np.testing.assert_array_equal(answer.tokens[0], row.response)
        num_tokens, num_passes = num_tokens + len(row.response), num_passes + len(answer.infos)
    assert made.agreements["test"].tokens_per_pass == pytest.approx(num_tokens / num_passes)


@pytest.mark.slow
def test_an_eagle3_head_continues_from_another(eagle3, run, tmp_path):
    made, changes = eagle3
    there = {"output_dir": str(tmp_path / "on"), "draft.start": str(made.directory), "training.num_steps": 1}
    again = run(changes | there | {"optimizer.learning_rate": 1e-12}, stages=("train",))
    for one, other in zip(jax.tree.leaves(again.draft.params), jax.tree.leaves(made.draft.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-8, atol=1e-9)
    with pytest.raises(ValueError, match=r"draft\.start: .*: expected .*hidden_layers=\(1,\).*, found"):
        run(changes | there | {"output_dir": str(tmp_path / "other"), "draft.hidden_layers": [1]}, stages=("train",))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"draft.width": 24}, "draft.width=24: expected the target's width"),
        ({"draft.hidden_layers": [0, 9]}, r"draft.hidden_layers=\[0, 9\]: expected different ids from 0 to"),
        ({"draft.hidden_layers": [1, 1]}, r"draft.hidden_layers=\[1, 1\]"),
        ({"draft.reads_hidden": True}, "reads_hidden=True: expected none with kind='eagle3'"),
        ({"is_packed": True}, "is_packed=True: expected False with kind='eagle3'"),
        ({"training.on_policy_share": 0.5}, "on_policy_share=0.5: expected 0"),
        ({"draft.kind": "decoder"}, r"hidden_layers=.*: expected \(\) with kind='decoder'"),
    ],
)
def test_mistakes_of_an_eagle3_head_are_named(eagle3_changes, run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(eagle3_changes | {"output_dir": str(tmp_path / "run")} | changes, stages=("train",))


@pytest.mark.slow
def test_an_adapter_is_trained_and_drafts_in_the_targets_cache(run, root, finished):
    """The target's layers stay as they are, and the stored adapter drafts for the pair."""
    draft = {"kind": "early_exit", "num_layers": 1, "mlp_width": 16, "output_vocab_size": None}
    changes = {"output_dir": str(root / "adapter"), "corpus_dir": str(root / "run"), "draft": draft}
    found = run(changes, stages=("train", "evaluate"))
    assert set(found.agreements) == {"test"}
    trained = found.draft.params["adapter"]["down"]
    assert np.abs(trained).max() > 0, "it starts with zeros"
    target = load_model(root / "target")
    for name, leaf in found.draft.target_params["layer_0"]["attention"].items():
        np.testing.assert_array_equal(leaf, np.asarray(target.params["layer_0"]["attention"][name], np.float32))
    pair = bass.load_pair(root / "target", drafter=found.directory, dtype="float32")
    assert isinstance(pair.drafter, EarlyExitDrafter)
    np.testing.assert_allclose(pair.drafter.model.params["adapter"]["down"], trained, rtol=1e-2, atol=1e-6)
    prompts = [[1, 2, 3], [4]]
    expected = bass.generate(pair, prompts, step="decode", max_new_tokens=12)
    output = bass.generate(pair, prompts, bass.SpecConfig(3, "greedy"), max_new_tokens=12)
    assert [row.tolist() for row in output.tokens] == [row.tolist() for row in expected.tokens]
    other = random_model(flat_config(vocab_size=target.vocab_size, context=256, **SHAPE | {"width": 24}))
    with pytest.raises(ValueError, match="an adapter of width 16 after layer 1: the target has the width 24"):
        load_early_exit(found.directory, other)
    with pytest.raises(ValueError, match="output_vocab_size=8192: expected null with kind='early_exit'"):
        run({"draft": {"kind": "early_exit"}})
