"""The steps of a run, compiled per draft-length bucket."""

import dataclasses
from collections.abc import Callable
from typing import Any

from bass_jax.config import SpecConfig
from bass_jax.decoding.baselines import exhaustive_step, synchronized_step
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.state import SpecState
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.policies import Policy, find_policy
from bass_jax.policies.protocol import policy_buckets
from bass_jax.runtime.checks import check_choice
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams

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

    def __init__(self, name: str, spec: SpecConfig, sampling: SamplingParams, policy: str | Policy | None = None):
        """Settles what is compiled; compiles nothing.

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
        if self.spec.acceptance in ("token", "multi_draft") and sampling.is_greedy:
            self.spec = dataclasses.replace(self.spec, acceptance="greedy")
        self.policy = None if policy is None else find_policy(policy)
        self.buckets = (self.spec.draft_len,) if self.policy is None else policy_buckets(self.policy)
        self.seconds: dict[int, float] = {}
        self._compiled: dict[int, Callable] = {}

    def begin(self, pair: Pair, state: SpecState) -> None:
        """Has all of them compiled by other threads; arrays can be `jax.ShapeDtypeStruct`."""
        for bucket in self.buckets:
            self._make(JIT_CACHE.begin, bucket, pair, state)

    def get(self, bucket: int, pair: Pair, state: SpecState) -> Callable:
        """Returns the step of `bucket`, ``(pair, state, spec)`` to ``(state, info)``, once it is compiled."""
        if bucket not in self._compiled:
            self._compiled[bucket] = self._make(JIT_CACHE.get, bucket, pair, state)
        return self._compiled[bucket]

    def _make(self, make: Callable, bucket: int, pair: Pair, state: SpecState) -> Any:
        """Returns what `make`, a method of `JIT_CACHE`, returns for the step of `bucket`."""
        before = JIT_CACHE.compile_seconds
        step = decode_step if bucket == 0 and self._step is speculate_step else self._step
        made = make(step, pair, state, bucket_spec(self.spec, bucket), donate_argnums=(1,))
        self.seconds[bucket] = self.seconds.get(bucket, 0.0) + JIT_CACHE.compile_seconds - before
        return made


def bucket_spec(spec: SpecConfig, bucket: int) -> SpecConfig:
    """What a step of `bucket` runs with; without drafts all rules but greedy are a draw from the target's
    distribution.
    """
    if bucket:
        return dataclasses.replace(spec, draft_len=bucket)
    rule = "greedy" if spec.acceptance == "greedy" else "token"
    return dataclasses.replace(spec, draft_len=0, acceptance=rule, record_drafts=False, num_candidates=1)
