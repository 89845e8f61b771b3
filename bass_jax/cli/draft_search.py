"""``bass-jax draft-search``: depth against width at one training budget."""

import argparse
from pathlib import Path

from bass_jax.cli.overrides import read_overrides

EXAMPLES = """examples:
  bass-jax draft-search configs/distill/smollm2_quickstart.yaml --depths 1,2,4 --widths 128,256,512 --device h200
  bass-jax draft-search configs/distill/smollm2_quickstart.yaml --profile profile.json --set training.num_steps=400
the corpus is that of bass-jax distill CONFIG --stages corpus; an interrupted search goes on where it was"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("config", type=Path, help="YAML file of a distillation whose corpus is written")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a key; may be repeated"
    )
    parser.add_argument("--depths", default="1,2,4", help="layers (default: %(default)s)")
    parser.add_argument("--widths", default="128,256,512", help="D (default: %(default)s)")
    cost = parser.add_mutually_exclusive_group(required=True)
    cost.add_argument("--profile", type=Path, help="of bass-jax profile: speed-ups on the device it was measured on")
    cost.add_argument("--device", help="h200 or a100: speed-ups by its public figures")
    parser.add_argument("--batches", default="1,2,4,8,16,32", help="of the predictions (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="committed tokens per row (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Trains, measures, prints a table; returns the exit code."""
    from bass_jax.cli.profile import parse_numbers

    depths, widths, batches = (
        parse_numbers(getattr(options, name), f"--{name}") for name in ("depths", "widths", "batches")
    )

    from rich.console import Console
    from rich.table import Table

    from bass_jax.cli.output import output_console
    from bass_jax.training.data import corpus_rows
    from bass_jax.training.distill_config import load_config
    from bass_jax.training.search import search_drafts
    from bass_jax.training.write_corpus import load_target

    config = load_config(options.config, read_overrides(options.set, "--set "))
    target, tokenizer = load_target(config, "float32")
    cost_of = _cost_models(options.profile, options.device, target.config)
    shapes = [(depth, width) for depth in depths for width in widths]
    notes = Console(stderr=True)
    table = Table(title=f"drafts after {config.training.num_steps} steps")
    for name in ("layers", "width", "parameters", "agreement", "ms per draft", *(f"x at {n}" for n in batches)):
        table.add_column(name, justify="right")
    found = search_drafts(
        config, corpus_rows(config, tokenizer), target, tokenizer, shapes, cost_of, batches=batches,
        context=options.context, progress=lambda shape: notes.print(f"{shape.num_layers} x {shape.width}"),
    )  # fmt: skip
    for point in found:
        table.add_row(
            str(point.num_layers), str(point.width), f"{point.num_params / 1e6:.2f} M", f"{point.agreement:.3f}",
            f"{1e3 * point.pass_seconds:.2f}",
            *(f"{point.speedups[batch]:.2f} ({point.draft_lens[batch]})" for batch in batches),
        )  # fmt: skip
    output_console().print(table)
    print("predicted speed-up over regular decoding (at the best draft length), from the cost model, not measured")
    return 0


def _cost_models(profile: Path | None, device: str | None, target):
    """A roofline of the target with any draft, fitted to a profile or from a device's public figures.

    Raises:
        ValueError: if there is no such device, or the profile cannot be read.
    """
    import dataclasses

    from bass_jax.cost_model import DEVICES, pass_shape, read_profile, roofline

    if profile is not None:
        fitted = read_profile(profile).roofline()
        return lambda draft: dataclasses.replace(fitted, draft=pass_shape(draft))
    if device not in DEVICES:
        raise ValueError(f"--device {device}: expected one of {sorted(DEVICES)}")
    return lambda draft: roofline(pass_shape(target), pass_shape(draft), DEVICES[device])
