"""``bass-jax profile``: what the steps of a pair take on this device, fitted, in a file that policies read."""

import argparse
from pathlib import Path

from bass_jax.cli.prompt_arguments import add_prompt_arguments, prompts_of

EXAMPLES = r"""examples:
  bass-jax profile checkpoints/quickstart --prompts configs/demo_prompts.txt
  bass-jax profile checkpoints/quickstart --prompts HumanEval.jsonl.gz --limit 16 --output profile.json --plot fit.png \
      --template 'Complete the following Python function:\n```python\n{prompt}```'
  bass-jax profile ~/models/Llama-3.2-1B --draft ngram --batches 1,8 --draft-lens 0,2,4 --contexts 200,1000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("pair", help="target and draft")
    parser.add_argument("--draft", help="model (the pair's own), ngram, or a path (default: the pair's)")
    source = parser.add_argument_group("prompts, for the acceptance")
    source.add_argument("--prompts", type=Path, default=Path("configs/demo_prompts.txt"), help="as generate's --file")
    add_prompt_arguments(source, limit=16)
    source.add_argument("--max-new-tokens", type=int, default=64, help="limit per answer (default: %(default)s)")
    grid = parser.add_argument_group("what is timed")
    grid.add_argument("--batches", default="1,2,4,8,16", help="rows (default: %(default)s)")
    grid.add_argument("--draft-lens", default="0,1,2,4,8", help="drafts per step, buckets (default: %(default)s)")
    grid.add_argument("--contexts", default="216", help="committed tokens per row (default: %(default)s)")
    grid.add_argument("--acceptance", default="token", help="acceptance rule (default: %(default)s)")
    grid.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, default=Path("profile.json"), help="the file (default: %(default)s)")
    output.add_argument("--plot", type=Path, help="draw measured against fitted; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Measures, fits, prints and writes; returns the exit code."""
    batches, draft_lens, contexts = (
        parse_numbers(getattr(options, name), f"--{name.replace('_', '-')}")
        for name in ("batches", "draft_lens", "contexts")
    )
    prompts = prompts_of(options, options.prompts)

    from rich.console import Console

    import bass_jax as bass
    from bass_jax.analysis.profiler import measure_profile
    from bass_jax.cli.output import output_console

    pair, tokenizer = bass.load_pair(options.pair, drafter=options.draft)
    encoded = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    notes = Console(stderr=True)
    with notes.status("profiling") as status:
        profile = measure_profile(
            pair, encoded, bass.SpecConfig(max(draft_lens), options.acceptance), name=str(options.pair),
            max_new_tokens=options.max_new_tokens, batches=batches, draft_lens=draft_lens, contexts=contexts,
            sampling=bass.SamplingParams(options.temperature), on_cell=lambda cell: status.update(f"profiling: {cell}"),
        )  # fmt: skip
    try:
        profile.write(options.output)
    except OSError as error:
        raise ValueError(f"--output {options.output}: cannot be written: {error.strerror}") from None
    _report(output_console(), profile)
    print(f"written: {options.output}")
    if options.plot is not None:
        from bass_jax.cli.plots import plot_profile

        plot_profile(profile, options.plot)
        print(f"drawn: {options.plot}")
    return 0


def parse_numbers(text: str, option: str) -> list[int]:
    """Reads ``"1,2,4"``.

    Raises:
        ValueError: naming `option`, if it is no ascending list of whole numbers.
    """
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: expected whole numbers, as in 1,2,4") from None
    if numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise ValueError(f"{option} {text}: expected ascending numbers of at least 0")
    return numbers


def _report(out, profile) -> None:
    import numpy as np
    from rich.table import Table

    table, synergy, roofline = profile.table, profile.synergy(), profile.roofline()
    widths = [int(width) for width in np.asarray(table.widths)]
    for k, context in enumerate(np.asarray(table.contexts)):
        shown = Table(title=f"milliseconds at {context:.0f} tokens of context, {profile.about['device']}")
        for name in ("batch", *(f"target T={width}" for width in widths), "first draft", "next draft", "read 8"):
            shown.add_column(name, justify="right")
        for i, batch in enumerate(np.asarray(table.batches)):
            drafts = (table.first_draft, table.next_draft, table.catch_up)
            values = [*np.asarray(table.target)[i, :, k], *(np.asarray(values)[i, k] for values in drafts)]
            shown.add_row(f"{batch:.0f}", *(f"{1e3 * value:.1f}" for value in values))
        out.print(shown)
    out.print("acceptance by position: " + " ".join(f"{rate:.0%}" for rate in profile.rates))
    alphas = " ".join(f"{1e3 * alpha:.2f}" for alpha in np.asarray(synergy.alphas))
    errors = profile.fit_errors()
    beta, draft = 1e3 * synergy.beta, 1e3 * synergy.draft
    fits = {
        "synergy": f"c {synergy.c:.3f}, gamma {synergy.gamma:.3f}, alpha_b {alphas} ms, beta {beta:.1f} ms, "
        f"t_S {draft:.2f} ms",
        "roofline": f"{roofline.flops_per_second / 1e9:.1f} GFLOP/s, {roofline.bytes_per_second / 1e9:.1f} GB/s, "
        f"{1e6 * roofline.layer_seconds:.0f} us per layer",
    }
    for name, fit in fits.items():
        mean, largest = errors[f"{name}_mean"], errors[f"{name}_max"]
        out.print(f"{name}: {fit}; target passes to {mean:.1%} in the mean, {largest:.1%} at most", soft_wrap=True)
    best = {int(batch): synergy.best_draft_len(int(batch), range(9)) for batch in np.asarray(table.batches)}
    out.print(f"best draft length by the Synergy fit: {best}")
