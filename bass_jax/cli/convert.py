"""``bass-jax convert``: converts a checkpoint of any supported format to our own."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import QUIET, add_all, argument
from bass_jax.cli.output import Output

EXAMPLES = """examples:
  bass-jax convert ~/models/SmolLM2-135M-Instruct checkpoints/smollm2
  bass-jax convert model.Q4_1.gguf checkpoints/smollm2 --dtype bfloat16
  bass-jax convert checkpoints/llama checkpoints/llama-int8 --quantize int8
  bass-jax convert HuggingFaceTB/SmolLM2-135M-Instruct checkpoints/smollm2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("source", "Hugging Face directory or Hub id, .gguf file, or a checkpoint of bass_jax"),
        argument("destination", "directory to write; only a checkpoint of ours is replaced", type=Path),
        argument("--dtype", "of the stored parameters (default: as read)", choices=("float32", "bfloat16")),
        argument("--quantize", "store matrices as INT8, with a scale per output channel", choices=("int8",)),
        QUIET,
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Converts and prints the path of the checkpoint; returns the exit code."""
    import sys

    from bass_jax import checkpoint
    from bass_jax.runtime.progress import ProgressBars

    with ProgressBars(is_shown=not options.quiet and sys.stderr.isatty()) as bars:
        checkpoint.convert(
            options.source,
            options.destination,
            dtype=options.dtype,
            quantize=options.quantize,
            progress=lambda num_done, total: bars.update("tensors", num_done, total),
        )
    out.value("directory", str(options.destination))
    out.note(str(options.destination))
    return 0
