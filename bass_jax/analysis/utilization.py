"""The FLOPs and bytes per emitted token of a run, and the share of the device's peak that it used."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bass_jax.cost_model import Device, PassShape
from bass_jax.decoding.metrics import step_counts
from bass_jax.decoding.state import StepInfo


@dataclasses.dataclass(frozen=True)
class Utilization:
    """FLOPs and bytes of a run, computed from shapes and counts. Work that a kernel skips or repeats is not known.

    Attributes:
        flops_per_token: all computed FLOPs per emitted token, including padding and drafting.
        bytes_per_token: bytes read per emitted token: the weights once per pass, and the caches of all rows.
        useful: model FLOPs utilization (MFU): the target's FLOPs for emitted tokens, divided by the peak.
        verified: the target's FLOPs for all positions that it scored for running rows, divided by the peak.
        verified_and_draft: as `verified`, plus the FLOPs of the draft model.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 4, reports a utilization without defining it.
    """

    flops_per_token: float
    bytes_per_token: float
    useful: float
    verified: float
    verified_and_draft: float


def measure_utilization(
    infos: Sequence[StepInfo] | StepInfo,
    seconds: float,
    prompt_lengths: Sequence[int] | np.ndarray,
    device: Device,
    target: PassShape,
    draft: PassShape | None = None,
) -> Utilization:
    """Sums the work of a run.

    Args:
        infos: of one fixed batch.
        seconds: decode time.
        prompt_lengths: ``[rows]``; further rows of the batch are padding rows.
        device: its peak is used.
        target: work of a target pass.
        draft: work of a pass of the draft model; None for a drafter without a model.

    Raises:
        ValueError: if `seconds` is not positive, or there are more prompts than rows.
    """
    if seconds <= 0:
        raise ValueError(f"seconds={seconds}: expected above 0")
    steps = step_counts(infos)
    num_rows = len(steps[0].is_active)
    if len(prompt_lengths) > num_rows:
        raise ValueError(f"prompt_lengths has {len(prompt_lengths)} values: expected at most {num_rows}, one per row")
    lengths = np.ones(num_rows, np.int64)
    lengths[: len(prompt_lengths)] = prompt_lengths
    useful = verified = drafted = computed = read = 0.0
    for step in steps:
        per_position = target.flops + lengths * target.attention_flops
        num_verified = np.where(step.is_active, step.num_drafted + 1, 0)
        useful += (step.num_emitted * per_position).sum()
        verified += (num_verified * per_position).sum()
        computed += step.width * per_position.sum()
        read += target.read_bytes(step.width * num_rows) + (lengths * target.cache_bytes + target.state_bytes).sum()
        if draft is not None and (num_passes := int(step.num_drafted.max(initial=0))):
            per_draft = draft.flops + lengths * draft.attention_flops
            drafted += (step.num_drafted * per_draft).sum()
            computed += (num_passes + 1) * per_draft.sum()  # the first pass reads two tokens
            read += num_passes * (draft.read_bytes(num_rows) + (lengths * draft.cache_bytes).sum())
        lengths = lengths + step.num_emitted
    num_emitted = max(sum(int(step.num_emitted.sum()) for step in steps), 1)
    available = seconds * device.peak_flops
    return Utilization(
        flops_per_token=float(computed / num_emitted),
        bytes_per_token=float(read / num_emitted),
        useful=float(useful / available),
        verified=float(verified / available),
        verified_and_draft=float((verified + drafted) / available),
    )
