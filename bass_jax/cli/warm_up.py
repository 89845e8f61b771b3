"""``bass-jax warm-up``: compiles into the compilation cache, so that later starts are fast."""

import argparse
import time

from bass_jax.cli import arguments as args
from bass_jax.cli.output import Output

EXAMPLES = """examples:
  bass-jax warm-up
  bass-jax warm-up checkpoints/quickstart --batches 1,8 --capacities 256,512 --draft-len 4
  bass-jax warm-up checkpoints/llama --quantize int8 --temperature 0.8
All commands use this cache: bass_jax in the user's cache directory, or JAX_COMPILATION_CACHE_DIR."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    args.add_all(
        parser,
        args.PAIR,
        args.DRAFT,
        args.argument("--batches", "rows", "1,8", type=args.numbers),
        args.argument("--capacities", "tokens of prompt and output", "256", type=args.numbers),
        args.argument("--draft-len", "draft tokens per step (default: all lengths of the policy auto)", type=int),
        args.ACCEPTANCE,
        args.TEMPERATURE,
    )
    args.add_model_arguments(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Compiles and prints the times; returns the exit code."""
    from bass_jax.config import SpecConfig
    from bass_jax.engine.warm_up import warm_up
    from bass_jax.runtime.xla_flags import use_compilation_cache
    from bass_jax.sampling import SamplingParams

    directory = use_compilation_cache()
    start = time.perf_counter()
    pair = args.load_models(options)
    out.note(f"loaded in {time.perf_counter() - start:.1f} s")
    spec, sampling = SpecConfig(options.draft_len, options.acceptance), SamplingParams(options.temperature)
    for done in warm_up(pair, spec, batches=options.batches, capacities=options.capacities, sampling=sampling):
        out.note(
            f"batch {done.batch}, capacity {done.capacity}: {done.num_compiled} executables in {done.seconds:.1f} s, "
            f"{done.compile_seconds:.1f} s of it compiling"
        )
    out.note("no cache: JAX is configured without one" if directory is None else f"cache: {directory}")
    return 0
