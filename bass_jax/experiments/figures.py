"""The figures of a report, as SVG; needs matplotlib."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bass_jax.experiments.draft_outcomes import DraftOutcomes
from bass_jax.experiments.pass_at_k import budget_grid, pass_all, pass_first, share_ended
from bass_jax.experiments.results import RunResult, VariantResult
from bass_jax.runtime.statistics import Spread

_SETTINGS: Any = {
    "svg.hashsalt": "bass_jax",  # the same figure is the same file
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_LINES = ("-", "--", "-.", ":")
_NUM_COLORS = 10


def draw_budget(result: RunResult) -> str:
    """Pass@First, Pass@All and the samples that have ended against the time budget; bands are the range of rounds."""
    shown = {label: found for label, found in result.variants.items() if found.answers}
    budgets = budget_grid(answers for found in shown.values() for answers in found.answers.values())
    panels = {"Pass@First": pass_first, "Pass@All": pass_all, "samples that have ended": share_ended}

    def draw(figure: Any) -> None:
        panes = figure.subplots(1, len(panels))
        for axes, (title, of) in zip(panes, panels.items(), strict=True):
            for index, (label, found) in enumerate(shown.items()):
                curves = np.array(
                    [[100 * of(answers, budget) for budget in budgets] for answers in found.answers.values()]
                )
                style = {"color": f"C{index % _NUM_COLORS}"}
                line, middle = _LINES[index % len(_LINES)], np.median(curves, axis=0)
                axes.plot(budgets, middle, line, label=label, drawstyle="steps-post", **style)
                if len(curves) > 1:
                    axes.fill_between(budgets, curves.min(0), curves.max(0), step="post", alpha=0.15, **style)
            axes.set(title=title, xlabel="time budget per problem, s", xlim=(0, budgets[-1]))
        highest = max(1.0, *(axes.dataLim.y1 for axes in panes[:2]))
        for axes in panes[:2]:
            axes.set(ylim=(0, 1.05 * highest))
        panes[0].set(ylabel="problems solved, %")
        panes[2].set(ylabel="of all samples, %", ylim=(0, 105))
        _legend(figure)

    return _svg(draw, (11.0, 4.0))


def draw_against_batch(result: RunResult) -> str:
    """PTL and throughput against the batch size, a line per method; bars are spreads."""
    methods: dict[str, list[VariantResult]] = {}
    for found in result.variants.values():
        methods.setdefault(found.variant.name, []).append(found)

    def draw(figure: Any) -> None:
        latency, throughput = figure.subplots(1, 2)
        for index, (name, found) in enumerate(methods.items()):
            batches = [one.variant.batch for one in found]
            style = {"fmt": f"{_LINES[index % len(_LINES)]}o", "color": f"C{index % _NUM_COLORS}", "markersize": 4}
            for axes, measure, scale in ((latency, "ptl_all", 1e3), (throughput, "tokens_per_second", 1.0)):
                spreads = [one.measures[measure] for one in found]
                axes.errorbar(
                    batches, [scale * one.value for one in spreads], _bars(spreads, scale), label=name, **style
                )
        latency.set(xlabel="batch, rows", ylabel="per-token latency (PTL all), ms", ylim=(0, None))
        throughput.set(xlabel="batch, rows", ylabel="tokens/s, all rows", ylim=(0, None))
        ticks = sorted({one.variant.batch for one in result.variants.values()})
        for axes in (latency, throughput):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
        _legend(figure)

    return _svg(draw, (9.0, 4.0))


def draw_latency(result: RunResult) -> str:
    """PTL first, last and all of every way, as bars; whiskers are spreads."""
    return _draw_bars(
        result, {"ptl_first": "first", "ptl_last": "last", "ptl_all": "all"}, 1e3, "per-token latency, ms"
    )  # fmt: skip


def plot_utilization(result: RunResult) -> str:
    """The three utilizations of every way, as bars."""
    names = {"useful": "emitted tokens", "verified": "verified positions", "verified_and_draft": "and the draft's"}
    return _draw_bars(result, names, 100.0, "share of the device's peak FLOP/s, %")


def draw_acceptance(result: RunResult) -> str:
    """Acceptance by position, given that the drafts before it were accepted."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, (label, found) in enumerate(result.variants.items()):
            rates = found.acceptance_by_position
            if rates:
                line = f"{_LINES[index % len(_LINES)]}o"
                positions = range(1, len(rates) + 1)
                axes.plot(positions, [100 * rate for rate in rates], line, color=f"C{index % _NUM_COLORS}",
                          markersize=4, label=label)  # fmt: skip
        axes.set(xlabel="position of the draft in its step", ylabel="accepted, given those before it, %", ylim=(0, 102))
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(figure)

    return _svg(draw, (7.0, 4.0))


def _draw_bars(result: RunResult, names: dict[str, str], scale: float, label: str) -> str:
    variants = list(result.variants.values())

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        height = 0.8 / len(names)
        for index, (name, title) in enumerate(names.items()):
            spreads = [found.measures[name] for found in variants]
            places = np.arange(len(variants)) + (index - (len(names) - 1) / 2) * height
            axes.barh(places, [scale * one.value for one in spreads], height, xerr=_bars(spreads, scale),
                      label=title, error_kw={"lw": 0.8})  # fmt: skip
        axes.set_yticks(range(len(variants)), [found.variant.label for found in variants])
        axes.invert_yaxis()
        axes.set(xlabel=label, xlim=(0, None))
        axes.grid(visible=False, axis="y")
        _legend(figure)

    return _svg(draw, (8.0, 1.4 + 0.55 * len(variants)))


def _bars(spreads: list[Spread], scale: float) -> np.ndarray:
    """Whiskers, ``[2, n]``; a median may lie outside what a bootstrap drew, a whisker's length may not be negative."""
    lengths = [[one.value - one.low for one in spreads], [one.high - one.value for one in spreads]]
    return scale * np.maximum(lengths, 0.0)


def _legend(figure: Any) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))))


def _svg(draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figures need matplotlib: pip install 'bass-jax[report]'") from None
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def draw_outcomes(outcomes: DraftOutcomes) -> str:
    """Acceptance by position, and against what the target thought of the draft and how sure the drafter was."""
    panels = {"probability of the draft under the target": outcomes.target_probs}
    if outcomes.confidence is not None:
        panels["the drafter's confidence"] = outcomes.confidence

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 1 + len(panels), sharey=True)
        positions = np.unique(outcomes.position)
        rates = [100 * outcomes.is_accepted[outcomes.position == position].mean() for position in positions]
        axes[0].bar(positions + 1, rates)
        axes[0].set(
            xlabel="position of the draft in its step", ylabel="accepted, given those before it, %", ylim=(0, 102)
        )
        for place, (label, values) in zip(axes[1:], panels.items(), strict=True):
            edges = np.linspace(0, 1, 11)
            bins = np.clip(np.digitize(values, edges) - 1, 0, 9)
            found = np.unique(bins)
            rates = [100 * outcomes.is_accepted[bins == index].mean() for index in found]
            place.bar(edges[found] + 0.05, rates, width=0.09, color="C1")
            place.set(xlabel=label, xlim=(0, 1))

    return _svg(draw, (4.0 * (1 + len(panels)), 3.6))


def draw_latency_model(curves: Mapping[str, tuple[Sequence[float | int], Sequence[float | int]]], title: str) -> str:
    """Milliseconds against the batch size, a line per name; for what a cost model says."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, (label, (batches, seconds)) in enumerate(curves.items()):
            axes.plot(batches, 1e3 * np.asarray(seconds), f"{_LINES[index % len(_LINES)]}o", markersize=4, label=label)
        axes.set(xlabel="batch, rows", ylabel="per-token latency, ms", title=title, ylim=(0, None))
        axes.set_xscale("log", base=2)
        ticks = sorted({batch for batches, _ in curves.values() for batch in batches})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        _legend(figure)

    return _svg(draw, (7.0, 4.0))
