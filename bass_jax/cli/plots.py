"""The plots of commands. They need matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bass_jax.analysis.roofline_benchmark import Cell
from bass_jax.cost_model import Profile, expected_emitted
from bass_jax.experiments.traffic.traffic_experiment import TrafficResult


def new_figure(width: float, height: float) -> Any:
    """Makes a figure.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> str:
    """Writes a figure; returns a line that names it.

    Raises:
        ValueError: if `path` cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: cannot be written: {error}") from None
    return f"drawn: {path}"


def plot_profile(profile: Profile, path: Path) -> str:
    """Draws target passes against T per batch with both fits, and accepted drafts with the power law.

    Raises:
        ValueError: if matplotlib is not installed or `path` cannot be written.
    """
    figure = new_figure(11.0, 4.5)
    times, accepted = figure.subplots(1, 2)
    table, synergy, roofline = profile.table, profile.synergy(), profile.roofline()
    widths, context = np.asarray(table.widths), float(np.asarray(table.contexts)[0])
    line = np.linspace(1, float(widths[-1]), 50)
    for index, batch in enumerate(np.asarray(table.batches).tolist()):
        color = f"C{index}"
        times.plot(widths, 1e3 * np.asarray(table.target)[index, :, 0], "o", color=color, label=f"batch {batch:.0f}")
        for model, style in ((synergy, "-"), (roofline, ":")):
            times.plot(line, 1e3 * np.asarray(model.target_seconds(batch, line, context)), style, color=color)
    times.set(xlabel="T, positions per row", ylabel="target pass, ms", ylim=(0, None))
    times.set_title("points are measured; lines: Synergy; dots: roofline", fontsize=10)
    times.legend(fontsize=8)
    lengths = np.arange(len(profile.rates) + 1)
    measured = np.asarray(expected_emitted(jnp.asarray(profile.rates), jnp.asarray(lengths))) - 1
    accepted.plot(lengths, measured, "o", label="measured")
    accepted.plot(lengths, synergy.c * lengths**synergy.gamma, "-", label=f"{synergy.c:.2f} s^{synergy.gamma:.2f}")
    accepted.set(xlabel="s, drafts", ylabel="accepted drafts", ylim=(0, None))
    accepted.legend(fontsize=8)
    figure.suptitle(f"{profile.about.get('pair', '')} on {profile.about.get('device', '')}", fontsize=11)
    return save_figure(figure, path)


def plot_training(log: Path, path: Path) -> str:
    """Draws the log of a training: loss, agreement, and tokens per target pass on held-out prompts.

    Args:
        log: ``metrics.jsonl``.
        path: of the image.

    Raises:
        ValueError: if the log has no losses, matplotlib is not installed or `path` cannot be written.
    """
    from bass_jax.training.train_log import read_log

    lines = read_log(log)
    losses = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "held_out_tokens_per_pass" in line]
    if not losses:
        raise ValueError(f"{log}: no losses to plot")
    figure = new_figure(9.0, 3.0)
    left, middle, right = figure.subplots(1, 3)
    steps = [line["step"] for line in losses]
    left.plot(steps, [line["loss"] for line in losses])
    left.set_ylabel("loss, nats per token")
    middle.plot(steps, [line["agreement"] for line in losses], label="trained on")
    right.set_ylabel("tokens per target pass, held out")
    if held_out:
        steps = [line["step"] for line in held_out]
        middle.plot(steps, [line["held_out_agreement"] for line in held_out], "o-", label="held out")
        right.plot(steps, [line["held_out_tokens_per_pass"] for line in held_out], "o-")
    middle.set_ylabel("agreement")
    middle.legend()
    for axes in (left, middle, right):
        axes.set_xlabel("step")
    return save_figure(figure, path)


def plot_bench(record: Mapping[str, Any], cells: Sequence[Cell], path: Path) -> str:
    """Draws the time of each cell's step with its roofline, and tokens per second.

    Raises:
        ValueError: if matplotlib is not installed or `path` cannot be written.
    """
    figure = new_figure(11.0, 4.5)
    times, rates = figure.subplots(1, 2)
    places = range(len(cells))
    times.bar(places, [1e3 * cell.seconds for cell in cells], color="C0", label="measured")
    times.bar(places, [1e3 * cell.roofline_seconds for cell in cells], width=0.4, color="C1", label="roofline")
    times.set(ylabel="step, ms")
    times.legend(fontsize=8)
    rates.bar(places, [cell.tokens_per_second for cell in cells], color="C2")
    kind = "synthetic acceptance" if record["is_acceptance_synthetic"] else "measured acceptance"
    rates.set(ylabel=f"tokens/s ({kind})")
    for axes in (times, rates):
        names = [f"B {cell.batch}\nG {cell.draft_len}\nS {cell.context}" for cell in cells]
        axes.set_xticks(places, names, fontsize=7)
    title = f"{record['pair']} on {record['device']}, {record['measured_bandwidth'] / 1e9:.0f} GB/s"
    figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)


def plot_traffic(results: Sequence[TrafficResult], title: str, path: Path) -> str:
    """Draws mean latency, p99 latency and goodput of every policy over the patterns.

    Lines of continuous batching are solid, those of static batching dotted.

    Raises:
        ValueError: if matplotlib is not installed or `path` cannot be written.
    """
    figure = new_figure(13.0, 4.2)
    patterns, policies = (list(dict.fromkeys(names)) for names in zip(*((x.pattern, x.policy) for x in results)))
    found = {(one.policy, one.batching, one.pattern): one.metrics for one in results}
    measures = {
        "mean latency, s": lambda metrics: metrics.latency.mean,
        "p99 latency, s": lambda metrics: metrics.latency.p99,
        "requests per second within the objective": lambda metrics: metrics.goodput,
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
    return save_figure(figure, path)
