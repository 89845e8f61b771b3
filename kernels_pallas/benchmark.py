"""Times the ops on the present device: `python -m kernels_pallas.benchmark`.

Prints a table, and one JSON line at the end. Attention is timed over batch sizes, new tokens, capacities and spreads of
the lengths, and for every named spec, with each implementation and form. Acceptance is compared with one reading of the
logits, and grouped products with one reading of the matrices of groups with rows. Every result is compared with XLA's
before it is timed.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.acceptance.types import KernelSampling
from kernels_pallas.arg_specs import (
    ACCEPTANCE_SPECS,
    ATTENTION_SPECS,
    GROUPED_SPECS,
    SPREADS,
    AcceptanceSpec,
    AttentionSpec,
    GroupedSpec,
    acceptance_arguments,
    attention_arguments,
    grouped_arguments,
    spread_lengths,
)
from kernels_pallas.ops import grouped_product, masked_acceptance, ragged_attention
from kernels_pallas.targets import current_target
from kernels_pallas.timing import RepeatedCalls, compile_calls, copy_bandwidth, time_calls

CENTER = next(spec for spec in ATTENTION_SPECS if spec.name == "llama3_8b")
BATCHES, TOKENS, CAPACITIES = (1, 4, 16, 64), (1, 5, 9, 17, 33), (2048, 8192, 32768)
LONGEST_RATIOS = (1, 2, 4, 8, 16)
SAMPLINGS = {"greedy": (0.0, 0, 1.0, 0.0), "plain": (1.0, 0, 1.0, 0.0), "top_p": (0.8, 0, 0.95, 0.0)}
SMOKE_CALLS, SMOKE_REPEATS = {"num_calls": 1}, {"num_repeats": 2}

Baseline = Callable[[AttentionSpec, dict[str, jax.Array], bool], tuple[Callable[..., jax.Array], tuple]]
"""Returns a jitted function and its operands for (spec, arguments of the op without `num_queries`, whether this is a
smoke run); raises `NotImplementedError` for specs that it does not support."""
BASELINES: dict[str, Baseline] = {}
"""Other implementations of attention to time, by name; see `benchmarks/kernels_cudnn.py`."""


def attention_grid(is_smoke: bool) -> list[AttentionSpec]:
    """Returns the shapes to time: one axis at a time around a center."""
    if is_smoke:
        return [dataclasses.replace(CENTER.reduced(), batch=2, capacity=64, dtype="float32")]
    center = dataclasses.replace(CENTER, batch=16)
    axes = {"batch": BATCHES, "num_tokens": TOKENS, "capacity": CAPACITIES}
    grid = [dataclasses.replace(center, **{axis: value}) for axis, values in axes.items() for value in values]
    return list(dict.fromkeys(grid))


def compile_choices(
    op: Callable[..., Any], choices: Mapping[str, dict[str, Any]], arguments: dict[str, Any], is_smoke: bool
) -> dict[str, RepeatedCalls]:
    """Compiles an op of named arguments, or of their shapes, with each choice of options that supports them."""

    def compile_choice(options: dict[str, Any]) -> RepeatedCalls | None:
        run = functools.partial(op, **options, interpret=is_smoke)
        try:
            return compile_calls(lambda arguments: run(**arguments), arguments, **(SMOKE_CALLS if is_smoke else {}))
        except NotImplementedError:
            return None

    with ThreadPoolExecutor() as threads:
        compiled = zip(choices, threads.map(compile_choice, choices.values()), strict=True)
        return {name: calls for name, calls in compiled if calls is not None}


@functools.cache
def compile_attention(spec: AttentionSpec, is_smoke: bool) -> dict[str, RepeatedCalls]:
    """Compiles each implementation and form that supports `spec`, `xla` first."""
    choices: dict[str, dict[str, Any]] = {"xla": {"implementation": "xla"}}
    for implementation in ("triton",) if is_smoke else ("triton", "mosaic_gpu"):
        for form in ("ragged", "pad", "split"):
            choices[f"{implementation} {form}"] = {"implementation": implementation, "form": form}

    shapes = jax.eval_shape(lambda: attention_arguments(spec))
    del shapes["num_queries"]
    return compile_choices(functools.partial(ragged_attention, **spec.options), choices, shapes, is_smoke)


def time_attention(spec: AttentionSpec, lengths: np.ndarray, bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """Yields one record per implementation and form that supports `spec`; all queries are real."""
    arguments = attention_arguments(spec, lengths=lengths)
    del arguments["num_queries"]
    num_bytes = spec.cache_bytes(lengths)
    candidates = [(name, calls, (arguments,)) for name, calls in compile_attention(spec, is_smoke).items()]
    baselines = []
    for name, make in BASELINES.items():
        with contextlib.suppress(NotImplementedError):
            function, operands = make(spec, arguments, is_smoke)
            baselines.append((name, compile_calls(function, *operands, **(SMOKE_CALLS if is_smoke else {})), operands))
    expected, baselines_us = None, {}
    # XLA first, because the others are compared with it, then the baselines.
    for name, calls, operands in [*candidates[:1], *baselines, *candidates[1:]]:
        out = np.asarray(calls(*operands), np.float32)
        expected = out if expected is None else expected
        timing = time_calls(calls, *operands, **(SMOKE_REPEATS if is_smoke else {}))
        if name == "xla" or name in BASELINES:
            baselines_us[name] = timing.median_us
        yield {
            "op": "ragged_attention",
            "name": name,
            "spec": spec.name,
            "batch": spec.batch,
            "num_tokens": spec.num_tokens,
            "capacity": spec.capacity,
            "mean_length": float(lengths.mean()),
            "longest": int(lengths.max()),
            "median_us": timing.median_us,
            "spread_us": timing.spread_us,
            "bytes": num_bytes,
            "copy_share": num_bytes / (timing.median_us * 1e-6) / bandwidth,
            "error": float(np.abs(out - expected).max()),
            **{f"speedup_over_{baseline}": us / timing.median_us for baseline, us in baselines_us.items()},
        }


def sweep_attention(bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """Times every shape of the grid with every spread of lengths."""
    for spec in attention_grid(is_smoke):
        longest = spec.capacity - spec.num_tokens
        for spread in SPREADS:
            lengths = spread_lengths(spread, spec.batch, spec.capacity // 4, longest)
            for record in time_attention(spec, lengths, bandwidth, is_smoke):
                yield {**record, "lengths": spread}


def sweep_specs(bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """Times every named spec with evenly spread lengths."""
    for spec in () if is_smoke else ATTENTION_SPECS:
        lengths = spread_lengths("uniform", spec.batch, spec.capacity // 4, spec.capacity - spec.num_tokens)
        for record in time_attention(spec, lengths, bandwidth, is_smoke):
            yield {**record, "lengths": "uniform"}


def sweep_crossover(bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """Times all forms while one row of the batch grows and the mean length stays the same."""
    spec = attention_grid(is_smoke)[0] if is_smoke else dataclasses.replace(CENTER, batch=16, capacity=32768)
    for ratio in LONGEST_RATIOS:
        mean = spec.capacity // (2 * max(LONGEST_RATIOS))
        longest = min(ratio * mean, spec.batch * mean)
        lengths = np.full(spec.batch, (spec.batch * mean - longest) // max(spec.batch - 1, 1), np.int32)
        lengths[0] = longest
        for record in time_attention(spec, np.maximum(lengths, 1), bandwidth, is_smoke):
            yield {**record, "lengths": "crossover", "longest_over_mean": longest / mean}


def sweep_acceptance(is_smoke: bool) -> Iterator[dict]:
    """Times every spec greedy, with plain sampling and with top-p, relative to one reading of the logits."""
    specs: tuple[AcceptanceSpec, ...] = ACCEPTANCE_SPECS[:1] if is_smoke else ACCEPTANCE_SPECS
    options = SMOKE_REPEATS if is_smoke else {}
    choices = {
        name: {"implementation": name} for name in (("xla", "triton") if is_smoke else ("xla", "triton", "mosaic_gpu"))
    }
    for spec in specs:
        spec = spec.reduced() if is_smoke else spec
        arguments = acceptance_arguments(spec)
        logits = arguments["target_logits"]
        reading = compile_calls(lambda logits: logits.max(), logits, **(SMOKE_CALLS if is_smoke else {}))
        read = time_calls(reading, logits, **options)
        compiled = compile_choices(masked_acceptance, choices, arguments, is_smoke)
        for sampling, values in SAMPLINGS.items():
            dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
            rows = (jnp.full((spec.batch,), value, dtype) for value, dtype in zip(values, dtypes, strict=True))
            arguments["sampling"] = KernelSampling(*rows)
            expected, xla_us = None, 0.0
            for name, calls in compiled.items():
                tokens = np.asarray(calls(arguments).next_token)
                expected = tokens if expected is None else expected
                timing = time_calls(calls, arguments, **options)
                xla_us = xla_us or timing.median_us
                yield {
                    "op": "masked_acceptance",
                    "name": name,
                    "spec": spec.name,
                    "sampling": sampling,
                    "median_us": timing.median_us,
                    "spread_us": timing.spread_us,
                    "over_one_reading": timing.median_us / read.median_us,
                    "speedup_over_xla": xla_us / timing.median_us,
                    "same_tokens": bool((tokens == expected).all()),
                }


def sweep_grouped(bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """Times every spec of a grouped product with random groups."""
    specs = (GroupedSpec("smoke", 20, 4, 32, 64),) if is_smoke else GROUPED_SPECS
    for spec in specs:
        arguments = grouped_arguments(spec)
        num_bytes = spec.touched_bytes(np.asarray(arguments["groups"]))
        expected, xla_us = None, 0.0
        choices = {name: {"implementation": name} for name in ("xla", "triton")}
        for name, calls in compile_choices(grouped_product, choices, arguments, is_smoke).items():
            out = np.asarray(calls(arguments))
            expected = out if expected is None else expected
            timing = time_calls(calls, arguments, **(SMOKE_REPEATS if is_smoke else {}))
            xla_us = xla_us or timing.median_us
            yield {
                "op": "grouped_product",
                "name": name,
                "spec": spec.name,
                "median_us": timing.median_us,
                "spread_us": timing.spread_us,
                "bytes": num_bytes,
                "copy_share": num_bytes / (timing.median_us * 1e-6) / bandwidth,
                "error": float(np.abs(out - expected).max()),
                "speedup_over_xla": xla_us / timing.median_us,
            }


def format_record(record: dict) -> str:
    """Returns a record as a line of the table."""
    if record["op"] == "masked_acceptance":
        what = f"{record['spec']} {record['sampling']}"
        rest = f"{record['over_one_reading']:6.2f} readings  same tokens {record['same_tokens']}"
    else:
        what = record["spec"]
        if record["op"] == "ragged_attention":
            what += f" B{record['batch']} T{record['num_tokens']} S{record['capacity']} {record['lengths']}"
        rest = f"{record['bytes'] / 1e6:9.1f} MB  {record['copy_share']:5.1%} of copy  error {record['error']:.1e}"
    prefix = "speedup_over_"
    speedups = [f"{value:6.2f}x {key.removeprefix(prefix)}" for key, value in record.items() if key.startswith(prefix)]
    time = f"{record['median_us']:10.1f} +- {record['spread_us']:<8.1f} us"
    return "  ".join((f"{what:44} {record['name']:18} {time}", rest, *speedups))


def plot_crossover(records: list[dict], path: str) -> None:
    """Plots the time per call over (longest length / mean length); needs matplotlib.

    Args:
        records: Records of the benchmark; those of `sweep_crossover` are plotted.
        path: Image file; its suffix determines the format.
    """
    from matplotlib.figure import Figure

    lines = collections.defaultdict(list)
    for record in records:
        if record.get("lengths") == "crossover":
            lines[record["name"]].append((record["longest_over_mean"], record["median_us"]))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xlabel="longest length / mean length", ylabel="time per call (µs)", xscale="log", yscale="log")
    axes.set_title("Ragged attention at one mean length")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Runs all sweeps."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.benchmark", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="run tiny shapes in interpreters, on any device")
    parser.add_argument("--plot", help="also plot the time over the spread of lengths to this file (needs matplotlib)")
    arguments = parser.parse_args(argv)
    target = current_target()
    if target.platform != "gpu" and not arguments.smoke:
        parser.error(f"times GPU kernels, and the default device is {target.device_kind}; --smoke runs anywhere")

    bandwidth = copy_bandwidth(1 << 20 if arguments.smoke else 1 << 30)
    print(f"{target.device_kind}, jax {jax.__version__}, copy bandwidth {bandwidth / 1e12:.3f} TB/s")
    records = []
    sweeps = (
        sweep_attention(bandwidth, arguments.smoke),
        sweep_specs(bandwidth, arguments.smoke),
        sweep_crossover(bandwidth, arguments.smoke),
        sweep_acceptance(arguments.smoke),
        sweep_grouped(bandwidth, arguments.smoke),
    )
    for record in (record for sweep in sweeps for record in sweep):
        records.append(record)
        print(format_record(record), flush=True)
    if arguments.plot:
        plot_crossover(records, arguments.plot)
    device = {"device": target.device_kind, "jax": jax.__version__, "copy_bytes_per_s": bandwidth}
    print(json.dumps({**device, "is_smoke": arguments.smoke, "records": records}))


if __name__ == "__main__":
    main()
