"""Plots of latency against load. They need matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bass_jax.experiments.traffic.traffic_experiment import TrafficResult


def plot_traffic(results: Sequence[TrafficResult], title: str, path: Path) -> None:
    """Writes an image of mean latency, p99 latency and goodput of every policy over the patterns.

    Lines of continuous batching are solid, those of static batching dotted.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install matplotlib") from None
    patterns = list(dict.fromkeys(one.pattern for one in results))
    policies = list(dict.fromkeys(one.policy for one in results))
    found = {(one.policy, one.batching, one.pattern): one.summary for one in results}
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    measures = {
        "mean latency, s": lambda summary: summary.latency.mean,
        "p99 latency, s": lambda summary: summary.latency.p99,
        "requests per second within the objective": lambda summary: summary.goodput,
    }
    for axes, (label, measure) in zip(figure.subplots(1, 3), measures.items(), strict=True):
        for index, policy in enumerate(policies):
            for batching, style in (("static", ".:"), ("continuous", ".-")):
                values = [found.get((policy, batching, pattern)) for pattern in patterns]
                if None not in values:
                    name = policy if batching == "continuous" else None
                    heights = np.array([measure(value) for value in values], float)
                    axes.plot(range(len(patterns)), heights, style, color=f"C{index}", label=name)
        axes.set_xticks(range(len(patterns)), patterns, rotation=30, ha="right", fontsize=8)
        axes.set(ylabel=label, yscale="log" if "latency" in label else "linear")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7, title="solid continuous, dotted static", title_fontsize=7)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
