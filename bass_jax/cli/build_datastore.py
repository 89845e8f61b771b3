"""``bass-jax build-datastore``: builds a retrieval datastore from the target's own outputs."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import SET, add_all, argument, read_overrides
from bass_jax.cli.output import Output

EXAMPLES = """examples:
  bass-jax build-datastore configs/distill/smollm2_quickstart.yaml --output store.safetensors
  bass-jax generate --file configs/demo_prompts.txt --draft store.safetensors --baseline
  bass-jax generate --file configs/demo_prompts.txt --draft ensemble --baseline
The corpus is that of bass-jax distill CONFIG --stages corpus, without what overlaps its held-out prompts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("config", "YAML file of a distillation whose corpus has been written", type=Path),
        SET,
        argument("--output", "the file", Path("store.safetensors")),
        argument("--max-ngram", "longest context, in tokens", 4),
        argument("--min-ngram", "shortest context, in tokens", 1),
        argument("--max-entries", "contexts of 7 bytes each; the rarest are dropped first", 1_600_000),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Builds and writes the datastore, and prints how well it predicts the held-out answers, if there are any."""
    from bass_jax.training.build_datastore import distill_datastore
    from bass_jax.training.distill_config import load_distill_config

    sizes = {name: getattr(options, name) for name in ("max_ngram", "min_ngram", "max_entries")}
    built = distill_datastore(
        load_distill_config(options.config, read_overrides(options.set, "--set ")), options.output, **sizes
    )
    if built.agreements:
        from bass_jax.cli.distill import print_agreements

        print_agreements(out, built.agreements)
    size = options.output.stat().st_size / 1e6
    out.value("output", str(options.output))
    out.note(f"{built.num_entries:,} contexts of {built.num_tokens:,} tokens, {size:.1f} MB: {options.output}")
    return 0
