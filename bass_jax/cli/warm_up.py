"""``bass-jax warm-up``: compiles ahead, so that the next start finds everything in the cache."""

import argparse
import time

from bass_jax.cli.arguments import add_model_arguments, load_models
from bass_jax.cli.profile import parse_numbers

EXAMPLES = """examples:
  bass-jax warm-up
  bass-jax warm-up checkpoints/quickstart --batches 1,8 --capacities 256,512 --draft-len 4
  bass-jax warm-up checkpoints/llama --quantize int8 --temperature 0.8
the cache is that of every other command: bass_jax in the user's cache directory, or JAX_COMPILATION_CACHE_DIR"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("pair", nargs="?", default="checkpoints/quickstart", help="(default: %(default)s)")
    parser.add_argument("--draft", help="model (the pair's own), ngram, or a path (default: the pair's)")
    parser.add_argument("--batches", default="1,8", help="rows (default: %(default)s)")
    parser.add_argument("--capacities", default="256", help="tokens of prompt and answer (default: %(default)s)")
    parser.add_argument("--draft-len", type=int, default=4, help="draft tokens per step (default: %(default)s)")
    parser.add_argument("--acceptance", default="token", help="acceptance rule (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add_model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Compiles and says what that took; returns the exit code."""
    batches = parse_numbers(options.batches, "--batches")
    capacities = parse_numbers(options.capacities, "--capacities")

    import bass_jax as bass
    from bass_jax.engine.warm_up import warm_up
    from bass_jax.runtime.xla_flags import use_compilation_cache

    directory = use_compilation_cache()
    start = time.perf_counter()
    pair, _ = load_models(options, options.pair, options.draft)
    print(f"loaded in {time.perf_counter() - start:.1f} s")
    spec, sampling = bass.SpecConfig(options.draft_len, options.acceptance), bass.SamplingParams(options.temperature)
    for done in warm_up(pair, spec, batches=batches, capacities=capacities, sampling=sampling):
        print(
            f"batch {done.batch}, capacity {done.capacity}: {done.num_compiled} executables in "
            f"{done.seconds:.1f} s, {done.compile_seconds:.1f} s of it compiling"
        )
    print("no cache: jax was told to use none" if directory is None else f"cache: {directory}")
    return 0
