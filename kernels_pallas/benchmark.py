"""Times both ops on the device at hand: `python -m kernels_pallas.benchmark`.

A table for people, one JSON line last. Attention: over batch, new tokens, capacity and spread of the lengths, then
every named spec, each implementation and form against XLA and cuDNN. Acceptance: each implementation against one
reading of the logits. Every result is compared with XLA's before it is timed.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.acceptance.verdict import KernelSampling
from kernels_pallas.arg_specs import (
    ACCEPTANCE_SPECS,
    ATTENTION_SPECS,
    SPREADS,
    AcceptanceSpec,
    AttentionSpec,
    LengthSpread,
    acceptance_arguments,
    attention_arguments,
)
from kernels_pallas.attention.cudnn import prefix_and_merge
from kernels_pallas.ops import masked_acceptance, ragged_attention
from kernels_pallas.targets import current_target
from kernels_pallas.timing import copy_bandwidth, measure

CENTRE = next(spec for spec in ATTENTION_SPECS if spec.name == "llama3_8b")
BATCHES, TOKENS, CAPACITIES = (1, 4, 16, 64), (1, 5, 9, 17, 33), (2048, 8192, 32768)
LONGEST_RATIOS = (1, 2, 4, 8, 16)
SAMPLINGS = {"greedy": (0.0, 0, 1.0, 0.0), "plain": (1.0, 0, 1.0, 0.0), "top_p": (0.8, 0, 0.95, 0.0)}


def attention_grid(is_smoke: bool) -> list[AttentionSpec]:
    """The shapes to time: one axis at a time around a center."""
    if is_smoke:
        return [dataclasses.replace(CENTRE.reduced(), batch=2, capacity=64, dtype="float32")]
    centre = dataclasses.replace(CENTRE, batch=16)
    axes = {"batch": BATCHES, "num_tokens": TOKENS, "capacity": CAPACITIES}
    grid = [dataclasses.replace(centre, **{axis: value}) for axis, values in axes.items() for value in values]
    return list(dict.fromkeys(grid))


@functools.cache
def attention_runners(spec: AttentionSpec, is_smoke: bool) -> dict[str, Callable[..., jax.Array]]:
    """Jitted functions of `attention_arguments` by name; `xla` first, `cudnn` next: what the others are held to.

    cuDNN takes the transposed caches besides, so that its layout costs it nothing; a smoke run has XLA in its place.
    """

    def ours(arguments, *_, **options):
        return ragged_attention(**arguments, **spec.options, interpret=is_smoke, **options)

    def cudnn(arguments, k_cache, v_cache):
        if spec.is_quantized or any(value is not None for value in spec.options.values()):
            raise NotImplementedError("cuDNN's prefix is taken without a window, a soft cap or an INT8 cache")
        implementation = "xla" if is_smoke else "cudnn"
        return prefix_and_merge(arguments["q"], k_cache, v_cache, arguments["lengths"], implementation=implementation)

    runners: dict[str, Callable] = {"xla": functools.partial(ours, implementation="xla"), "cudnn": cudnn}
    for implementation in ("triton",) if is_smoke else ("triton", "mosaic_gpu"):
        for form in ("ragged", "pad", "split"):
            runners[f"{implementation} {form}"] = functools.partial(ours, implementation=implementation, form=form)
    return {name: jax.jit(runner) for name, runner in runners.items()}


def time_attention(spec: AttentionSpec, lengths: np.ndarray, bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """One record per implementation and form that can run `spec`, all queries real."""
    arguments = attention_arguments(spec, lengths=lengths)
    del arguments["num_queries"]
    operands = (arguments, *(jnp.swapaxes(arguments[name], 1, 2) for name in ("k_cache", "v_cache")))
    expected, baselines_us = None, {}
    num_bytes = spec.cache_bytes(lengths)
    for name, runner in attention_runners(spec, is_smoke).items():
        try:
            out = np.asarray(runner(*operands), np.float32)
        # jax says with a RuntimeError that cuDNN is not there or has no plan for these shapes.
        except (NotImplementedError, RuntimeError) as error:
            if name != "cudnn" and not isinstance(error, NotImplementedError):
                raise
            continue
        expected = out if expected is None else expected
        timing = measure(runner, *operands, **({"num_calls": 1, "num_repeats": 2} if is_smoke else {}))
        if name in ("xla", "cudnn"):
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
    """Every shape of the grid with every spread of lengths."""
    for spec in attention_grid(is_smoke):
        longest = spec.capacity - spec.num_tokens
        for spread in SPREADS:
            lengths = spread.lengths(spec.batch, spec.capacity // 4, longest)
            for record in time_attention(spec, lengths, bandwidth, is_smoke):
                yield {**record, "lengths": spread.name}


def sweep_specs(bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """Every named spec, with lengths spread evenly."""
    for spec in () if is_smoke else ATTENTION_SPECS:
        lengths = LengthSpread("uniform").lengths(spec.batch, spec.capacity // 4, spec.capacity - spec.num_tokens)
        for record in time_attention(spec, lengths, bandwidth, is_smoke):
            yield {**record, "lengths": "uniform"}


def sweep_crossover(bandwidth: float, is_smoke: bool) -> Iterator[dict]:
    """PAD, SPLIT and ragged while one row of the batch grows at the same mean length."""
    spec = attention_grid(is_smoke)[0] if is_smoke else dataclasses.replace(CENTRE, batch=16, capacity=32768)
    for ratio in LONGEST_RATIOS:
        mean = spec.capacity // (2 * max(LONGEST_RATIOS))
        longest = min(ratio * mean, spec.batch * mean)
        lengths = np.full(spec.batch, (spec.batch * mean - longest) // max(spec.batch - 1, 1), np.int32)
        lengths[0] = longest
        for record in time_attention(spec, np.maximum(lengths, 1), bandwidth, is_smoke):
            yield {**record, "lengths": "crossover", "longest_over_mean": longest / mean}


def sweep_acceptance(is_smoke: bool) -> Iterator[dict]:
    """Every spec greedy, with plain sampling and with top-p, against one reading of the logits."""
    specs: tuple[AcceptanceSpec, ...] = ACCEPTANCE_SPECS[:1] if is_smoke else ACCEPTANCE_SPECS
    options: dict[str, Any] = {"num_calls": 1, "num_repeats": 2} if is_smoke else {}
    for spec in specs:
        spec = spec.reduced() if is_smoke else spec
        arguments = acceptance_arguments(spec)
        read = measure(jax.jit(lambda logits: logits.max()), arguments["target_logits"], **options)
        for sampling, values in SAMPLINGS.items():
            dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
            rows = (jnp.full((spec.batch,), value, dtype) for value, dtype in zip(values, dtypes, strict=True))
            arguments["sampling"] = KernelSampling(*rows)
            expected, xla_us = None, 0.0
            for implementation in ("xla", "triton") if is_smoke else ("xla", "triton", "mosaic_gpu"):
                run = jax.jit(functools.partial(masked_acceptance, implementation=implementation, interpret=is_smoke))
                call = jax.jit(lambda arguments, run=run: run(**arguments))
                try:
                    tokens = np.asarray(call(arguments).next_token)
                except NotImplementedError:
                    continue
                expected = tokens if expected is None else expected
                timing = measure(call, arguments, **options)
                xla_us = xla_us or timing.median_us
                yield {
                    "op": "masked_acceptance",
                    "name": implementation,
                    "spec": spec.name,
                    "sampling": sampling,
                    "median_us": timing.median_us,
                    "spread_us": timing.spread_us,
                    "over_one_reading": timing.median_us / read.median_us,
                    "speedup_over_xla": xla_us / timing.median_us,
                    "same_tokens": bool((tokens == expected).all()),
                }


def row_of(record: dict) -> str:
    """A record as a line of the table."""
    if record["op"] == "masked_acceptance":
        what = f"{record['spec']} {record['sampling']}"
        rest = (
            f"{record['over_one_reading']:6.2f} readings  {record['speedup_over_xla']:6.2f}x xla  "
            f"same tokens {record['same_tokens']}"
        )
    else:
        what = f"{record['spec']} B{record['batch']} T{record['num_tokens']} S{record['capacity']} {record['lengths']}"
        rest = (
            f"{record['bytes'] / 1e6:9.1f} MB  {record['copy_share']:5.1%} of copy  "
            f"{record['speedup_over_xla']:6.2f}x xla  {record.get('speedup_over_cudnn', float('nan')):6.2f}x cudnn  "
            f"error {record['error']:.1e}"
        )
    return f"{what:44} {record['name']:18} {record['median_us']:10.1f} +- {record['spread_us']:<8.1f} us  {rest}"


def main(argv: list[str] | None = None) -> None:
    """Runs the sweeps; see the module."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.benchmark", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in interpreters, on any device")
    parser.add_argument("--plot", help="also draw time over length spread to this file (needs matplotlib)")
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
    )
    for record in (record for sweep in sweeps for record in sweep):
        records.append(record)
        print(row_of(record), flush=True)
    if arguments.plot:
        from kernels_pallas.benchmark_plot import plot_crossover

        plot_crossover(records, arguments.plot)
    device = {"device": target.device_kind, "jax": jax.__version__, "copy_bytes_per_s": bandwidth}
    print(json.dumps({**device, "is_smoke": arguments.smoke, "records": records}))


if __name__ == "__main__":
    main()
