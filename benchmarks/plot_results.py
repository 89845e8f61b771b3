"""Draws the plots of README.md and docs/results.md from the JSON files in docs/results.

python benchmarks/plot_results.py
"""

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

DIRECTORY = Path(__file__).parents[1] / "docs" / "results"
METADATA = {"Date": None}
"""Keeps the drawing time out of the files, so that the same data gives the same files."""


def plot_policies(data: dict, path: Path) -> None:
    """Draws the speed-up of every policy over the batch size, with the range of its repeats."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, cells) in enumerate(data["speedup"].items()):
        medians = [median for median, _, _ in cells]
        below = [median - lowest for median, lowest, _ in cells]
        above = [highest - median for median, _, highest in cells]
        style = "o:" if name.startswith("fixed") else "o-"
        # The points are shifted so that their ranges do not overlap.
        batches = [batch * 2 ** (0.03 * (number - 3)) for batch in data["batches"]]
        axes.errorbar(batches, medians, yerr=[below, above], fmt=style, markersize=3, capsize=2, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(data["batches"], [str(batch) for batch in data["batches"]])
    axes.set(xlabel="batch", ylabel="tokens/s over regular decoding", title=f"{data['device']}, {data['date']}")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata=METADATA)


def plot_traffic(data: dict, path: Path) -> None:
    """Draws the simulated mean latency of every policy over the load, one panel per device."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, device in zip(figure.subplots(1, 2), ("H200", "A100"), strict=True):
        for name, seconds in data[device]["mean_latency_seconds"].items():
            axes.plot(data[device]["patterns"], seconds, "o-", markersize=3, label=name)
        axes.set_yscale("log")
        axes.set(xlabel="mean inter-arrival time, service times", title=f"{device}, simulated")
    axes = figure.axes[0]
    axes.set_ylabel("mean latency, s")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata=METADATA)


def plot_front(cells: list[dict], foreground: str, path: Path) -> None:
    """Draws the speed-up and the chosen draft length of `auto` over the batch size, on a transparent background."""
    keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with rc_context(dict.fromkeys(keys, foreground)):
        figure = Figure(figsize=(8, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for kind, color in zip(dict.fromkeys(cell["kind"] for cell in cells), ("tab:blue", "tab:orange"), strict=False):
            found = [cell for cell in cells if (cell["kind"], cell["context"]) == (kind, 128)]
            batches, speeds = [cell["batch"] for cell in found], [cell["tokens_per_second"] for cell in found]
            for method, style in (("auto", "o-"), ("fixed 4", "x:")):
                ratios = [one[method] / one["regular"] for one in speeds]
                left.plot(batches, ratios, style, color=color, label=f"{kind}, {method}")
            right.plot(batches, [cell["draft_len"] for cell in found], "o-", color=color)
        left.axhline(1.0, color=foreground, linewidth=0.8)
        left.set(ylabel="speed-up")
        right.set(ylabel="draft length of auto")
        left.legend(fontsize=7, frameon=False)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, [str(batch) for batch in batches])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("batch")
        figure.savefig(path, metadata=METADATA, transparent=True)


def plot_drafters(cells: list[dict], path: Path) -> None:
    """Draws the tokens per target pass of every drafter over the time of its step."""
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [cell["tokens_per_pass"] for cell in cells]
    times = [cell["tokens_per_pass"] / cell["speed_up"] for cell in cells]
    for cell, x, y, marker in zip(cells, times, tokens, "os^vD<>pP*X", strict=False):
        axes.plot(x, y, marker, markersize=6, label=cell["drafter"])
    figure.legend(fontsize=8, loc="outside right center")
    axes.set(xlim=(0, max(times) * 1.1), ylim=(0, max(tokens) * 1.1))
    for speed_up in (0.5, 1.0, 1.5, 2.0):
        axes.axline((0, 0), slope=speed_up, color="gray", linewidth=0.8, linestyle="-" if speed_up == 1 else ":")
    axes.set(xlabel="time of a step over that of a regular step", ylabel="tokens per target pass")
    figure.savefig(path, metadata=METADATA)


def main() -> None:
    data = json.loads((DIRECTORY / "results.json").read_text())
    cells = json.loads((DIRECTORY / "never_slower.json").read_text())["cells"]
    with rc_context({"svg.hashsalt": "bass_jax"}):
        plot_policies(data["policies"], DIRECTORY / "policies.svg")
        plot_traffic(data["traffic"], DIRECTORY / "traffic.svg")
        plot_drafters(json.loads((DIRECTORY / "drafters.json").read_text())["cells"], DIRECTORY / "drafters.svg")
        for name, foreground in (("light", "#1f2328"), ("dark", "#f0f6fc")):
            plot_front(cells, foreground, DIRECTORY / f"front_{name}.svg")


if __name__ == "__main__":
    main()
