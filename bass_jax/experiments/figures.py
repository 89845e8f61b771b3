"""The figures of reports, as SVG. They need matplotlib."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bass_jax.experiments.pass_at_k import budget_grid, pass_all, pass_first, share_ended
from bass_jax.experiments.results import Column, RunResult, VariantResult
from bass_jax.runtime.statistics import Spread

_SETTINGS: Any = {
    "svg.hashsalt": "bass_jax",  # makes the file deterministic
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


def draw_budget(result: RunResult) -> str:
    """Draws Pass@First, Pass@All and the share of ended samples against the budget; bands are the range of rounds."""
    shown = {label: found.answers for label, found in result.variants.items() if found.answers}
    budgets = budget_grid(answers for rounds in shown.values() for answers in rounds.values())

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 3)
        for place, title, of in zip(
            axes, ("Pass@First", "Pass@All", "ended samples"), (pass_first, pass_all, share_ended), strict=True
        ):
            for index, (label, rounds) in enumerate(shown.items()):
                curves = np.array([[100 * of(answers, budget) for budget in budgets] for answers in rounds.values()])
                color = f"C{index % 10}"
                middle = np.median(curves, axis=0)
                place.plot(budgets, middle, _line(index), label=label, drawstyle="steps-post", color=color)
                if len(curves) > 1:
                    place.fill_between(budgets, curves.min(0), curves.max(0), step="post", alpha=0.15, color=color)
            place.set(title=title, xlabel="time budget per problem, s", xlim=(0, budgets[-1]))
        highest = max(1.0, *(place.dataLim.y1 for place in axes[:2]))
        axes[0].set(ylabel="problems solved, %", ylim=(0, 1.05 * highest))
        axes[1].set(ylim=(0, 1.05 * highest))
        axes[2].set(ylabel="of all samples, %", ylim=(0, 105))
        _add_legend(figure)

    return _svg(draw, (11.0, 4.0))


def draw_against_batch(result: RunResult) -> str:
    """Draws PTL and throughput against the batch size, a line per method; bars are spreads."""
    methods: dict[str, list[VariantResult]] = {}
    for found in result.variants.values():
        methods.setdefault(found.variant.name, []).append(found)

    def draw(figure: Any) -> None:
        latency, throughput = figure.subplots(1, 2)
        for index, (name, found) in enumerate(methods.items()):
            batches = [one.variant.batch for one in found]
            style: dict[str, Any] = {"fmt": f"{_line(index)}o", "color": f"C{index % 10}", "markersize": 4}
            for axes, measure, scale in ((latency, "ptl_all", 1e3), (throughput, "tokens_per_second", 1.0)):
                spreads = [one.measures[measure].scaled(scale) for one in found]
                axes.errorbar(batches, [one.value for one in spreads], _whiskers(spreads), label=name, **style)
        latency.set(ylabel="per-token latency (PTL all), ms")
        throughput.set(ylabel="tokens/s, all rows")
        for axes in (latency, throughput):
            _set_batch_axis(axes, {one.variant.batch for one in result.variants.values()})
        _add_legend(figure)

    return _svg(draw, (9.0, 4.0))


def draw_acceptance(result: RunResult) -> str:
    """Draws acceptance by position, given that the drafts before were accepted."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, (label, found) in enumerate(result.variants.items()):
            if found.acceptance_by_position:
                rates = 100 * np.asarray(found.acceptance_by_position)
                axes.plot(np.arange(len(rates)) + 1, rates, f"{_line(index)}o", color=f"C{index % 10}", label=label)
        axes.set(xlabel="position of the draft in its step", ylabel="accepted, given those before it, %", ylim=(0, 102))
        axes.xaxis.get_major_locator().set_params(integer=True)
        _add_legend(figure)

    return _svg(draw, (7.0, 4.0))


def draw_bars(result: RunResult, columns: Sequence[Column], label: str) -> str:
    """Draws some measures of every variant as bars; whiskers are spreads."""
    variants = list(result.variants.values())

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        height = 0.8 / len(columns)
        for index, (title, name, _, scale) in enumerate(columns):
            spreads = [found.measures[name].scaled(scale) for found in variants]
            places = np.arange(len(variants)) + (index - (len(columns) - 1) / 2) * height
            widths = [one.value for one in spreads]
            axes.barh(places, widths, height, xerr=_whiskers(spreads), label=title, error_kw={"lw": 0.8})
        axes.set_yticks(range(len(variants)), [found.variant.label for found in variants])
        axes.invert_yaxis()
        axes.set(xlabel=label, xlim=(0, None))
        axes.grid(visible=False, axis="y")
        _add_legend(figure)

    return _svg(draw, (8.0, 1.4 + 0.55 * len(variants)))


def _line(index: int) -> str:
    return _LINES[index % len(_LINES)]


def _whiskers(spreads: Sequence[Spread]) -> np.ndarray:
    """Returns the lengths of whiskers, ``[2, n]``. A bootstrap interval may not contain the estimate; then it is 0."""
    return np.maximum([[one.value - one.low for one in spreads], [one.high - one.value for one in spreads]], 0.0)


def _set_batch_axis(axes: Any, batches: set) -> None:
    axes.set(xlabel="batch, rows", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(batches), [f"{batch:g}" for batch in sorted(batches)])


def _add_legend(figure: Any) -> None:
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
