"""The plots of commands. They need matplotlib."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from bass_jax.cost_model import Profile, expected_emitted


def plot_profile(profile: Profile, path: Path) -> None:
    """Writes an image: target passes over T per batch with both fits, and accepted drafts with the power distribution.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install matplotlib") from None
    table, synergy, roofline = profile.table, profile.synergy(), profile.roofline()
    widths, context = np.asarray(table.widths), float(np.asarray(table.contexts)[0])
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, accepted = figure.subplots(1, 2)
    line = jnp.linspace(1, float(widths[-1]), 50)
    for i, batch in enumerate(np.asarray(table.batches)):
        color = f"C{i}"
        times.plot(widths, 1e3 * np.asarray(table.target)[i, :, 0], "o", color=color, label=f"batch {batch:.0f}")
        times.plot(line, 1e3 * np.asarray(synergy.target_seconds(float(batch), line, context)), "-", color=color)
        times.plot(line, 1e3 * np.asarray(roofline.target_seconds(float(batch), line, context)), ":", color=color)
    times.set(xlabel="T, positions per row", ylabel="target pass, ms", ylim=(0, None))
    times.set_title("points measured; lines Synergy, dots roofline", fontsize=10)
    times.legend(fontsize=8)
    lengths = np.arange(len(profile.rates) + 1)
    measured = np.asarray(expected_emitted(jnp.asarray(profile.rates), jnp.asarray(lengths))) - 1
    accepted.plot(lengths, measured, "o", label="measured")
    accepted.plot(lengths, synergy.c * lengths**synergy.gamma, "-", label=f"{synergy.c:.2f} s^{synergy.gamma:.2f}")
    accepted.set(xlabel="s, drafts", ylabel="accepted drafts", ylim=(0, None))
    accepted.legend(fontsize=8)
    figure.suptitle(f"{profile.about.get('pair', '')} on {profile.about.get('device', '')}", fontsize=11)
    figure.savefig(path, dpi=120)


def plot_training(log: Path, path: Path) -> None:
    """Draws the log of a training: loss, agreement, and block efficiency on held-out prompts.

    Args:
        log: ``metrics.jsonl``.
        path: of the image.

    Raises:
        ValueError: if the log has no losses, matplotlib is not installed or `path` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    from bass_jax.training.train_log import read_log

    lines = read_log(log)
    losses = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "held_out_block_efficiency" in line]
    if not losses:
        raise ValueError(f"{log}: no losses to plot")
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    steps = [line["step"] for line in losses]
    left.plot(steps, [line["loss"] for line in losses])
    left.set_ylabel("loss, nats per token")
    middle.plot(steps, [line["agreement"] for line in losses], label="trained on")
    right.set_ylabel("tokens per target pass, held out")
    if held_out:
        steps = [line["step"] for line in held_out]
        middle.plot(steps, [line["held_out_agreement"] for line in held_out], "o-", label="held out")
        right.plot(steps, [line["held_out_block_efficiency"] for line in held_out], "o-")
    middle.set_ylabel("agreement")
    middle.legend()
    for axes in (left, middle, right):
        axes.set_xlabel("step")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: cannot be written: {error}") from None
