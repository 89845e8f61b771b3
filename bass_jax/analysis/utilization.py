"""Waste: what a run computed and read for the tokens it emitted, and what share of the device that used."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bass_jax.cost_model import Device, PassShape
from bass_jax.decoding.metrics import step_counts
from bass_jax.decoding.state import StepInfo


@dataclasses.dataclass(frozen=True)
class Utilization:
    """FLOPs and bytes of a run, from shapes and counts; what a kernel skips or repeats is not seen.

    Attributes:
        flops_per_token: computed per emitted token, everything counted: padding and drafts too.
        bytes_per_token: read per emitted token: the weights once per pass, the rows' caches.
        useful: share of the device's peak, counting the target's work on emitted tokens alone.
        verified: counting all positions that the target scored for running rows.
        verified_and_draft: counting the draft's work too.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 4; which of the three it reports is not known.
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
    """Adds up the work of a run.

    Args:
        infos: of one batch.
        seconds: of decoding.
        prompt_lengths: ``[rows]``; rows past them are fillers.
        device: its peak.
        target: shape of the target's passes.
        draft: shape of the draft's; None for a drafter that is no model.

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
        read += target.weight_bytes + (lengths * target.cache_bytes).sum()
        if draft is not None and (num_passes := int(step.num_drafted.max(initial=0))):
            of_draft = draft.flops + lengths * draft.attention_flops
            drafted += (step.num_drafted * of_draft).sum()
            computed += (num_passes + 1) * of_draft.sum()  # the first pass reads two tokens
            read += num_passes * (draft.weight_bytes + (lengths * draft.cache_bytes).sum())
        lengths = lengths + step.num_emitted
    num_emitted = sum(int(step.num_emitted.sum()) for step in steps)
    available = seconds * device.peak_flops
    return Utilization(
        flops_per_token=float(computed / max(num_emitted, 1)),
        bytes_per_token=float(read / max(num_emitted, 1)),
        useful=float(useful / available),
        verified=float(verified / available),
        verified_and_draft=float((verified + drafted) / available),
    )
