"""What the benchmarks that read a distillation's prompts or corpus are told of it."""

import argparse
from pathlib import Path


def distillation_parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a parser that knows a distillation's configuration, and where its data lie."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="of the distillation whose prompts, answers or corpus are read")
    parser.add_argument("--data-dir", help="where the prompts' files are")
    parser.add_argument("--corpus-dir", help="of another run than the configuration's")
    return parser


def overrides_of(options: argparse.Namespace) -> dict[str, object]:
    """Returns what the options change in the configuration."""
    found = {"prompts.data_dir": options.data_dir, "corpus_dir": options.corpus_dir}
    return {name: value for name, value in found.items() if value}
