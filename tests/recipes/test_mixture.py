"""The mixture of prompts: sources, templates, the exclusion of evaluation prompts, mistakes in one line."""

import gzip
import json
from pathlib import Path

import pytest

from bass_jax.training.distill_config import load_distill_config
from bass_jax.training.prompts import GeneratedPromptSource, Prompt, prompt_source
from recipes.quickstart_draft import mixture
from recipes.quickstart_draft.mixture import MixedPrompts
from recipes.quickstart_draft.overlap import OverlapCheck
from recipes.quickstart_draft.python_functions import python_functions

SECRET = "Return the sum of all even numbers below the given limit counting the limit itself too"
ROOT = Path(__file__).parents[2]


def jsonl(name, *templates, **options):
    return {"kind": "jsonl", "name": name, "file": f"{name}.jsonl", "templates": templates or ("{text}",)} | options


def texts(source):
    return [prompt.text for prompt in source.prompts()]


def test_evaluation_prompts_are_left_out(tmp_path, make_mixture, write):
    # Breaking it: checking only before the template is filled in.
    halves = SECRET.split(" counting ")
    rows = [
        {"text": "something else", "tail": "x"},
        {"text": "Please: " + SECRET.upper() + "!", "tail": "x"},
        {"text": halves[0], "tail": f"counting {halves[1]}"},
    ]
    write("train.jsonl", rows)
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": SECRET}) + "\n")
    held_out = {"name": "test", "file": "test.jsonl.gz", "template": "Do this: {prompt}"}
    source = make_mixture([jsonl("train", "{text} {tail}")], [held_out])
    assert texts(source) == ["something else x"]
    assert source.held_out() == [Prompt(f"Do this: {SECRET}", "test")]
    # A corpus is checked in the same way.
    assert source.find_overlap(f"user: {SECRET}") is not None
    assert source.find_overlap(f"user: {halves[0]}") is None


def test_an_overlap_is_a_whole_run_of_words():
    check = OverlapCheck([SECRET, "short one"], num_words=13)
    words = SECRET.split()
    assert check.find(" ".join(words[1:14])) is not None
    assert check.find(" ".join(words[1:13])) is None
    assert check.find("here is a Short, one") == "short one"
    assert check.find("one short") is None


def test_any_prefix_holds_the_sources_by_their_shares(make_mixture, write):
    for name in ("a", "b"):
        write(f"{name}.jsonl", [{"text": f"{name} {index}"} for index in range(300)])
    sources = [jsonl(name, share=share) for name, share in (("a", 3.0), ("b", 1.0))]
    prompts = make_mixture(sources).prompts()
    assert len(prompts) == 600
    assert 70 <= sum(prompt.source == "a" for prompt in prompts[:100]) <= 80
    assert prompts == make_mixture(sources).prompts()
    assert prompts != make_mixture(sources, seed=1).prompts()


def test_rows_are_chosen_by_range_limit_and_repeats(make_mixture, write):
    write("a.jsonl", [{"id": index, "turns": [f"t{index}"]} for index in range(20)])
    found = texts(make_mixture([jsonl("a", "{turns[0]}", where={"id": [[2, 3], [10, 14]]}, repeats=2, limit=4)]))
    assert len(found) == 8 and len(set(found)) == 4
    assert set(found) <= {"t2", "t3", "t10", "t11", "t12", "t13", "t14"}


def test_held_out_prompts_are_spread_over_their_file(make_mixture, write):
    write("a.jsonl", [{"text": "train"}])
    write("test.jsonl", [{"text": f"test {index}"} for index in range(10)])
    held_out = {"name": "domain", "file": "test.jsonl", "template": "{text}", "num_prompts": 5}
    source = make_mixture([jsonl("a")], [held_out])
    assert source.held_out() == [Prompt(f"test {index}", "domain") for index in (0, 2, 4, 6, 8)]
    # All rows are left out, those that are not evaluated on too.
    assert source.find_overlap("test 9") is not None


def test_solutions_become_documented_signatures(make_mixture, write):
    row = {
        "text": "Add two numbers.",
        "code": "def helper(x):\n    return x\ndef add(a, b=2):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"],
    }
    write("a.jsonl", [row, row | {"test_list": ["assert unknown(1)"]}])
    source = {"kind": "documented_code", "name": "a", "file": "a.jsonl", "templates": ["{prompt}"]}
    assert texts(make_mixture([source])) == [
        'def add(a, b=2):\n    """Add two numbers.\n    >>> add(1, 2)\n    3\n'
        '    >>> add([1], [2])\n    [1, 2]\n    """\n'
    ]


def test_installed_functions_are_read_without_an_import():
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


@pytest.mark.parametrize(
    "sources, message",
    [
        ([], r"prompts\.options: sources: expected at least one"),
        ([{"kind": "xml", "name": "a"}], r"prompts\.options: sources\.0: .*kind"),
        ([jsonl("a", shares=2)], r"prompts\.options: sources\.0\.jsonl\.shares: unknown key"),
        ([jsonl("a", share=0)], r"share=0: expected a positive weight"),
        ([jsonl("a"), jsonl("a")], r"names \['a', 'a'\] are not distinct"),
    ],
)
def test_mistakes_are_one_line_with_the_dotted_path(make_mixture, sources, message):
    with pytest.raises(ValueError, match=message) as error:
        make_mixture(sources)
    assert "\n" not in str(error.value)


def test_all_missing_files_are_named_at_once(make_mixture, write):
    """Before the target writes anything."""
    write("b.jsonl", [{"text": "b"}])
    held_out = {"name": "test", "file": "c.jsonl", "template": "{text}"}
    asked = {"kind": "self_asked", "name": "asked", "num": 8}
    with pytest.raises(ValueError, match=r"data_dir='.*': a\.jsonl, c\.jsonl: no such file"):
        make_mixture([asked, jsonl("a"), jsonl("b")], [held_out])


def test_rows_that_cannot_be_read_are_named(tmp_path, make_mixture, write):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"te')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        make_mixture([jsonl("a")])
    write("a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no field 'id'"):
        make_mixture([jsonl("a", where={"id": [[1, 2]]})])
    with pytest.raises(ValueError, match=r"a: template '\{txt\}': no field 'txt'"):
        make_mixture([jsonl("a", "{txt}")]).prompts()


def test_an_empty_mixture_is_an_error(make_mixture):
    source = {"kind": "python_functions", "name": "a", "packages": ["no_such_package"]}
    with pytest.raises(ValueError, match="no prompt is left"):
        make_mixture([source]).prompts()


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/distill/*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path, tmp_path, monkeypatch):
    """Their mixture is made from the current directory's `recipes`, with rows in place of the files."""
    config = load_distill_config(path, {"prompts.options.data_dir": str(tmp_path)})
    options = config.prompts.options
    for part in [*options["sources"], *options["held_out"]]:
        (tmp_path / part.get("file", "unused")).touch()
    monkeypatch.setattr(mixture, "select_rows", lambda path, where: iter(()))
    source = prompt_source(config)
    assert isinstance(source, MixedPrompts) and isinstance(source, GeneratedPromptSource)
    assert {domain["name"] for domain in options["held_out"]} >= {"humaneval", "gsm8k_test"}
