"""The protocol over all tasks, and the scores of right and wrong answers."""

import json
from pathlib import Path

import pytest

from bass_jax.experiments import find_task, registered_tasks
from bass_jax.experiments.data_sources import read_data
from bass_jax.experiments.experiment_config import TaskConfig
from bass_jax.experiments.problems import load_problems
from bass_jax.experiments.sandbox import run_program, run_programs
from bass_jax.experiments.tasks import read_problem, template
from bass_jax.experiments.tasks.code import code_of
from bass_jax.experiments.tasks.gsm8k import last_number
from tests.experiments.conftest import GSM8K, HUMANEVAL, MBPP, ROWS

DATA = Path(__file__).parents[3] / "shared" / "data"
TASKS = {**registered_tasks(), "template": template.CONTAINS_WORD}
MORE_ROWS = ROWS | {
    "template": [{"question": "A pet?", "word": "cat"}],
    "random_tokens": [{"id": "0", "num_tokens": 7}],
}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_protocol(name):
    task = TASKS[name]
    for row in MORE_ROWS[name]:
        problem = read_problem(task, row, "here")
        assert problem.id and (problem.num_random_tokens or (problem.question and problem.text))
        assert not problem.text.isspace()
        if task.program is not None:
            for answer in ("", "nonsense (", "```python\npass\n```"):
                compiles = task.program(problem, answer)
                assert isinstance(compiles, str)
        if task.score is not None:
            scores = task.score(problem, "whatever comes")
            assert task.measure in scores and all(0 <= value <= 1 for value in scores.values())
    with pytest.raises(ValueError, match="here: not a row of the task"):
        read_problem(task, {"nothing": 1}, "here")


def test_humaneval_takes_bodies_functions_and_fences(bubblewrap):
    task = find_task("humaneval")
    problem = read_problem(task, HUMANEVAL[0], "row 0")
    body = HUMANEVAL[0]["canonical_solution"]
    whole = f"def one(x):\n{body}"
    right = [body, f"{body}\n```\nThis adds one.", f"Sure:\n```python\n{whole}```\nIt adds.", whole]
    wrong = ["    return x\n", "", f"```python\n{whole}", "```python\ndef one(x): return 0\n```"]
    assert [run_program(task.program(problem, answer)).passed for answer in right] == [True] * 4
    # The third answer has an unclosed fence, and its code is right.
    assert [run_program(task.program(problem, answer)).passed for answer in wrong] == [False, False, True, False]


def test_mbpp_takes_code(bubblewrap):
    task = find_task("mbpp")
    problem = read_problem(task, MBPP[0], "row 0")
    assert run_program(task.program(problem, MBPP[0]["code"])).passed
    assert not run_program(task.program(problem, "def f(x): return 2")).passed


def test_gsm8k_takes_the_last_number():
    task = find_task("gsm8k")
    problem = read_problem(task, GSM8K[0], "row 0")
    assert task.score(problem, "1,000 and 1 make 1001.") == {"exact": 1.0}
    assert task.score(problem, "The answer is $1,001.00!") == {"exact": 1.0}
    assert task.score(problem, "1001, or rather 1002") == {"exact": 0.0}
    assert task.score(problem, "none") == {"exact": 0.0}
    assert last_number("from 3 to -4.5 degrees") == -4.5


def test_rouge_counts_bigrams():
    pytest.importorskip("rouge_score", reason="needs rouge-score (the extra tasks)")
    task = find_task("cnn_dailymail")
    problem = read_problem(task, ROWS["cnn_dailymail"][0], "row 0")
    assert task.score(problem, "A cat sat there.") == {"rouge_2": 1.0}
    # The answer has one of the bigrams "a cat", "cat sat", "sat there", and no other.
    assert task.score(problem, "a cat")["rouge_2"] == pytest.approx(2 * 1 * (1 / 3) / (1 + 1 / 3))
    assert task.score(problem, "nothing at all") == {"rouge_2": 0.0}


def test_categories_of_mt_bench_are_conversation(data):
    _, problems = load_problems(TaskConfig("spec_bench", data["spec_bench"]))
    assert [problem.category for problem in problems] == ["conversation", "conversation", "qa", "summarization"]
    _, first = load_problems(TaskConfig("spec_bench", data["spec_bench"], per_category=1))
    assert [problem.id for problem in first] == ["1", "3", "4"]
    with pytest.raises(ValueError, match=r"task.categories: 'poetry'.*conversation"):
        load_problems(TaskConfig("spec_bench", data["spec_bench"], categories=("poetry",)))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("    return 1\n```\nand so on", "    return 1\n"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("Here:\n```\nx = 1\n```\nDone.\n```\ny = 2\n```", "Here:\n"),
    ],
)
def test_code_of(answer, code):
    assert code_of(answer) == code


def test_sources(tmp_path, data):
    (tmp_path / "a.json").write_text('[{"prompt": "x"}]')
    (tmp_path / "a.csv").write_text("prompt,id\nx,1\n")
    (tmp_path / "a.txt").write_text("x\n\ny\n")
    assert read_data(str(tmp_path / "a.json")) == [{"prompt": "x"}]
    assert read_data(str(tmp_path / "a.csv")) == [{"prompt": "x", "id": "1"}]
    assert read_data(str(tmp_path / "a.txt")) == [{"prompt": "x"}, {"prompt": "y"}]
    assert len(read_data(data["humaneval"])) == 3
    assert read_data("random:2:5") == [{"id": "0", "num_tokens": 5}, {"id": "1", "num_tokens": 5}]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no/such.jsonl", "no/such.jsonl: cannot be read"),
        ("package:no_such_package/x.jsonl", "'no_such_package' is not installed"),
        ("package:bass_jax/no_such.jsonl", "holds no file 'no_such.jsonl'"),
        ("datasets:one", "datasets"),
        ("random:3", "random:rows:tokens"),
        ("README.md", "expected .jsonl, .json, .csv or .txt"),
    ],
)
def test_sources_that_cannot_be_read_are_named(source, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        read_data(source)


def test_broken_lines_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: not JSON"):
        read_data(str(path))
    path.write_text('{"prompt": "x", "id": 1}\n{"prompt": "y", "id": 1}\n')
    with pytest.raises(ValueError, match="the id '1' occurs 2 times"):
        load_problems(TaskConfig("prompts", str(path)))
    with pytest.raises(ValueError, match=r"expected one of .*humaneval"):
        load_problems(TaskConfig("tetris"))


def test_a_task_is_imported_by_its_name(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "A pet?", "word": "cat"}))
    name = "bass_jax.experiments.tasks.template:CONTAINS_WORD"
    task, problems = load_problems(TaskConfig(name, str(path)))
    assert task.score(problems[0], "A Cat.") == {"found": 1.0}


@pytest.mark.skipif(not (DATA / "HumanEval.jsonl.gz").exists(), reason="needs ../shared/data/HumanEval.jsonl.gz")
@pytest.mark.parametrize("num", [16, pytest.param(164, marks=pytest.mark.slow)])
def test_humaneval_passes_its_own_solutions_and_no_wrong_ones(bubblewrap, num):
    """All of its own solutions, and no function that returns None."""
    task, problems = load_problems(TaskConfig("humaneval", str(DATA / "HumanEval.jsonl.gz"), limit=num))
    rows = read_data(str(DATA / "HumanEval.jsonl.gz"))[:num]
    right = [task.program(problem, row["canonical_solution"]) for problem, row in zip(problems, rows, strict=True)]
    assert sum(result.passed for result in run_programs(right)) == len(right) == num
    wrong = [task.program(problem, "    return None\n") for problem in problems]
    assert sum(result.passed for result in run_programs(wrong)) == 0
