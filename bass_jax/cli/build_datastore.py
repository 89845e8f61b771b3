"""``bass-jax build-datastore``: a retrieval datastore from the target's own outputs."""

import argparse
from pathlib import Path

from bass_jax.cli.overrides import read_overrides

EXAMPLES = """examples:
  bass-jax build-datastore configs/distill/smollm2_quickstart.yaml --output store.safetensors
  bass-jax generate --file configs/demo_prompts.txt --draft store.safetensors --baseline
  bass-jax generate --file configs/demo_prompts.txt --draft combined --baseline
the corpus is that of bass-jax distill CONFIG --stages corpus, without what overlaps its held-out prompts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("config", type=Path, help="YAML file of a distillation whose corpus is written")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a key; may be repeated"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("store.safetensors"), help="the file (default: %(default)s)"
    )
    parser.add_argument("--max-ngram", type=int, default=4, help="longest context, in tokens (default: %(default)s)")
    parser.add_argument("--min-ngram", type=int, default=1, help="shortest context (default: %(default)s)")
    parser.add_argument(
        "--max-entries", type=int, default=1_600_000, help="7 bytes each; the rarest go first (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Counts, writes, and prints what the store foresees of the held-out answers, if there are any."""
    from bass_jax.training.build_datastore import distill_datastore
    from bass_jax.training.distill_config import load_distill_config

    config = load_distill_config(options.config, read_overrides(options.set, "--set "))
    built = distill_datastore(
        config, options.output, max_ngram=options.max_ngram, min_ngram=options.min_ngram,
        max_entries=options.max_entries,
    )  # fmt: skip
    if built.agreements:
        from bass_jax.cli.distill import agreement_table
        from bass_jax.cli.output import output_console

        output_console().print(agreement_table(built.agreements))
    size = options.output.stat().st_size / 1e6
    print(f"{built.num_entries:,} contexts of {built.num_tokens:,} tokens, {size:.1f} MB: {options.output}")
    return 0
