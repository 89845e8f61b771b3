"""The steps of a run, compiled per draft-length bucket."""

import dataclasses
from collections.abc import Callable

from bass_jax.config import SpecConfig
from bass_jax.decoding.baselines import exhaustive_step, synchronized_step
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.state import SpecState
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.policies import Policy, find_policy
from bass_jax.policies.protocol import policy_buckets
from bass_jax.runtime.checks import check_choice
from bass_jax.runtime.jit_cache import JIT_CACHE

STEPS = {
    "speculate": speculate_step,
    "decode": decode_step,
    "exhaustive": exhaustive_step,
    "synchronized": synchronized_step,
}
"""By the name that `bass_jax.generate` takes."""


class CompiledSteps:
    """One kind of step, settled for a run and compiled per bucket of draft lengths.

    Attributes:
        spec: what the largest of them runs with.
        policy: that chooses draft lengths; None where they stay.
        buckets: of draft lengths, ascending.
        seconds: that callers have waited for each compilation: bucket → seconds.
    """

    def __init__(self, name: str, spec: SpecConfig, is_greedy: bool, policy: str | Policy | None = None):
        """Chooses the step function; compiles nothing.

        Args:
            name: of the step, in `STEPS`.
            spec: of the steps.
            is_greedy: all rows are greedy, so the token and the multi-draft rule can run as the greedy rule.
            policy: chooses draft lengths; None keeps ``spec.draft_len``.

        Raises:
            ValueError: if `name` is not in `STEPS`, or a policy is to choose lengths of a step without them.
        """
        check_choice("step", name, sorted(STEPS))
        if policy is not None and name != "speculate":
            raise ValueError(f"step={name!r}: a policy chooses draft lengths of 'speculate' alone")
        self._step = STEPS[name]
        # The state carries the length itself, so that lengths of one bucket share an executable.
        self.spec = dataclasses.replace(spec, draft_len=spec.bucket)
        if name == "decode":  # Whatever rule would have evaluated drafts, tokens come from the target's distribution.
            self.spec = bucket_spec(spec, 0)
        if self.spec.acceptance in ("token", "multi_draft") and is_greedy:
            self.spec = dataclasses.replace(self.spec, acceptance="greedy")
        self.policy = None if policy is None else find_policy(policy)
        self.buckets = (self.spec.draft_len,) if self.policy is None else policy_buckets(self.policy)
        self.seconds: dict[int, float] = {}
        self._compiled: dict[tuple[int, int], Callable] = {}

    def get(self, bucket: int, pair: Pair, state: SpecState) -> Callable:
        """Returns the step of `bucket`, ``(pair, state, spec)`` to ``(state, info)``, compiled for this batch."""
        name = bucket, len(state.lengths)
        if name not in self._compiled:
            before = JIT_CACHE.compile_seconds
            step = decode_step if bucket == 0 and self._step is speculate_step else self._step
            spec = bucket_spec(self.spec, bucket)
            self._compiled[name] = JIT_CACHE.get(step, pair, state, spec, donate_argnums=(1,))
            self.seconds[bucket] = self.seconds.get(bucket, 0.0) + JIT_CACHE.compile_seconds - before
        return self._compiled[name]


def bucket_spec(spec: SpecConfig, bucket: int) -> SpecConfig:
    """What a step of `bucket` runs with; without drafts all rules but greedy are a draw from the target's
    distribution.
    """
    if bucket:
        return dataclasses.replace(spec, draft_len=bucket)
    rule = "greedy" if spec.acceptance == "greedy" else "token"
    return dataclasses.replace(spec, draft_len=0, acceptance=rule, record_drafts=False, num_candidates=1)
