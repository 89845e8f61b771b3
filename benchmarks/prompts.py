"""The arguments and the encoding of prompts, for the benchmarks that decode real prompts."""

import argparse
from pathlib import Path

import numpy as np

from bass_jax.cli.prompt_arguments import collect_prompts


def prompt_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments for a pair and for prompts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--file", type=Path, required=True, help="JSON Lines file with the prompts")
    parser.add_argument("--field", default="prompt", help="key of the prompt in each line (default: %(default)s)")
    parser.add_argument(
        "--template", default="{prompt}", help="the message that contains {prompt} (default: %(default)s)"
    )
    return parser


def encode_prompts(options: argparse.Namespace, tokenizer) -> list[np.ndarray]:
    """Reads the prompts and puts each into the chat template."""
    texts = collect_prompts((), options.file, options.field, options.template)
    return [tokenizer.encode_chat(text) for text in texts]
