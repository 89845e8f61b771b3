"""``bass-jax inspect``: what a checkpoint holds, and whether two can be a pair."""

import argparse
from pathlib import Path

EXAMPLES = """examples:
  bass-jax inspect checkpoints/quickstart/target
  bass-jax inspect ~/models/Llama-3.2-1B --draft checkpoints/my_draft
  bass-jax inspect model.Q4_1.gguf --shapes
  bass-jax inspect codegen-16b --draft codegen-350m
  bass-jax inspect presets"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("path", help="checkpoint, .gguf file, Hub id or preset; 'presets' lists those")
    parser.add_argument("--draft", help="another checkpoint: say whether it can draft for the first")
    parser.add_argument("--shapes", action="store_true", help="list every parameter's shape")


def run(options: argparse.Namespace) -> int:
    """Prints; returns the exit code: 1 if the draft cannot propose for the target."""
    from rich.table import Table

    from bass_jax.checkpoint import inspect_checkpoint, inspect_preset, why_not_a_pair
    from bass_jax.cli.output import output_console
    from bass_jax.models import PRESETS

    def inspect(path: str):
        return inspect_preset(path) if path in PRESETS and not Path(path).exists() else inspect_checkpoint(path)

    console = output_console()
    if options.path == "presets":
        console.print(_list_presets([inspect_preset(name) for name in PRESETS]))
        return 0
    found = [inspect(path) for path in (options.path, options.draft) if path is not None]
    table = Table()
    for name in ("", *(str(inspection.path) for inspection in found)):
        table.add_column(name, justify="left", overflow="fold")
    rows = [_describe(inspection) for inspection in found]
    for label in rows[0]:
        table.add_row(label, *(row[label] for row in rows))
    console.print(table)
    if options.shapes:
        for name, shape in found[0].shapes.items():
            console.print(f"{name}: {' x '.join(map(str, shape))}", highlight=False)
    if options.draft is None:
        return 0
    reason = why_not_a_pair(*found)
    console.print("They can be a pair." if reason is None else f"They cannot be a pair: {reason}.", soft_wrap=True)
    return 0 if reason is None else 1


def _list_presets(inspections):
    from rich.table import Table

    table = Table("preset", "family")
    for name in ("layers", "width", "parameters", "GB", "KV bytes per token"):
        table.add_column(name, justify="right")
    for inspection in inspections:
        config = inspection.config
        table.add_row(
            str(inspection.path), config.family, f"{config.num_layers}", f"{config.width}",
            f"{inspection.num_parameters:,}", f"{inspection.num_bytes / 1e9:.2f}",
            f"{inspection.num_cache_bytes_per_token:,}",
        )  # fmt: skip
    return table


def _describe(inspection) -> dict[str, str]:
    config = inspection.config
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    return {
        "family": config.family,
        "layers x width": f"{config.num_layers} x {config.width}",
        "heads": f"{attention.num_heads} query, {attention.num_kv_heads} key-value, of {attention.head_dim}",
        "mlp": f"{mlp.width}",
        "parameters": f"{inspection.num_parameters:,} in {config.dtype}",
        "bytes": f"{inspection.num_bytes:,} in memory, {inspection.num_stored_bytes:,} stored",
        "context": f"{config.context:,} tokens",
        "vocabulary": f"{config.vocab_size:,}"
        + ("" if config.output_vocab_size is None else f", proposes {config.output_vocab_size:,}"),
        "cache": f"{inspection.num_cache_bytes_per_token:,} bytes per token",
        "tokenizer": inspection.tokenizer_fingerprint or "–",
        "source": inspection.source or "–",
        "licence": inspection.license or "–",
    }
