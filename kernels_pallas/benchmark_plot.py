"""The plot of PAD, SPLIT and ragged attention over the spread of lengths; needs matplotlib."""

import collections


def plot_crossover(records: list[dict], path: str) -> None:
    """Draws time per call over (longest length / mean length), one line per implementation and form.

    Args:
        records: What the benchmark yields; those of its crossover sweep are drawn.
        path: The image to write; its suffix says the format.
    """
    from matplotlib.figure import Figure

    lines = collections.defaultdict(list)
    for record in records:
        if record.get("lengths") == "crossover":
            lines[record["name"]].append((record["longest_over_mean"], record["median_us"]))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xlabel="longest length / mean length", ylabel="time per call (µs)", xscale="log", yscale="log")
    axes.set_title("Ragged attention at one mean length")
    axes.legend()
    figure.savefig(path, dpi=150)
