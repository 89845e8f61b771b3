"""``bass-jax bench``: what steps take beside what their bytes allow, over batch, draft length and context."""

import argparse
import datetime
import json
from pathlib import Path

from bass_jax.cli.arguments import add_model_arguments, is_preset, load_models
from bass_jax.cli.profile import parse_numbers
from bass_jax.cli.prompt_arguments import add_prompt_arguments, prompts_of

EXAMPLES = r"""examples:
  bass-jax bench checkpoints/quickstart --prompts configs/demo_prompts.txt
  bass-jax bench checkpoints/quickstart --acceptance 0.6 --batches 1,8 --draft-lens 0,2,4 --contexts 216,1000
  bass-jax bench bass-7.8b --draft bass-draft-a-310m --acceptance 0.8 --batches 1,8,16 --output bench.json
  bass-jax bench llama-3.1-8b --draft ngram --quantize int8 --cache-dtype int8 --acceptance 0.5 --profile traces
a name of `bass-jax inspect presets` means random weights in that shape: speeds are real, texts are not"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("pair", help="target and draft, or the name of a preset")
    parser.add_argument(
        "--draft", help="model (the pair's own), ngram, a path, or a preset's name (default: the pair's)"
    )
    grid = parser.add_argument_group("what is timed")
    grid.add_argument("--batches", default="1,8", help="rows (default: %(default)s)")
    grid.add_argument("--draft-lens", default="0,4", help="drafts per step; 0 is regular (default: %(default)s)")
    grid.add_argument("--contexts", default="216", help="committed tokens per row (default: %(default)s)")
    grid.add_argument("--rule", default="token", help="acceptance rule (default: %(default)s)")
    grid.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    source = parser.add_argument_group("acceptance, for tokens per second; steps of the real rule are timed either way")
    source.add_argument("--acceptance", metavar="RATES", help="assumed, 0.8 or by position 0.9,0.7: labelled synthetic")
    source.add_argument("--prompts", type=Path, help="measured on these, as generate's --file")
    add_prompt_arguments(source, limit=16)
    add_model_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, help="JSON: every cell and what the device was measured at")
    output.add_argument("--plot", type=Path, help="draw measured times beside the roofline; needs matplotlib")
    output.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of some steps of every cell")


def run(options: argparse.Namespace) -> int:
    """Measures, prints and writes; returns the exit code."""
    batches, draft_lens, contexts = (
        parse_numbers(getattr(options, name), f"--{name.replace('_', '-')}")
        for name in ("batches", "draft_lens", "contexts")
    )
    rates = _assumed(options)

    import jax
    from rich.console import Console

    import bass_jax as bass
    from bass_jax.analysis.roofline_benchmark import run_bench
    from bass_jax.cli.output import output_console
    from bass_jax.cost_model import measure_device
    from bass_jax.runtime.xla_flags import use_compilation_cache

    notes = Console(stderr=True)
    use_compilation_cache()
    pair, tokenizer = load_models(options, options.pair, options.draft)
    spec, sampling = bass.SpecConfig(max(draft_lens), options.rule), bass.SamplingParams(options.temperature)
    with notes.status("measuring the device") as status:
        device = measure_device(pair.target.config.dtype)
        status.update("measuring the acceptance")
        if rates is None:
            rates = _measured(options, pair, tokenizer, spec, sampling)
        status.update("timing steps")
        cells = []
        for cell in run_bench(
            pair, spec, device, rates, batches=batches, draft_lens=draft_lens, contexts=contexts, sampling=sampling,
            trace=options.profile,
        ):  # fmt: skip
            cells.append(cell)
            status.update(f"timed: batch {cell.batch}, {cell.draft_len} drafts, context {cell.context}")
    record = {
        "date": datetime.date.today().isoformat(), "device": device.name, "jax": jax.__version__,
        "pair": options.pair, "draft": options.draft, "dtype": pair.target.config.dtype,
        "quantize": pair.target.config.quantize, "cache_dtype": pair.target.config.cache_dtype, "tp": options.tp,
        "measured_bandwidth": device.bandwidth, "measured_flops": device.peak_flops,
        "acceptance": list(rates), "is_acceptance_synthetic": options.acceptance is not None,
        "are_weights_random": tokenizer is None, "cells": [cell.as_record() for cell in cells],
    }  # fmt: skip
    _report(output_console(), record, cells)
    if options.output is not None:
        try:
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--output {options.output}: cannot be written: {error.strerror}") from None
        print(f"written: {options.output}")
    if options.plot is not None:
        from bass_jax.cli.bench_plot import plot_bench

        plot_bench(record, cells, options.plot)
        print(f"drawn: {options.plot}")
    if options.profile is not None:
        print(f"traced: {options.profile}")
    return 0


def _assumed(options) -> tuple[float, ...] | None:
    """Acceptance by position as the user assumes it, or None for it to be measured."""
    if (options.acceptance is None) == (options.prompts is None):
        raise ValueError("expected --acceptance or --prompts: one of them says how many drafts stand")
    if options.acceptance is None:
        if is_preset(options.pair):
            raise ValueError(f"--prompts: {options.pair} has random weights; expected --acceptance")
        return None
    try:
        rates = tuple(float(rate) for rate in options.acceptance.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"--acceptance {options.acceptance}: expected probabilities, as in 0.9,0.7")
    return rates


def _measured(options, pair, tokenizer, spec, sampling) -> tuple[float, ...]:
    """Acceptance by position on the prompts."""
    from bass_jax.analysis.profiler import measure_acceptance

    prompts = [tokenizer.encode_prompt(prompt) for prompt in prompts_of(options, options.prompts)]
    return measure_acceptance(pair, prompts, spec, sampling=sampling) or (0.0,)


def _report(out, record, cells) -> None:
    from rich.table import Table

    gigabytes = record["measured_bandwidth"] / 1e9
    table = Table(
        title=f"{record['pair']} on {record['device']}: {gigabytes:.0f} GB/s, "
        f"{record['measured_flops'] / 1e12:.2f} TFLOP/s measured"
    )
    columns = ("batch", "drafts", "context", "step ms", "roofline ms", "bandwidth", "host gap ms", "launches",
               "compile s", "plan GB", "peak GB", "tokens/s", "speed-up")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    regular = {(cell.batch, cell.context): cell for cell in cells if cell.draft_len == 0}
    for cell in cells:
        base = regular.get((cell.batch, cell.context))
        launches = "-" if cell.num_launches is None else f"{cell.num_launches}{'' if cell.is_one_graph else ' (split)'}"
        table.add_row(
            str(cell.batch), str(cell.draft_len), str(cell.context), f"{1e3 * cell.seconds:.2f}",
            f"{1e3 * cell.roofline_seconds:.2f}", f"{cell.bandwidth_share:.0%}", f"{1e3 * cell.host_gap_seconds:.2f}",
            launches, f"{cell.compile_seconds:.1f} ({cell.num_compiled})", f"{cell.planned_bytes / 1e9:.2f}",
            "-" if cell.peak_bytes is None else f"{cell.peak_bytes / 1e9:.2f}", f"{cell.tokens_per_second:.1f}",
            "-" if base is None or cell is base else f"{cell.tokens_per_second / base.tokens_per_second:.2f}x",
        )  # fmt: skip
    out.print(table)
    rates = ", ".join(f"{rate:.2f}" for rate in record["acceptance"])
    kind = "synthetic, assumed by --acceptance" if record["is_acceptance_synthetic"] else "measured on the prompts"
    out.print(f"Acceptance by position ({kind}): {rates}; tokens/s and speed-up follow from it.")
    if record["are_weights_random"]:
        out.print("Random weights: speeds are real, texts are not.")
