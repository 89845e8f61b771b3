"""The arguments of the benchmarks that read the prompts or the corpus of a distillation."""

import argparse
from pathlib import Path


def distillation_parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a parser of a distillation's configuration and the paths of its data."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="of the distillation whose prompts, answers or corpus are read")
    parser.add_argument("--data-dir", help="directory of the prompts' files")
    parser.add_argument("--corpus-dir", help="of another run than the configuration's")
    return parser


def overrides_of(options: argparse.Namespace) -> dict[str, object]:
    """Returns the overrides of the configuration that the options ask for."""
    found = {"prompts.options.data_dir": options.data_dir, "corpus_dir": options.corpus_dir}
    return {name: value for name, value in found.items() if value}
