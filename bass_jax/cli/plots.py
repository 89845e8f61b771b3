"""A profile drawn: measured passes as points, fits as lines; needs matplotlib."""

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
