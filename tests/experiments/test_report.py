"""Scores, reports, comparisons and sweeps of runs, from the command line."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from bass_jax.cli.main import main
from bass_jax.experiments import analyze, parse_experiment, read_run, run_experiment, score_run
from bass_jax.experiments.pass_at_k import pass_at_k
from bass_jax.experiments.scoring import PermissionNeededError
from bass_jax.experiments.sweep import make_grid, point_name
from tests.experiments.conftest import written


@pytest.fixture
def coded(content, data) -> dict:
    """A configuration whose answers are programs, sampled with three methods."""
    content |= {"task": {"name": "humaneval", "data": data["humaneval"]}, "sampling": {"temperature": 1.0}}
    content |= {"num_samples": 4, "max_new_tokens": 6, "title": "Small <HumanEval> & more"}
    del content["methods"]["synchronized"]
    return content


def planted(path: Path, data: str) -> dict[str, int]:
    """Replaces texts by right and wrong answers; returns how many are right per problem."""
    from bass_jax.experiments.data_sources import read_data

    right = {row["task_id"]: row["canonical_solution"] for row in read_data(data)}
    samples = written(path)
    for sample in samples:
        passes = sample["sample"] <= int(sample["problem"].split("/")[1])
        sample["text"] = right[sample["problem"]] if passes else "    return None\n"
    (path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return {problem: int(problem.split("/")[1]) + 1 for problem in right}


@pytest.mark.slow
def test_code_is_not_run_without_permission(coded, monkeypatch, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(coded))
    monkeypatch.setattr("bass_jax.experiments.scoring.run_programs", lambda *_: pytest.fail("code was run"))
    path = run_experiment(parse_experiment(coded))
    with pytest.raises(PermissionNeededError, match="--allow-code-execution"):
        score_run(path)
    assert len(written(path)) == 3 * 4 * 3


def test_scores_are_those_of_the_planted_answers(coded, bubblewrap, capsys, tmp_path):
    """The report contains them, in one page without links to other files."""
    path = run_experiment(parse_experiment(coded))
    num_right = planted(path, coded["task"]["data"])
    assert score_run(path, allow_code_execution=True) == 36
    # Another call has nothing to do, and needs no permission.
    assert score_run(path) == 36
    result = analyze(read_run(path))
    expected = [pass_at_k(4, num, 1) for num in num_right.values()]
    for found in result.variants.values():
        assert found.scores["pass@1"].value == pytest.approx(sum(expected) / 3)
        assert found.scores["pass@all"].value == 1.0
        assert found.num_problems == 3 and found.num_samples == 12
    assert {"num_tokens", "mean_logprob", "passed"} == result.same_distribution["batched"].keys()
    # Every method has the same planted answers.
    assert result.same_distribution["batched"]["passed"].p_value == 1.0

    output = tmp_path / "reports" / "small"
    assert main(["report", str(path), "--output", str(output)]) == 0
    assert capsys.readouterr().out.split() == [f"{output}.html", f"{output}.md"]
    page, text = output.with_suffix(".html").read_text(), output.with_suffix(".md").read_text()
    check_page(page)
    assert "Small &lt;HumanEval&gt; &amp; more" in page and "Solved within a time budget" in page
    for word in ("PTL first, ms", "speed-up", "pass@first", "verified positions", "| regular | 4 |"):
        assert word in text, word
    figures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(figures) == 4 and all((output.parent / figure).read_text().startswith("<svg") for figure in figures)
    # The command under every figure.
    assert text.count(f"bass-jax report {path} --output {output}") >= len(figures)


@pytest.mark.slow
def test_distributions_are_not_compared_under_a_time_budget(coded):
    """Long answers are missing there, so a test would measure speed and not the distribution."""
    coded |= {
        "task": coded["task"] | {"limit": 1},
        "methods": {name: coded["methods"][name] for name in ("regular", "batched")},
    }
    without = analyze(read_run(run_experiment(parse_experiment(coded))))
    assert without.same_distribution.keys() == {"batched"}
    coded |= {"budget": 1e9, "output_dir": coded["output_dir"] + "-2"}
    assert not analyze(read_run(run_experiment(parse_experiment(coded)))).same_distribution


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.links, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]


def check_page(page: str) -> None:
    """The page refers to no other file, and its figures have different ids."""
    parser = _Page()
    parser.feed(page)
    assert all(link.startswith("#") for link in parser.links)
    assert len(parser.ids) == len(set(parser.ids))
    assert {link[1:] for link in parser.links} <= set(parser.ids)
    assert "<script" not in page and "@import" not in page


@pytest.mark.slow
def test_the_command_line_from_run_to_comparison(content, tmp_path, capsys, monkeypatch):
    """The greedy samples of all methods and of both runs are equal."""
    monkeypatch.setenv("COLUMNS", "200")  # Long numbers would wrap the table.
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    first, second = content["output_dir"], content["output_dir"] + "-2"
    assert main(["run", str(config), "num_samples=1", "methods.single.num_samples=1"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"{first}\n")
    assert printed.count("4 of 4 greedy samples equal those of regular decoding") == 3
    arguments = [
        "num_samples=1",
        "methods.single.num_samples=1",
        "methods.batched.draft_len=1",
        "--quiet",
        f"output_dir={second}",
    ]
    assert main(["run", str(config), *arguments]) == 0
    assert capsys.readouterr().out == f"{second}\n"
    session = json.loads((Path(second) / "run.json").read_text())["sessions"][0]
    assert session["command"] == ["bass-jax", "run", str(config), *arguments]
    assert main(["compare", first, second]) == 0
    printed = capsys.readouterr().out
    assert "methods.batched.draft_len" in printed and printed.count("4 of 4") == 4
    assert main(["compare", first, second, "--json"]) == 0
    configurations, variants = json.loads(capsys.readouterr().out)["tables"]
    assert configurations["rows"] == [{"key": "methods.batched.draft_len", first: 2, second: 1}]
    assert [row["identical samples"] for row in variants["rows"]] == [[4, 4]] * 4
    # A finished run is not decoded again, and gets no further session.
    assert main(["run", str(config), *arguments]) == 0
    assert len(json.loads((Path(second) / "run.json").read_text())["sessions"]) == 1


def test_a_sweep_runs_every_point_once(content, tmp_path, capsys):
    content |= {"num_samples": 1, "methods": {"batched": {"batch": 4, "draft_len": 2}}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    command = ["sweep", str(config), "--grid", "methods.batched.draft_len=5,6", "--grid", "seeds=[[0], [1]]", "--quiet"]
    assert main(command) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert len(set(paths)) == 4
    configs = [read_run(path).config for path in paths]
    assert [(one.methods["batched"].draft_len, one.seeds) for one in configs] == [
        (5, (0,)),
        (5, (1,)),
        (6, (0,)),
        (6, (1,)),
    ]
    before = [(path / "run.json").read_bytes() for path in paths]
    assert main(command) == 0
    assert [(path / "run.json").read_bytes() for path in paths] == before
    assert main(["report", *map(str, paths), "--output", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all.html").read_text().count("<h2>") == 4


def test_points_have_different_names(content, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    points = make_grid(config, {"methods.single.draft_len": [1, 2], "methods.batched.draft_len": [1, 2]})
    assert len({point.config.output_dir for point in points}) == 4
    assert len(point_name({"task.data": "x" * 500})) < 100
    with pytest.raises(ValueError, match="draft_len=99"):
        make_grid(config, {"methods.single.draft_len": [1, 99]})


@pytest.mark.slow
def test_a_sweep_through_ray_is_the_same_sweep(content, tmp_path, capsys):
    pytest.importorskip("ray", reason="needs ray (the extra sweep)")
    content |= {"num_samples": 1, "methods": {"batched": {"batch": 4, "draft_len": 2}}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    command = ["sweep", str(config), "--grid", "methods.batched.draft_len=1,2", "--quiet"]
    # In a process of its own, because Ray forks, which JAX warns about.
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
    call = [sys.executable, "-m", "bass_jax.cli.main", *command, "--ray"]
    printed = subprocess.run(call, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    through_ray = [written(path) for path in printed.split()[-2:]]
    assert main([*command, f"output_dir={tmp_path / 'here'}"]) == 0
    here = [written(path) for path in capsys.readouterr().out.split()]
    assert [[row["tokens"] for row in rows] for rows in through_ray] == [
        [row["tokens"] for row in rows] for rows in here
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "no/such.yaml"), "no/such.yaml"),
        (("run", "CONFIG", "task.name"), "'task.name': expected PATH=VALUE"),
        (("run", "CONFIG", "task.nam=x"), "task.nam: unknown key; did you mean 'name'?"),
        (("run", "CONFIG", "methods.batched.drft_len=1"), "drft_len: unknown key; did you mean 'draft_len'?"),
        (("run", "CONFIG", "task.name=tetris"), "task='tetris'"),
        (("run", "CONFIG", "methods.batched.draft_len=99"), "draft_len=99"),
        (("run", "CONFIG", "methods.batched.policy=guess"), "guess"),
        (("run", "CONFIG", "methods.batched.batch=3"), "expected one to be a multiple of the other"),
        (("run", "CONFIG", "baseline=other"), "baseline='other'"),
        (("run", "CONFIG", "pair.target=opt-125m"), "not both"),
        (("sweep", "CONFIG", "--grid", "seeds"), "expected PATH=VALUE,VALUE"),
        (("report", "no/such/run"), "no/such/run: no run directory"),
        (("compare", "no/such/run", "no/such/run"), "no/such/run"),
    ],
)
def test_mistakes_are_one_line(content, tmp_path, capsys, arguments, words):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    assert main([str(config) if word == "CONFIG" else word for word in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_the_report_opens_with_a_summary(content, tmp_path):
    """One row per variant: the speed-up with its range, acceptance, and whether the output is exact."""
    path = run_experiment(parse_experiment(content))
    assert main(["report", str(path), "--output", str(tmp_path / "whole")]) == 0
    summary, _, rest = (tmp_path / "whole.md").read_text().partition("### Conditions")
    assert summary.startswith("# run\n\n## Summary\n") and len(summary.splitlines()) < 24 and "PTL first" in rest
    rows = {line.split(" | ")[0].strip("| "): line for line in summary.splitlines() if line.startswith("| ")}
    assert rows.keys() >= {"regular", "single", "batched", "synchronized"}
    assert "regular decoding" in rows["regular"] and "identical in all 16" in rows["batched"]
    assert re.search(r"\| \d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\) \|", rows["batched"])
    assert "INCOMPLETE" not in summary


def test_the_report_of_an_interrupted_run_says_so(content, tmp_path, capsys):
    """Only the first batch is kept, as after a kill."""
    path = run_experiment(parse_experiment(content))
    batches = (path / "batches.jsonl").read_text().splitlines(keepends=True)
    (path / "batches.jsonl").write_text(batches[0])
    assert main(["report", str(path), "--output", str(tmp_path / "part")]) == 0
    missing = "Missing: regular (1 of 4), single (0 of 16), batched (0 of 4), synchronized (0 of 4)."
    expected = f"INCOMPLETE: 1 of 28 batches. {missing}"
    text = (tmp_path / "part.md").read_text()
    assert f"## Summary\n\n**{expected}**" in text and "nothing decoded" in text
    assert f"<strong>{expected}</strong>" in (tmp_path / "part.html").read_text()
