"""The report of one or more runs: tables and figures, each with the command that makes it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bass_jax.experiments import figures
from bass_jax.experiments.pass_at_k import pass_all, pass_first, share_ended
from bass_jax.experiments.results import RunResult, analyse
from bass_jax.experiments.run_directory import CONFIG, RunRecords, read_run
from bass_jax.experiments.tasks import find_task
from bass_jax.runtime.statistics import Spread
from bass_jax.runtime.yaml_config import as_plain


class Section(NamedTuple):
    """A part of a report; either a table or a figure."""

    title: str
    text: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    figure: str = ""  # SVG
    name: str = ""  # of the figure's file
    command: str = ""


class Report(NamedTuple):
    """What `bass_jax.experiments.render` writes."""

    title: str
    runs: tuple[tuple[Section, ...], ...]  # sections of each run


def make_report(directories: Sequence[str | Path], output: str | Path, title: str = "") -> Report:
    """Reads runs and puts their tables and figures together.

    Args:
        directories: of the runs.
        output: where the report will be written, for the command under each figure.
        title: default that of the first run.

    Raises:
        ValueError: if a directory is no run, or matplotlib is missing.
    """
    runs = [read_run(directory) for directory in directories]
    report_command = shlex.join(["bass-jax", "report", *(str(one) for one in directories), "--output", str(output)])
    sections = []
    for run in runs:
        result = analyse(run)
        if not result.variants:
            raise ValueError(f"{run.path}: no batch has taken a step inside the budget")
        sections.append(tuple(_sections(result, f"{_run_command(run)}\n{report_command}")))
    title = title or runs[0].config.title or runs[0].path.name
    if len(runs) == 1:
        sections = [(sections[0][0]._replace(title="Conditions"), *sections[0][1:])]
    return Report(title, tuple(sections))


def _sections(result: RunResult, command: str) -> list[Section]:
    run, variants = result.run, result.variants
    many = any(len(method.batches) > 1 for method in run.config.methods.values())
    rounds = max(one.num_rounds for one in variants.values())
    spread = (
        f"Medians over {rounds} rounds (seeds and repeats), with the smallest and the largest in brackets."
        if rounds > 1
        else "One round; in brackets the 95 % bootstrap interval over problems."
    )
    sections = [_conditions(run), _latency(result, spread, command)]
    if many:
        sections.append(Section("Latency and throughput against the batch size", spread, name="batch",
                                figure=figures.draw_against_batch(result), command=command))  # fmt: skip
    sections.append(_throughput_table(result, spread, command))
    if any(one.acceptance_by_position for one in variants.values()):
        sections.append(Section("Acceptance by position", "", figure=figures.draw_acceptance(result),
                                name="acceptance", command=command))  # fmt: skip
    sections.append(_use_table(result, command))
    if any(one.scores for one in variants.values()):
        sections.append(_score_table(result, spread, command))
    if any(one.answers for one in variants.values()) and find_task(run.config.task.name).measure == "passed":
        sections += _budget(result, command)
    if categories := list(dict.fromkeys(name for one in variants.values() for name in one.categories)):
        sections.append(_category_table(result, categories, spread, command))
    if result.num_identical or result.same_distribution:
        sections.append(_exactness_table(result, command))
    return sections


def _conditions(run: RunRecords) -> Section:
    config, session = run.config, run.sessions[-1] if run.sessions else {}
    versions = ", ".join(f"{name} {version}" for name, version in session.get("versions", {}).items() if version)
    git = session.get("git")
    commit = "–" if git is None else git["commit"][:12] + (", with changes" if git["has_changes"] else "")
    pair = config.pair
    what = pair.path or f"{pair.target}, random weights"
    sampling = ", ".join(f"{name} {value:g}" for name, value in as_plain(config.sampling).items())
    peak = session.get("peak_flops")
    facts = {
        "pair": what + (f", draft {pair.draft}" if pair.draft else "") + f", {pair.dtype or 'dtype as stored'}",
        "task": f"{config.task.name}, {len({sample['problem'] for sample in run.samples})} problems",
        "samples per problem": str(config.num_samples),
        "new tokens, at most": str(config.max_new_tokens),
        "sampling": sampling,
        "seeds, repeats": f"{', '.join(map(str, config.seeds))}; {config.repeats}",
        "time budget": "none" if config.budget is None else f"{config.budget:g} s per problem",
        "device": f"{session.get('num_devices', '?')} x {session.get('device', '?')}; {session.get('processor', '')}, "
        f"{session.get('num_cores', '?')} cores",
        "peak": "–" if peak is None else f"{peak / 1e12:.3g} TFLOP/s, {session['peak_is']}",
        "versions": versions,
        "commit": commit,
        "date": " to ".join(dict.fromkeys(one["date"] for one in (run.sessions[:1] + run.sessions[-1:]))),
    }
    if any(method.acceptance.startswith("synthetic") for method in config.methods.values()):
        facts["acceptance"] = "synthetic, that is forced: speeds are real, texts mean nothing"
    return Section(
        config.title or run.path.name,
        f"The configuration is in {run.path / CONFIG}. No time includes compilation; time budgets include prefill.",
        ("", ""), tuple(facts.items()),
    )  # fmt: skip


def _latency(result: RunResult, spread: str, command: str) -> Section:
    header = ("", "batch", "PTL first, ms", "PTL last, ms", "PTL all, ms", "speed-up")
    rows = tuple(
        (label, str(found.variant.batch),
         *(_figure(found.measures.get(name), ".1f", 1e3) for name in ("ptl_first", "ptl_last", "ptl_all")),
         _figure(found.measures.get("speed_up"), ".2f"))
        for label, found in result.variants.items()
    )  # fmt: skip
    baselines = {result.run.config.baseline_of(one.variant) for one in result.variants.values()} - {None}
    over = f" Speed-ups are ratios of PTL all over {_listed(sorted(map(str, baselines)))}." if baselines else ""
    text = (
        "A row's decoding time over its tokens: of the row of a batch that ends first, of the one that ends last, and "
        f"the mean over its rows; means over batches. {spread}{over}"
    )
    return Section("Per-token latency", text, header, rows, figures.draw_latency(result), "latency", command)


def _throughput_table(result: RunResult, spread: str, command: str) -> Section:
    header = ("", "batch", "tokens/s", "over regular decoding", "tokens per target pass", "acceptance, %")
    rows = tuple(
        (label, str(found.variant.batch), _figure(found.measures.get("tokens_per_second"), ".0f"),
         _figure(found.measures.get("throughput_ratio"), ".2f"), _figure(found.measures.get("block_efficiency"), ".2f"),
         _figure(found.measures.get("acceptance"), ".1f", 100.0))
        for label, found in result.variants.items()
    )  # fmt: skip
    text = (
        f"Tokens of all rows over decoding time: a batch whose rows end at different times is not always full. {spread}"
    )
    return Section("Throughput and acceptance", text, header, rows, command=command)


def _use_table(result: RunResult, command: str) -> Section:
    header = ("share of the peak, %", "emitted tokens", "verified positions", "verified and drafted")
    rows = tuple(
        (label, *(_figure(found.measures[name], ".2f", 100.0) for name in ("useful", "verified", "verified_and_draft")))
        for label, found in result.variants.items()
    )
    text = (
        "FLOPs of the models' products over the device's peak while decoding, in three accountings: the target's work "
        "on tokens that were emitted, on all positions that it verified, and the draft's work too."
    )
    return Section("Utilization", text, header, rows, figures.plot_utilization(result), "utilisation", command)


def _score_table(result: RunResult, spread: str, command: str) -> Section:
    names = list(dict.fromkeys(name for one in result.variants.values() for name in one.scores))
    rows = tuple(
        (label, str(found.num_problems), str(found.num_samples),
         *(_figure(found.scores.get(name), ".1f", 100.0) for name in names))
        for label, found in result.variants.items()
    )  # fmt: skip
    text = (
        f"In per cent. {spread} Pass@First is the answer with the largest mean log-probability, Pass@All any of them."
    )
    return Section("Scores", text, ("", "problems", "samples", *names), rows, command=command)


def _budget(result: RunResult, command: str) -> list[Section]:
    shown = {label: found for label, found in result.variants.items() if found.answers}
    ends = sorted(
        row.seconds for found in shown.values() for answers in found.answers.values() for rows in answers.values()
        for row in rows if row.is_finished
    )  # fmt: skip
    if not ends:
        return []
    budgets = [ends[round(share * (len(ends) - 1))] for share in (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)]
    header = ("", *(f"{budget:.2f} s" for budget in budgets))
    rows = []
    for label, found in shown.items():
        cells = []
        for budget in budgets:
            first, every, share = (
                100 * sum(of(answers, budget) for answers in found.answers.values()) / len(found.answers)
                for of in (pass_first, pass_all, share_ended)
            )
            cells.append(f"{first:.1f} / {every:.1f} ({share:.0f})")
        rows.append((label, *cells))
    text = (
        "Problems solved by answers that ended inside a time budget per problem, prefill included. All samples of a "
        "problem are due inside the budget: a batch decodes them together, a single sequence one after another."
    )
    return [
        Section(
            "Solved inside a time budget", text, figure=figures.draw_budget(result), name="budget", command=command
        ),
        Section(
            "The same in figures",
            "Pass@First / Pass@All in per cent, and in brackets the share of the samples that had ended.",
            header, tuple(rows), command=command,
        ),
    ]  # fmt: skip


def _category_table(result: RunResult, categories: Sequence[str], spread: str, command: str) -> Section:
    rows = tuple(
        (label, *(
            " ; ".join((
                _figure(found.categories.get(name, {}).get("speed_up"), ".2f"),
                _figure(found.categories.get(name, {}).get("block_efficiency"), ".2f"),
            )) for name in categories
        ))
        for label, found in result.variants.items()
    )  # fmt: skip
    text = f"Speed-up (PTL all); tokens per target pass. {spread}"
    return Section("By category", text, ("", *categories), rows, command=command)


def _exactness_table(result: RunResult, command: str) -> Section:
    if result.num_identical:
        rows = tuple((label, f"{num} of {total}") for label, (num, total) in result.num_identical.items())
        text = "Temperature 0: samples that are token for token those of regular decoding."
        return Section("Exactness", text, ("", "identical samples"), rows, command=command)
    rows = tuple(
        (label, name, " + ".join(map(str, test.num_samples)), *(f"{mean:.4g}" for mean in test.means),
         f"{test.p_value:.3g}")
        for label, tests in result.same_distribution.items()
        for name, test in tests.items()
    )  # fmt: skip
    text = (
        "Do the samples have regular decoding's distribution? Permutation tests within problems, two-sided; a small p says no. "
        "With several tests, one in twenty falls below 0.05 by chance."
    )
    header = ("", "of", "samples", "mean", "regular decoding's mean", "p")
    return Section("Exactness", text, header, rows, command=command)


def _run_command(run: RunRecords) -> str:
    """The command that the run was started with; one that only resumed it is the same."""
    if not run.sessions:
        return f"bass-jax run {run.path / CONFIG}"
    program, *arguments = run.sessions[0]["command"]
    return shlex.join([Path(program).name if "bass-jax" in program else program, *arguments])


def _figure(spread: Spread | None, spec: str, scale: float = 1.0) -> str:
    if spread is None:
        return "–"
    return f"{Spread(scale * spread.value, scale * spread.low, scale * spread.high):{spec}}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
