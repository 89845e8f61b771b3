"""The report of one or more runs: tables and figures, each with the command that makes it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bass_jax.acceptance import find_rule
from bass_jax.experiments import figures
from bass_jax.experiments.pass_at_k import pass_all, pass_first, share_ended
from bass_jax.experiments.results import LATENCY, THROUGHPUT, UTILIZATION, Column, RunResult, analyze
from bass_jax.experiments.run_directory import CONFIG, RunRecords, read_run
from bass_jax.experiments.tasks import find_task
from bass_jax.runtime.statistics import Spread
from bass_jax.runtime.yaml_config import as_plain


class Section(NamedTuple):
    """A part of a report, with a table, a figure, or both."""

    title: str
    text: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    figure: str = ""  # SVG
    name: str = ""  # of the figure's file
    command: str = ""
    warning: str = ""  # precedes the text


class Report(NamedTuple):
    """The content of a report; `bass_jax.experiments.render` writes it."""

    title: str
    runs: tuple[tuple[Section, ...], ...]  # the sections of each run


def make_report(directories: Sequence[str | Path], output: str | Path, title: str = "") -> Report:
    """Reads runs and makes their tables and figures; `output` is shown in the commands.

    Raises:
        ValueError: if a directory is not a run directory, or matplotlib is not installed.
    """
    runs = [read_run(directory) for directory in directories]
    report_command = shlex.join(["bass-jax", "report", *map(str, directories), "--output", str(output)])
    sections = []
    for run in runs:
        result = analyze(run)
        if not result.variants:
            raise ValueError(f"{run.path}: no batch has run a step within the time budget")
        command = f"{_run_command(run)}\n{report_command}"
        title_of_run = "Summary" if len(runs) == 1 else run.config.title or run.path.name
        parts = [part._replace(command=command) for part in _result_sections(result)]
        sections.append((_summary(result)._replace(title=title_of_run), _conditions(run), *parts))
    return Report(title or runs[0].config.title or runs[0].path.name, tuple(sections))


def _result_sections(result: RunResult) -> list[Section]:
    run, variants = result.run, list(result.variants.values())
    spread = _spread_text(result)
    sections = [_latency(result, spread)]
    if any(len(method.batches) > 1 for method in run.config.methods.values()):
        figure = figures.draw_against_batch(result)
        sections.append(Section("Latency and throughput against batch size", spread, figure=figure, name="batch"))
    text = "Tokens of all rows over the decoding time. Rows that have finished leave the batch partly empty."
    sections.append(Section("Throughput and acceptance", f"{text} {spread}", *_measures(result, THROUGHPUT)))
    if any(one.acceptance_by_position for one in variants):
        figure = figures.draw_acceptance(result)
        sections.append(Section("Acceptance by position", "", figure=figure, name="acceptance"))
    text = (
        "FLOP/s of the models' matrix products while decoding, relative to the device's peak. They count the target's "
        "work on emitted tokens, on all positions that it verified, and in the last column the draft's work too."
    )
    figure = figures.draw_bars(result, UTILIZATION, "share of the device's peak FLOP/s, %")
    sections.append(Section("Utilization", text, *_measures(result, UTILIZATION), figure, "utilization"))
    if any(one.scores for one in variants):
        sections.append(_scores(result, spread))
    if any(one.answers for one in variants) and find_task(run.config.task.name).measure == "passed":
        sections += _budget(result)
    if any(one.categories for one in variants):
        sections.append(_categories(result, spread))
    if result.num_identical or result.same_distribution:
        sections.append(_exactness(result))
    return sections


def _spread_text(result: RunResult) -> str:
    rounds = max(one.num_rounds for one in result.variants.values())
    if rounds == 1:
        return "One round; the 95 % bootstrap interval over problems is in brackets."
    return f"Medians over {rounds} rounds (seeds and repeats), with the smallest and the largest value in brackets."


def _measures(result: RunResult, columns: Sequence[Column]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns header and rows of a table of measures, one row per variant."""
    rows = tuple(
        (
            label,
            str(one.variant.batch),
            *(_cell(one.measures.get(name), spec, scale) for _, name, spec, scale in columns),
        )
        for label, one in result.variants.items()
    )
    return ("", "batch", *(column.title for column in columns)), rows


def _cell(spread: Spread | None, spec: str, scale: float = 1.0) -> str:
    return "–" if spread is None else f"{spread.scaled(scale):{spec}}"


def _summary(result: RunResult) -> Section:
    """Returns what a reader wants to know first: what ran, whether all of it did, how fast, and whether it is exact."""
    run, config = result.run, result.run.config
    progress = run.progress()
    num_done, num_planned = (sum(counts) for counts in zip(*progress.values(), strict=True))
    missing = [f"{label} ({done} of {planned})" for label, (done, planned) in progress.items() if done < planned]
    warning = f"INCOMPLETE: {num_done} of {num_planned} batches. Missing: {', '.join(missing)}." if missing else ""
    session = run.sessions[-1] if run.sessions else {}
    num = len({sample["problem"] for sample in run.samples})
    text = (
        f"{config.pair.path or config.pair.target} on {config.task.name}: {num} problem{'s' * (num > 1)}, "
        f"temperature {config.sampling.temperature:g}, at most {config.max_new_tokens} new tokens, "
        f"{session.get('num_devices', '?')} x {session.get('device', '?')}. The speed-up is the ratio of the mean "
        f"per-token latencies. {_spread_text(result)}"
    )
    header = ("", "batch", "speed-up", "tokens/s", "acceptance, %", "tokens per target pass", "output")
    rows = []
    for label, (done, _) in progress.items():
        one = result.variants.get(label)
        if one is None:
            rows.append((label, *("–",) * 5, "nothing decoded" if done == 0 else "no step within the budget"))
            continue
        measures = one.measures
        cells = (
            _cell(measures.get("speed_up"), ".2f"),
            _value(measures.get("tokens_per_second"), ".0f"),
            _value(measures.get("acceptance"), ".1f", 100.0),
            _value(measures.get("tokens_per_pass"), ".2f"),
        )
        rows.append((label, str(one.variant.batch), *cells, _output_of(result, label)))
    return Section("Summary", text, header, tuple(rows), warning=warning)


def _value(spread: Spread | None, spec: str, scale: float = 1.0) -> str:
    return "–" if spread is None else f"{scale * spread.value:{spec}}"


def _output_of(result: RunResult, label: str) -> str:
    """Returns whether the output of a variant is that of regular decoding."""
    method = result.variants[label].variant.method
    if method.step == "decode" and method.quantize is None:
        return "regular decoding"
    if not find_rule(method.acceptance).lossless or method.quantize is not None:
        return "not exact, by design"
    if label in result.num_identical:
        num, total = result.num_identical[label]
        return f"identical in all {total}" if num == total else f"identical in {num} of {total}"
    if label in result.same_distribution:
        lowest = min(test.p_value for test in result.same_distribution[label].values())
        return f"same distribution, p ≥ {lowest:.2g}" if lowest >= 0.05 else f"lowest p-value {lowest:.2g}"
    return "not compared"


def _conditions(run: RunRecords) -> Section:
    config, session = run.config, run.sessions[-1] if run.sessions else {}
    pair, git, peak = config.pair, session.get("git"), session.get("peak_flops")
    facts = {
        "pair": (pair.path or f"{pair.target}, random weights")
        + (f", draft {pair.draft}" if pair.draft else "")
        + f", {pair.dtype or 'dtype as stored'}",
        "task": f"{config.task.name}, {len({sample['problem'] for sample in run.samples})} problems",
        "samples per problem": str(config.num_samples),
        "new tokens, at most": str(config.max_new_tokens),
        "sampling": ", ".join(f"{name} {value:g}" for name, value in as_plain(config.sampling).items()),
        "seeds, repeats": f"{', '.join(map(str, config.seeds))}; {config.repeats}",
        "time budget": "none" if config.budget is None else f"{config.budget:g} s per problem",
        "device": f"{session.get('num_devices', '?')} x {session.get('device', '?')}; {session.get('processor', '')}, "
        f"{session.get('num_cores', '?')} cores",
        "peak": "–" if peak is None else f"{peak / 1e12:.3g} TFLOP/s, {session['peak_is']}",
        "versions": ", ".join(f"{name} {version}" for name, version in session.get("versions", {}).items()),
        "commit": "–" if git is None else git["commit"][:12] + (", with changes" if git["has_changes"] else ""),
        "date": " to ".join(dict.fromkeys(one["date"] for one in (run.sessions[:1] + run.sessions[-1:]))),
    }
    if any(method.acceptance.startswith("synthetic") for method in config.methods.values()):
        facts["acceptance"] = "synthetic: acceptance is forced, so speeds are real and texts have no meaning"
    text = f"The configuration is in {run.path / CONFIG}. No time includes compilation; time budgets include prefill."
    return Section("Conditions", text, ("", ""), tuple(facts.items()))


def _latency(result: RunResult, spread: str) -> Section:
    config = result.run.config
    baselines = sorted({name for one in result.variants.values() if (name := config.baseline_of(one.variant))})
    relative = f" Speed-ups are ratios of PTL all, relative to {', '.join(baselines)}." if baselines else ""
    text = (
        "Per-token latency (PTL) is a row's decoding time over its tokens. PTL first and PTL last are those of the row "
        "of a batch that ends first and last, and PTL all is the mean over its rows. The table has means over batches. "
        f"{spread}{relative}"
    )
    header, rows = _measures(result, LATENCY)
    return Section(
        "Per-token latency",
        text,
        header,
        rows,
        figures.draw_bars(result, LATENCY[:3], "per-token latency, ms"),
        "latency",
    )


def _scores(result: RunResult, spread: str) -> Section:
    names = list(dict.fromkeys(name for one in result.variants.values() for name in one.scores))
    rows = tuple(
        (
            label,
            str(one.num_problems),
            str(one.num_samples),
            *(_cell(one.scores.get(n), ".1f", 100.0) for n in names),
        )
        for label, one in result.variants.items()
    )
    text = (
        f"In per cent. {spread} Pass@First scores the answer with the highest mean log-probability, Pass@All the best."
    )
    return Section("Scores", text, ("", "problems", "samples", *names), rows)


def _budget(result: RunResult) -> list[Section]:
    shown = {label: found.answers for label, found in result.variants.items() if found.answers}
    ends = sorted(
        answer.seconds
        for rounds in shown.values()
        for problems in rounds.values()
        for answers in problems.values()
        for answer in answers
        if answer.is_finished
    )
    if not ends:
        return []
    budgets = [ends[round(share * (len(ends) - 1))] for share in (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)]

    def cell(rounds, budget: float) -> str:
        first, best, ended = (
            100 * sum(of(answers, budget) for answers in rounds.values()) / len(rounds)
            for of in (pass_first, pass_all, share_ended)
        )
        return f"{first:.1f} / {best:.1f} ({ended:.0f})"

    rows = tuple((label, *(cell(rounds, budget) for budget in budgets)) for label, rounds in shown.items())
    text = (
        "Problems solved by answers that ended within a time budget per problem, prefill included: Pass@First / "
        "Pass@All in per cent, and in brackets the share of the samples that had ended. All samples of a problem share "
        "the budget: a batch decodes them together, a single sequence one after another."
    )
    header = ("", *(f"{budget:.2f} s" for budget in budgets))
    return [Section("Solved within a time budget", text, header, rows, figures.draw_budget(result), "budget")]


def _categories(result: RunResult, spread: str) -> Section:
    names = list(dict.fromkeys(name for one in result.variants.values() for name in one.categories))

    def cell(measures: dict[str, Spread]) -> str:
        return f"{_cell(measures.get('speed_up'), '.2f')} ; {_cell(measures.get('tokens_per_pass'), '.2f')}"

    rows = tuple(
        (label, *(cell(one.categories.get(name, {})) for name in names)) for label, one in result.variants.items()
    )
    return Section("By category", f"Speed-up (PTL all); tokens per target pass. {spread}", ("", *names), rows)


def _exactness(result: RunResult) -> Section:
    if result.num_identical:
        rows = tuple((label, f"{num} of {total}") for label, (num, total) in result.num_identical.items())
        text = "Temperature 0: samples whose tokens equal those of regular decoding."
        return Section("Exactness", text, ("", "identical samples"), rows)
    rows = tuple(
        (label, name, " + ".join(map(str, test.num_samples)), *(f"{x:.4g}" for x in test.means), f"{test.p_value:.3g}")
        for label, tests in result.same_distribution.items()
        for name, test in tests.items()
    )
    text = (
        "Two-sided permutation tests within problems. A small p-value means that the distribution differs from regular "
        "decoding's. One test in twenty falls below 0.05 by chance."
    )
    return Section("Exactness", text, ("", "of", "samples", "mean", "mean of regular decoding", "p-value"), rows)


def _run_command(run: RunRecords) -> str:
    """Returns the command that started the run."""
    if not run.sessions:
        return f"bass-jax run {run.path / CONFIG}"
    program, *arguments = run.sessions[0]["command"]
    return shlex.join([Path(program).name if "bass-jax" in program else program, *arguments])
