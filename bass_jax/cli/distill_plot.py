"""Draws the log of a training: losses, agreement, and what drafts are worth on held-out prompts."""

from pathlib import Path


def plot_training(log: Path, path: Path) -> None:
    """Draws a ``metrics.jsonl``.

    Raises:
        ValueError: if there is nothing to draw, matplotlib is not installed or `path` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    from bass_jax.training.train_log import read_log

    lines = read_log(log)
    losses = [line for line in lines if "loss" in line]
    watched = [line for line in lines if "held_out_block_efficiency" in line]
    if not losses:
        raise ValueError(f"{log}: no line of losses to draw")
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    steps = [line["step"] for line in losses]
    left.plot(steps, [line["loss"] for line in losses])
    left.set_ylabel("loss, nats per token")
    middle.plot(steps, [line["agreement"] for line in losses], label="trained on")
    right.set_ylabel("tokens per target pass, held out")
    if watched:
        steps = [line["step"] for line in watched]
        middle.plot(steps, [line["held_out_agreement"] for line in watched], "o-", label="held out")
        right.plot(steps, [line["held_out_block_efficiency"] for line in watched], "o-")
    middle.set_ylabel("agreement")
    middle.legend()
    for axes in (left, middle, right):
        axes.set_xlabel("step")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: cannot be written: {error}") from None
