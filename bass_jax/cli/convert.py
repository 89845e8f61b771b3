"""``bass-jax convert``: any checkpoint that loads, as an Orbax checkpoint of ours."""

import argparse
from pathlib import Path

EXAMPLES = """examples:
  bass-jax convert ~/models/SmolLM2-135M-Instruct checkpoints/smollm2
  bass-jax convert model.Q4_1.gguf checkpoints/smollm2 --dtype bfloat16
  bass-jax convert checkpoints/llama checkpoints/llama-int8 --quantize int8
  bass-jax convert HuggingFaceTB/SmolLM2-135M-Instruct checkpoints/smollm2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("source", help="Hugging Face directory or Hub id, .gguf file, or Orbax directory")
    parser.add_argument("destination", type=Path, help="directory to make; only a checkpoint of ours is replaced")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the stored parameters (default: as read)")
    parser.add_argument("--quantize", choices=("int8",), help="store matrices as INT8, with a scale per output channel")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Converts and says where the checkpoint lies; returns the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    from bass_jax import checkpoint

    console = Console(stderr=True)
    with Progress(console=console, disable=options.quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("tensors", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        checkpoint.convert(
            options.source, options.destination, dtype=options.dtype, quantize=options.quantize, progress=report
        )
    print(options.destination)
    return 0
