"""Runs an experiment: decodes the batches that the run directory does not hold yet."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from bass_jax.cost_model import DEVICES, Device, measure_device
from bass_jax.experiments.decode import BatchDecoder
from bass_jax.experiments.environment import describe_environment
from bass_jax.experiments.experiment_config import ExperimentConfig
from bass_jax.experiments.load_pairs import MethodPairs
from bass_jax.experiments.plan import PlannedBatch, make_plan, share_of
from bass_jax.experiments.problems import encode_problems, load_problems
from bass_jax.experiments.run_directory import RunDirectory
from bass_jax.models import require_model


def run_experiment(
    config: ExperimentConfig,
    *,
    command: Sequence[str] | None = None,
    on_progress: Callable[[int, int, str], None] = lambda num_done, num_batches, note: None,
) -> Path:
    """Decodes the missing batches and returns the run directory.

    After a kill, the next call keeps the batches that were written and decodes the others. With `jax.distributed`
    initialized, every process decodes its share into files of its own in the same directory.

    Args:
        config: of the experiment.
        command: that started the run, for the record; default the command of this process.
        on_progress: called after each batch with the number of decoded batches, the number of batches, and a text
            about the last one.

    Raises:
        ValueError: if data, models or profiles cannot be loaded, or the directory holds another run.
    """
    process, num_processes = jax.process_index(), jax.process_count()
    task, problems = load_problems(config.task)
    whole = make_plan(config, len(problems))
    plan = share_of(whole, process, num_processes)
    with RunDirectory(config.output_dir, config, process=process, num_processes=num_processes) as directory:
        if all(batch.key in directory.done for batch in plan):
            return directory.path
        pairs = MethodPairs(config.pair)
        prompts, stop_strings = encode_problems(task, problems, pairs.base, config.task)
        device = _reference_device(config, require_model(pairs.base.target, "an experiment").config.dtype)
        session = {
            "command": list(sys.argv if command is None else command),
            **describe_environment(),
            "num_batches": Counter(batch.variant.label for batch in whole),
            "peak_flops": device.peak_flops,
            "peak_is": "data sheet" if device in DEVICES.values() else "measured",
        }
        directory.begin(session)
        decoder = BatchDecoder(config, problems, prompts, stop_strings, device)
        for index, batch in enumerate(plan):
            if batch.key in directory.done:
                continue
            start = directory.ends.get(batch.group_key, 0.0)
            trace = _trace_file(directory.path, batch) if config.trace and _is_traced(batch) else None
            record, samples = decoder.decode(batch, pairs.of(batch.variant.method), start, trace)
            directory.commit(record, samples)
            rate = sum(sample["num_tokens"] for sample in samples) / (record.get("decode") or float("inf"))
            on_progress(index + 1, len(plan), f"{batch.variant.label}: {rate:.0f} tokens/s")
        if config.trace and num_processes == 1:
            _join_traces(directory.path, plan)
        return directory.path


def _reference_device(config: ExperimentConfig, dtype: str) -> Device:
    """Returns the device whose peak FLOP/s utilization is relative to."""
    if config.device is not None:
        return DEVICES[config.device]
    kind = jax.devices()[0].device_kind.lower()
    return next((device for name, device in DEVICES.items() if name in kind), None) or measure_device(dtype)


def _is_traced(batch: PlannedBatch) -> bool:
    return batch.variant.method.step == "speculate"


def _trace_file(directory: Path, batch: PlannedBatch) -> Path:
    name = f"{batch.seed}-{batch.repeat}-{batch.group:05}-{batch.part:03}.jsonl"
    return directory / "traces" / _file_name(batch.variant.label) / name


def _join_traces(directory: Path, plan: Sequence[PlannedBatch]) -> None:
    """Writes one trace per variant, its batches in the order of the plan."""
    files: dict[str, list[Path]] = {}
    for batch in filter(_is_traced, plan):
        files.setdefault(batch.variant.label, []).append(_trace_file(directory, batch))
    for label, parts in files.items():
        with (directory / f"trace-{_file_name(label)}.jsonl").open("wb") as joined:
            for part in parts:
                if part.exists():  # A batch that began over the time budget has no trace.
                    joined.write(part.read_bytes())


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.-]+", "_", label)
