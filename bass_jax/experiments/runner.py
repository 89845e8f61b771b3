"""Carries out an experiment: whatever of it the run directory does not hold yet."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bass_jax.cost_model import DEVICES, Device, measure_device
from bass_jax.experiments.decode import BatchDecoder
from bass_jax.experiments.environment import describe_environment
from bass_jax.experiments.experiment_config import ExperimentConfig
from bass_jax.experiments.load_pairs import Pairs
from bass_jax.experiments.plan import Batch, make_plan, share_of
from bass_jax.experiments.problems import encode_problems, load_problems, stop_strings_of
from bass_jax.experiments.run_directory import RunDirectory


class RunProgress(NamedTuple):
    """How far a run is."""

    num_done: int  # batches
    num_batches: int
    batch: Batch  # the one that has just ended
    tokens_per_second: float


def run_experiment(
    config: ExperimentConfig,
    *,
    command: Sequence[str] | None = None,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> Path:
    """Decodes what is still missing, batch by batch, and returns the run directory.

    Call it again after a kill: a batch that was written is not decoded again, one that was not starts anew. With
    `jax.distributed` initialized, every process decodes its share into files of its own in the same directory.

    Args:
        config: of the experiment.
        command: that started it, for the record; default this process' own.
        on_progress: called after each batch.

    Raises:
        ValueError: if anything that the configuration names cannot be had, or the directory holds another run.
    """
    process, num_processes = jax.process_index(), jax.process_count()
    task, problems = load_problems(config.task)
    plan = share_of(make_plan(config, len(problems)), process, num_processes)
    with RunDirectory(config.output_dir, config, process=process, num_processes=num_processes) as directory:
        if all(batch.key in directory.done for batch in plan):
            return directory.path
        pairs = Pairs(config.pair)
        prompts, is_chat = encode_problems(problems, pairs.base, config.task)
        device = _device(config, pairs.base.target.config.dtype)
        directory.begin({
            "command": list(sys.argv if command is None else command), **describe_environment(),
            "peak_flops": device.peak_flops, "peak_is": "measured" if device not in DEVICES.values() else "data sheet",
        })  # fmt: skip
        stops = stop_strings_of(task, pairs.base, is_chat=is_chat)
        decoder = BatchDecoder(config, problems, prompts, stops, device)
        for index, batch in enumerate(plan):
            if batch.key in directory.done:
                continue
            trace = None
            if config.trace and batch.variant.method.step == "speculate":
                trace = _trace_file(directory.path, batch)
            start = directory.ends.get(batch.key[:4], 0.0)
            record, samples = decoder.decode(batch, pairs.of(batch.variant.method), start, trace)
            directory.commit(record, samples)
            num_emitted = sum(sample["num_tokens"] for sample in samples)
            seconds = record.get("decode", 0.0)
            on_progress(RunProgress(index + 1, len(plan), batch, num_emitted / seconds if seconds else 0.0))
        if config.trace and num_processes == 1:
            _join_traces(directory.path, plan)
        return directory.path


def _device(config: ExperimentConfig, dtype: str) -> Device:
    """Whose peak the utilization is a share of."""
    if config.device is not None:
        return DEVICES[config.device]
    kind = jax.devices()[0].device_kind.lower()
    for name, device in DEVICES.items():
        if name in kind:
            return device
    return measure_device(dtype)


def _trace_file(directory: Path, batch: Batch) -> Path:
    name = f"{batch.seed}-{batch.repeat}-{batch.group:05}-{batch.part:03}.jsonl"
    return directory / "traces" / _file_name(batch.variant.label) / name


def _join_traces(directory: Path, plan: Sequence[Batch]) -> None:
    """Writes one trace per variant, its batches in the plan's order."""
    for label in dict.fromkeys(batch.variant.label for batch in plan if batch.variant.method.step == "speculate"):
        with (directory / f"trace-{_file_name(label)}.jsonl").open("wb") as joined:
            for batch in plan:
                if batch.variant.label == label:
                    joined.write(_trace_file(directory, batch).read_bytes())


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.-]+", "_", label)
