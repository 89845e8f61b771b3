"""What the benchmarks that decode real prompts are told of them."""

import argparse
from pathlib import Path

import numpy as np

from bass_jax.cli.prompt_arguments import collect_prompts


def prompt_parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a parser that knows a pair and where prompts come from."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--file", type=Path, required=True, help="JSONL with the prompts")
    parser.add_argument("--field", default="prompt", help="key of the prompt in a line")
    parser.add_argument("--template", default="{prompt}", help="what is asked around {prompt}")
    return parser


def encode_prompts(options: argparse.Namespace, tokenizer) -> list[np.ndarray]:
    """Reads the prompts and puts each into the chat template."""
    texts = collect_prompts((), options.file, options.field, options.template)
    return [tokenizer.encode_chat(text) for text in texts]
