"""Steps drawn beside their roofline; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from bass_jax.analysis.roofline_benchmark import Cell


def plot_bench(record: dict, cells: Sequence[Cell], path: Path) -> None:
    """Writes an image: milliseconds of each cell's step beside its roofline, and tokens per second.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, rates = figure.subplots(1, 2)
    names = [f"B {cell.batch}\nG {cell.draft_len}\nS {cell.context}" for cell in cells]
    places = range(len(cells))
    times.bar(places, [1e3 * cell.seconds for cell in cells], color="C0", label="measured")
    times.bar(places, [1e3 * cell.roofline_seconds for cell in cells], width=0.4, color="C1", label="roofline")
    times.set(ylabel="step, ms")
    times.legend(fontsize=8)
    rates.bar(places, [cell.tokens_per_second for cell in cells], color="C2")
    kind = "synthetic acceptance" if record["is_acceptance_synthetic"] else "measured acceptance"
    rates.set(ylabel=f"tokens/s ({kind})")
    for axes in (times, rates):
        axes.set_xticks(places, names, fontsize=7)
    figure.suptitle(
        f"{record['pair']} on {record['device']}, {record['measured_bandwidth'] / 1e9:.0f} GB/s", fontsize=11
    )
    figure.savefig(path, dpi=120)
