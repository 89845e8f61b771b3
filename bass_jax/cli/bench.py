"""``bass-jax bench``: the time of steps compared with the roofline, over batch, draft length and context."""

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_jax.cli import arguments as args
from bass_jax.cli.output import Cell as TableCell
from bass_jax.cli.output import Output, cell
from bass_jax.cli.prompt_arguments import prompt_arguments, prompts_of

if TYPE_CHECKING:
    from bass_jax.analysis.roofline_benchmark import Cell

EXAMPLES = r"""examples:
  bass-jax bench checkpoints/quickstart --prompts configs/demo_prompts.txt
  bass-jax bench checkpoints/quickstart --acceptance 0.6 --batches 1,8 --draft-lens 0,2,4 --contexts 216,1000
  bass-jax bench bass-7.8b --draft bass-draft-a-310m --acceptance 0.8 --batches 1,8,16 --output bench.json
  bass-jax bench llama-3.1-8b --draft ngram --quantize int8 --cache-dtype int8 --acceptance 0.5 --profile traces
A name of `bass-jax inspect presets` gives random weights of that shape, for which only the speeds have a meaning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    args.add_all(parser, args.argument("pair", "target and draft, or the name of a preset"), args.DRAFT)
    args.add_all(
        parser.add_argument_group("what is timed"),
        args.argument("--batches", "rows", "1,8", type=args.numbers),
        args.argument("--draft-lens", "drafts per step; 0 is regular decoding", "0,4", type=args.numbers),
        args.argument("--contexts", "committed tokens per row", "216", type=args.numbers),
        args.argument("--rule", "acceptance rule", "token"),
        args.TEMPERATURE,
    )
    args.add_all(
        parser.add_argument_group("acceptance, for tokens per second"),
        args.argument("--acceptance", "assumed, for all positions (0.8) or by position (0.9,0.7)", metavar="RATES"),
        args.argument("--prompts", "measure it on these prompts, as --file of generate", type=Path),
        *prompt_arguments(limit=16),
    )
    args.add_model_arguments(parser)
    args.add_all(
        parser.add_argument_group("output"),
        args.argument("--output", "JSON with every cell and the measured device", type=Path),
        args.argument("--plot", "image of measured times and the roofline; needs matplotlib", type=Path),
        args.argument("--profile", "write a profiler trace of some steps of every cell", type=Path, metavar="DIR"),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Measures, prints and writes; returns the exit code."""
    rates = _assumed_rates(options)

    import jax
    from rich.console import Console

    from bass_jax.analysis.profiler import measure_acceptance
    from bass_jax.analysis.roofline_benchmark import run_bench
    from bass_jax.config import SpecConfig
    from bass_jax.cost_model import measure_device
    from bass_jax.models import require_model
    from bass_jax.runtime.xla_flags import use_compilation_cache
    from bass_jax.sampling import SamplingParams

    use_compilation_cache()
    pair = args.load_models(options)
    config, tokenizer = require_model(pair.target, "a benchmark").config, pair.tokenizer
    spec, sampling = SpecConfig(max(options.draft_lens), options.rule), SamplingParams(options.temperature)
    with Console(stderr=True).status("measuring the device") as status:
        device = measure_device(config.dtype)
        if rates is None:
            status.update("measuring the acceptance")
            prompts = [tokenizer.encode_prompt(prompt) for prompt in prompts_of(options, options.prompts)]
            rates = measure_acceptance(pair, prompts, spec, sampling=sampling) or (0.0,)
        status.update("timing steps")
        grid = {name: getattr(options, name) for name in ("batches", "draft_lens", "contexts")}
        cells = []
        for one in run_bench(pair, spec, device, rates, **grid, sampling=sampling, trace=options.profile):
            cells.append(one)
            status.update(f"timed: batch {one.batch}, {one.draft_len} drafts, context {one.context}")
    record = {
        "date": datetime.date.today().isoformat(),
        "device": device.name,
        "jax": jax.__version__,
        **{name: getattr(options, name) for name in ("pair", "draft", "tp")},
        **{name: getattr(config, name) for name in ("dtype", "quantize", "cache_dtype")},
        "measured_bandwidth": device.bandwidth,
        "measured_flops": device.peak_flops,
        "acceptance": list(rates),
        "is_acceptance_synthetic": options.acceptance is not None,
        "are_weights_random": tokenizer is None,
        "cells": [one.as_record() for one in cells],
    }
    out.value("record", record)
    _report(out, record, cells)
    if options.output is not None:
        out.write(options.output, json.dumps(record, indent=1) + "\n")
    if options.plot is not None:
        from bass_jax.cli.plots import plot_bench

        out.note(plot_bench(record, cells, options.plot))
    if options.profile is not None:
        out.note(f"traced: {options.profile}")
    return 0


def _assumed_rates(options: argparse.Namespace) -> tuple[float, ...] | None:
    """Returns the assumed acceptance by position; None if it must be measured."""
    if (options.acceptance is None) == (options.prompts is None):
        raise ValueError("expected --acceptance or --prompts, for the number of accepted drafts")
    if options.acceptance is None:
        if args.is_preset(options.pair):
            raise ValueError(f"--prompts: {options.pair} has random weights; expected --acceptance")
        return None
    try:
        rates = tuple(float(rate) for rate in options.acceptance.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"--acceptance {options.acceptance}: expected probabilities, as in 0.9,0.7")
    return rates


def _report(out: Output, record: Mapping[str, Any], cells: "Sequence[Cell]") -> None:
    title = (
        f"{record['pair']} on {record['device']}: {record['measured_bandwidth'] / 1e9:.0f} GB/s, "
        f"{record['measured_flops'] / 1e12:.2f} TFLOP/s measured"
    )
    regular = {(one.batch, one.context): one for one in cells if one.draft_len == 0}

    def row(one: "Cell") -> dict[str, TableCell]:
        base = regular.get((one.batch, one.context), one)
        launches = "–" if one.num_launches is None else f"{one.num_launches}{'' if one.is_one_graph else ' (split)'}"
        return {
            "batch": cell(one.batch),
            "drafts": cell(one.draft_len),
            "context": cell(one.context),
            "step ms": cell(1e3 * one.seconds, ".2f"),
            "roofline ms": cell(1e3 * one.roofline_seconds, ".2f"),
            "bandwidth": cell(one.bandwidth_share, ".0%"),
            "host gap ms": cell(1e3 * one.host_gap_seconds, ".2f"),
            "launches": TableCell(one.num_launches, launches),
            "compile s": TableCell(one.compile_seconds, f"{one.compile_seconds:.1f} ({one.num_compiled})"),
            "plan GB": cell(one.planned_bytes / 1e9, ".2f"),
            "peak GB": cell(None if one.peak_bytes is None else one.peak_bytes / 1e9, ".2f"),
            "tokens/s": cell(one.tokens_per_second, ".1f"),
            "speed-up": cell(None if base is one else one.tokens_per_second / base.tokens_per_second, ".2f", "x"),
        }

    rows = [row(one) for one in cells]
    out.table(list(rows[0]), [list(one.values()) for one in rows], title, num_left=0)
    rates = ", ".join(f"{rate:.2f}" for rate in record["acceptance"])
    kind = "synthetic, from --acceptance" if record["is_acceptance_synthetic"] else "measured on the prompts"
    out.note(f"Acceptance by position ({kind}): {rates}. It determines tokens/s and speed-up.")
    if record["are_weights_random"]:
        out.note("The weights are random: only the speeds have a meaning.")
