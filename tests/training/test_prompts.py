"""Prompts from JSON Lines files and from a source of the user's own, and mistakes in a configuration."""

import gzip
import json

import pytest
import yaml

from bass_jax.runtime.yaml_config import parse_yaml
from bass_jax.training.distill_config import DistillConfig, load_distill_config
from bass_jax.training.prompts import GeneratedPromptSource, JsonlPrompts, Prompt, PromptSource, prompt_source

OWN_SOURCE = """
from bass_jax.training import Prompt

class Source:
    def __init__(self, config):
        self.text = config.prompts.options["text"]
        self.description = {"text": self.text}

    def prompts(self):
        return [Prompt(self.text, "own")]

    def held_out(self):
        return []

    def find_overlap(self, text):
        return None

def no_source(config):
    return 3
"""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def make_prompts(tmp_path):
    def make(rows, held_out_rows=(), seed=0, **prompts):
        content = {"files": [write(tmp_path / "train.jsonl", rows)]} | prompts
        if held_out_rows:
            content["held_out"] = [write(tmp_path / "test.jsonl", held_out_rows)]
        config = parse_yaml(DistillConfig, {"target": "t", "seed": seed, "prompts": content}, "test")
        return prompt_source(config)

    return make


def test_three_keys_are_enough(tmp_path):
    """A target, prompts and the size of the draft."""
    files = [write(tmp_path / "prompts.jsonl", [{"prompt": "hello"}])]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"target": "t", "prompts": {"files": files}, "draft": {"width": 64}}))
    config = load_distill_config(path)
    assert config.draft.width == 64 and config.output_dir == "runs/distill"
    assert prompt_source(config).prompts() == [Prompt("hello", "prompts")]


def test_rows_of_all_files_in_an_order_of_the_seed(tmp_path, make_prompts):
    rows = [{"q": f"q{index}", "turns": [f"t{index}"]} for index in range(20)]
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write(json.dumps(rows[0]) + "\n")
    files = [write(tmp_path / "a.jsonl", rows), str(tmp_path / "more.jsonl.gz")]
    found = make_prompts([], files=files, template="{q}: {turns[0]}").prompts()
    assert sorted(prompt.text for prompt in found) == sorted(f"q{i}: t{i}" for i in [*range(20), 0])
    assert {prompt.source for prompt in found} == {"a", "more"}
    assert found == make_prompts([], files=files, template="{q}: {turns[0]}").prompts()
    assert found != make_prompts([], files=files, template="{q}: {turns[0]}", seed=1).prompts()


def test_prompts_that_contain_a_held_out_prompt_are_left_out(make_prompts):
    rows = [{"prompt": text} for text in ("what is this", "Please: what,\nis THIS? Thanks", "what is thistle", "this")]
    source = make_prompts(rows, held_out_rows=[{"prompt": "What is this?"}, {"prompt": "another"}])
    assert {prompt.text for prompt in source.prompts()} == {"what is thistle", "this"}
    assert source.held_out() == [Prompt("What is this?", "test"), Prompt("another", "test")]
    # A corpus is checked with the chat template around the prompt.
    assert source.find_overlap("user\nWhat is this?\nassistant\n") == "What is this?"
    assert source.find_overlap("user\nwhat is thistle\nassistant\n") is None
    with pytest.raises(ValueError, match="no prompt is left: 1 were read, and all contain held-out ones"):
        make_prompts([{"prompt": "a b"}], held_out_rows=[{"prompt": "b"}])


def test_files_that_cannot_be_read_are_named(tmp_path, make_prompts):
    with pytest.raises(ValueError, match=r"absent\.jsonl: cannot be read: .*No such file"):
        make_prompts([], files=[str(tmp_path / "absent.jsonl")])
    with pytest.raises(ValueError, match=r"absent\.jsonl: cannot be read: .*No such file"):
        make_prompts([{"prompt": "a"}], held_out=[str(tmp_path / "absent.jsonl")])
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"te')
    with pytest.raises(ValueError, match=r"broken\.jsonl:2: not JSON"):
        make_prompts([], files=[str(tmp_path / "broken.jsonl")])
    with pytest.raises(ValueError, match=r"train\.jsonl:1: template '\{text\}': no field 'text'"):
        make_prompts([{"prompt": "a"}], template="{text}")


def test_a_source_of_the_users_own(tmp_path, monkeypatch, make_prompts):
    """From a module in the current directory."""
    (tmp_path / "own_prompts.py").write_text(OWN_SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # Restores the path afterwards.
    source = make_prompts([], files=[], source="own_prompts:Source", options={"text": "mine"})
    assert isinstance(source, PromptSource) and not isinstance(source, GeneratedPromptSource)
    assert source.prompts() == [Prompt("mine", "own")]
    with pytest.raises(
        ValueError, match=r"prompts\.source='own_prompts:no_source': returned int: expected a PromptSource"
    ):
        make_prompts([], files=[], source="own_prompts:no_source")
    with pytest.raises(ValueError, match=r"prompts\.source='no_such_module:x': No module named"):
        make_prompts([], files=[], source="no_such_module:x")


def test_jsonl_prompts_are_a_prompt_source(make_prompts):
    source = make_prompts([{"prompt": "a"}])
    assert isinstance(source, JsonlPrompts) and isinstance(source, PromptSource)
    assert source.description == {"files": ["train.jsonl"], "template": "{prompt}"}


def content(**changes):
    return {"target": "t", "output_dir": "o", "prompts": {"files": ["a.jsonl"]}} | changes


@pytest.mark.parametrize(
    "wrong, message",
    [
        (content(trainig={}), r"trainig: unknown key; did you mean 'training'"),
        (content(training={"num_step": 3}), r"training\.num_step: unknown key"),
        (content(training={"num_steps": 0}), r"training: num_steps=0: expected a positive"),
        (content(optimizer={"kind": "sgd"}), r"optimizer\.kind: Input should be 'adamw' or 'muon'"),
        (content(prompts={}), r"prompts: files=\(\), source=None: expected one of them"),
        (content(prompts={"files": ["a"], "source": "b:c"}), r"prompts: files=\('a',\), source='b:c': expected one"),
        (content(prompts={"files": ["a"], "data_dir": "b"}), r"prompts\.data_dir: unknown key"),
        ({"target": "t"}, r"prompts: .*(missing|required)"),
    ],
)
def test_mistakes_are_one_line_with_the_dotted_path(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_yaml(DistillConfig, wrong, "file.yaml")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("file.yaml: ")


def test_overrides_have_dotted_paths(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content()))
    overrides = {"training.num_steps": 7, "prompts.options.data_dir": "there"}
    config = load_distill_config(str(path), overrides)
    assert config.training.num_steps == 7 and config.prompts.options == {"data_dir": "there"}
    path.write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml: not readable as YAML"):
        load_distill_config(path)
