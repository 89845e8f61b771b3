"""The naive way to batch speculation: all rows advance by the same count."""

import jax.numpy as jnp

from bass_jax.config import SpecConfig
from bass_jax.pair import Pair
from bass_jax.state import FinishReason, SpecState, StepInfo
from bass_jax.step import speculate_step
from bass_jax.survey import keep_fewer

RULES = ("greedy", "token")
"""Rules that judge draft after draft, so that a row may be cut where another one stopped and keep the target's law."""


def lockstep_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Drafts and verifies like `bass_jax.speculate_step`, then commits no more per row than its shortest row emits.

    One rejection stops everybody. It is the baseline that ragged batches are an answer to, and nothing else: the
    tokens that other rows had earned are drafted and verified again. Rows that end in this step hold nobody back.

    Raises:
        ValueError: when traced, if the rule looks at later drafts: a cut would then change the law.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 3.
    """
    if spec.acceptance not in RULES and not spec.acceptance.startswith("synthetic"):
        raise ValueError(f"acceptance={spec.acceptance!r}: expected one of {RULES} in lock step")
    start = state.lengths
    state, info = speculate_step(pair, state, spec)
    goes_on = info.is_active & (info.finish == FinishReason.RUNNING)
    shortest = jnp.where(goes_on, info.num_emitted, info.tokens.shape[1]).min()
    return keep_fewer(pair, state, info, start, shortest)
