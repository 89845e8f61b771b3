"""The plots of commands. They need matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bass_jax.analysis.roofline_benchmark import Cell
from bass_jax.cost_model import Profile, expected_emitted


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


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure and prints its path.

    Raises:
        ValueError: if `path` cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: cannot be written: {error}") from None
    print(f"drawn: {path}")


def plot_profile(profile: Profile, path: Path) -> None:
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
    save_figure(figure, path)


def plot_bench(record: Mapping[str, Any], cells: Sequence[Cell], path: Path) -> None:
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
    save_figure(figure, path)
