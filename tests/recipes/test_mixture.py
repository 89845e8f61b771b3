"""The data recipe: sources, templates, exclusion of evaluation prompts, mistakes in one line."""

import gzip
import json
from pathlib import Path

import pytest
import yaml

from bass_jax.training.distill_config import load_config, parse_config
from bass_jax.training.overlap import OverlapCheck
from bass_jax.training.prompts import build_prompts, held_out_prompts
from bass_jax.training.python_functions import python_functions
from bass_jax.training.recipe import DocumentedCodeSource, HeldOut, JsonlSource, PromptRecipe, PythonFunctionsSource

SECRET = "Return the sum of all even numbers below the given limit counting the limit itself too"


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _recipe(tmp_path, sources, held_out=()):
    return PromptRecipe(tuple(sources), tuple(held_out), data_dir=str(tmp_path))


def test_evaluation_prompts_are_excluded(tmp_path):
    # Breaking it: checking before the template is filled only.
    halves = SECRET.split(" counting ")
    _write(tmp_path / "train.jsonl", [
        {"text": "something else", "tail": "x"}, {"text": "Please: " + SECRET.upper() + "!", "tail": "x"},
        {"text": halves[0], "tail": f"counting {halves[1]}"},
    ])  # fmt: skip
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": SECRET}) + "\n")
    held_out = HeldOut("test", "test.jsonl.gz", ("Do this: {prompt}",))
    source = JsonlSource("train", "train.jsonl", ("{text} {tail}",))
    found = build_prompts(_recipe(tmp_path, [source], [held_out]), seed=0)
    assert [prompt.text for prompt in found.prompts] == ["something else x"]
    assert found.num_excluded == {"train": 2}
    assert held_out_prompts(_recipe(tmp_path, [source], [held_out]))[0].text == f"Do this: {SECRET}"


def test_overlap_needs_the_whole_run_of_words():
    check = OverlapCheck([SECRET, "short one"], num_words=13)
    words = SECRET.split()
    assert check.find(" ".join(words[1:14])) is not None
    assert check.find(" ".join(words[1:13])) is None
    assert check.find("here is a Short, one") == "short one"
    assert check.find("one short") is None


def test_any_prefix_holds_the_sources_by_their_shares(tmp_path):
    for name in ("a", "b"):
        _write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {index}"} for index in range(300)])
    sources = [JsonlSource(name, f"{name}.jsonl", ("{text}",), share=share) for name, share in (("a", 3.0), ("b", 1.0))]
    prompts = build_prompts(_recipe(tmp_path, sources), seed=0).prompts
    assert len(prompts) == 600
    assert 70 <= sum(prompt.source == "a" for prompt in prompts[:100]) <= 80
    assert prompts == build_prompts(_recipe(tmp_path, sources), seed=0).prompts
    assert prompts != build_prompts(_recipe(tmp_path, sources), seed=1).prompts


def test_rows_are_chosen_by_range_limit_and_repeats(tmp_path):
    _write(tmp_path / "a.jsonl", [{"id": index, "turns": [f"t{index}"]} for index in range(20)])
    source = JsonlSource("a", "a.jsonl", ("{turns[0]}",), where={"id": ((2, 3), (10, 14))}, repeats=2, limit=4)
    texts = [prompt.text for prompt in build_prompts(_recipe(tmp_path, [source]), seed=0).prompts]
    assert len(texts) == 8 and len(set(texts)) == 4
    assert set(texts) <= {"t2", "t3", "t10", "t11", "t12", "t13", "t14"}


def test_solutions_become_documented_signatures(tmp_path):
    row = {"text": "Add two numbers.", "code": "def helper(x):\n    return x\ndef add(a, b=2):\n    return a + b",
           "test_list": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]}  # fmt: skip
    _write(tmp_path / "a.jsonl", [row, row | {"test_list": ["assert unknown(1)"]}])
    source = DocumentedCodeSource("a", "a.jsonl", templates=("{prompt}",))
    (prompt,) = build_prompts(_recipe(tmp_path, [source]), seed=0).prompts
    assert prompt.text == (
        'def add(a, b=2):\n    """Add two numbers.\n    >>> add(1, 2)\n    3\n'
        '    >>> add([1], [2])\n    [1, 2]\n    """\n'
    )


def test_installed_functions_are_read_without_import():
    found = python_functions(["json", "no_such_package"], 800)
    assert any("JSON" in text for text in found)
    assert len(set(found)) == len(found)
    for text in found:
        compile(text, "prompt", "exec")


def test_methods_lose_their_first_argument(tmp_path, monkeypatch):
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise RuntimeError\nclass A:\n    def f(self, x: List[int], y=1):\n"
        '        """Does one thing to every item.\n\n        Args:\n            x: items.\n        """\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    (text,) = python_functions(["a_package"], 800)
    assert text == (
        'from typing import List\n\n\ndef f(x: List[int], y=1):\n    """Does one thing to every item.\n    """\n'
    )


def _content(**changes):
    source = {"kind": "jsonl", "name": "a", "file": "a.jsonl", "templates": ["{text}"]}
    return {"target": "t", "output_dir": "o", "prompts": {"sources": [source]}} | changes


@pytest.mark.parametrize(
    "content, message",
    [
        (_content(trainig={}), r"trainig: Unexpected"),
        (_content(training={"num_step": 3}), r"training\.num_step: Unexpected"),
        (_content(training={"num_steps": 0}), r"training: num_steps=0: expected a positive"),
        (_content(optimizer={"kind": "sgd"}), r"optimizer\.kind: Input should be 'adamw' or 'muon'"),
        (_content(prompts={"sources": []}), r"prompts: sources: expected at least one"),
        (_content(prompts={"sources": [{"kind": "xml", "name": "a"}]}), r"prompts\.sources\.0: .*kind"),
        ({"target": "t"}, r"output_dir: .*(missing|required)"),
    ],
)
def test_mistakes_are_one_line_with_the_dotted_path(content, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_config(content, "file.yaml")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("file.yaml: ")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl: not readable"):
        build_prompts(_recipe(tmp_path, [JsonlSource("a", "a.jsonl", ("{text}",))]), seed=0)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"te')
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2 is not JSON"):
        build_prompts(_recipe(tmp_path, [JsonlSource("a", "a.jsonl", ("{text}",))]), seed=0)
    _write(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"a: template '\{txt\}': no field 'txt'"):
        build_prompts(_recipe(tmp_path, [JsonlSource("a", "a.jsonl", ("{txt}",))]), seed=0)


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no prompt is left"):
        build_prompts(_recipe(tmp_path, [PythonFunctionsSource("a", ("no_such_package",))]), seed=0)


def test_overrides_go_by_dotted_path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(_content()))
    config = load_config(str(path), {"training.num_steps": 7, "prompts.data_dir": "there"})
    assert config.training.num_steps == 7 and config.prompts.data_dir == "there"
    path.write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml: not readable as YAML"):
        load_config(path)


@pytest.mark.parametrize("path", sorted(Path("configs/distill").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    config = load_config(path)
    assert {domain.name for domain in config.prompts.held_out} >= {"humaneval", "gsm8k_test"}
