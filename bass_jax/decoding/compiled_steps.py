"""Compiled steps, one per draft-length bucket and batch size."""

import dataclasses

from bass_jax.config import DRAFT_LEN_BUCKETS, SpecConfig
from bass_jax.decoding.baselines import exhaustive_step, synchronized_step
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.state import SpecState
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.policies import Policy, find_policy
from bass_jax.policies.protocol import policy_buckets
from bass_jax.runtime.checks import check_choice
from bass_jax.runtime.jit_cache import JIT_CACHE, CompiledFunction

STEPS = {
    "speculate": speculate_step,
    "decode": decode_step,
    "exhaustive": exhaustive_step,
    "synchronized": synchronized_step,
}
"""The steps by the names of `DecodeOptions.step`."""


class CompiledSteps:
    """The compiled steps of a run.

    Attributes:
        spec: configuration of the step with the largest draft length.
        policy: chooses draft lengths, or None.
        buckets: draft-length buckets, ascending.
        seconds: draft-length bucket → compile time in seconds.
    """

    def __init__(
        self,
        name: str,
        spec: SpecConfig,
        is_greedy: bool,
        policy: str | Policy | None = None,
        max_draft_len: int = DRAFT_LEN_BUCKETS[-1],
    ):
        """Chooses the step function; compiles nothing.

        Args:
            name: a key of `STEPS`.
            spec: the configuration of the steps.
            is_greedy: whether all rows are greedy; the token and the multi-draft rule then run as the greedy rule.
            policy: chooses draft lengths; None uses ``spec.draft_len``, or the policy ``"auto"`` if that is None.
            max_draft_len: of the drafter; ``"auto"`` chooses no longer one.

        Raises:
            ValueError: if `name` is not in `STEPS`, if there is a policy and the step is not ``"speculate"``, or if
                ``spec.draft_len`` is above `max_draft_len`.
        """
        check_choice("step", name, sorted(STEPS))
        if name != "decode" and spec.draft_len is not None and spec.draft_len > max_draft_len:
            raise ValueError(
                f"draft_len={spec.draft_len}: the drafter proposes at most {max_draft_len} tokens per step"
            )
        if policy is not None and name != "speculate":
            raise ValueError(f"step={name!r}: expected 'speculate' with a policy")
        if policy is None and name == "speculate" and spec.draft_len is None:
            policy = "auto"
        self._step = STEPS[name]
        # The draft length itself is in the state, so lengths of one bucket share a compiled step.
        self.spec = dataclasses.replace(spec, draft_len=spec.bucket)
        if name == "decode":  # Without drafts, all rules except the greedy one are equal.
            self.spec = bucket_spec(spec, 0)
        if self.spec.acceptance in ("token", "multi_draft") and is_greedy:
            self.spec = dataclasses.replace(self.spec, acceptance="greedy")
        self.policy = None if policy is None else find_policy(policy)
        if policy == "auto" and self.policy is not None and self.policy.lengths[-1] > max_draft_len:
            lengths = tuple(length for length in self.policy.lengths if length <= max_draft_len)
            self.policy = find_policy("auto", lengths=lengths)
        self.buckets = (self.spec.num_drafts,) if self.policy is None else policy_buckets(self.policy)
        self.seconds: dict[int, float] = {}
        self._compiled: dict[tuple[int, int], CompiledFunction] = {}

    def find(self, bucket: int, num_rows: int) -> CompiledFunction | None:
        """Returns the step of `bucket` for a batch of `num_rows` if it is compiled and was asked for before."""
        found = self._compiled.get((bucket, num_rows))
        return found if found is not None and found.is_ready() else None

    def is_compiling(self) -> bool:
        """Returns whether a thread compiles a step."""
        return not all(step.is_ready() for step in self._compiled.values())

    def find_all(self, pair: Pair, state: SpecState) -> None:
        """Finds the steps of this batch that the process has compiled already."""
        for bucket in self.buckets:
            found = JIT_CACHE.find(*self._function(bucket, pair, state), donate_argnums=(1,))
            if found is not None:
                self._compiled[bucket, len(state.lengths)] = found

    def start(self, bucket: int, pair: Pair, state: SpecState) -> None:
        """Traces the step of `bucket` for this batch, and compiles it in a thread."""
        function = self._function(bucket, pair, state)
        self._compiled[bucket, len(state.lengths)] = JIT_CACHE.get(*function, donate_argnums=(1,), in_background=True)

    def get(self, bucket: int, pair: Pair, state: SpecState) -> CompiledFunction:
        """Returns the step of `bucket`, ``(pair, state, spec)`` to ``(state, info)``, compiled for this batch.

        Caches of `state` may be given as shapes, if the step is not called yet.
        """
        name = bucket, len(state.lengths)
        if name not in self._compiled or not self._compiled[name].is_prepared:
            before = JIT_CACHE.compile_seconds
            function = self._function(bucket, pair, state)
            self._compiled[name] = JIT_CACHE.get(*function, donate_argnums=(1,), prepare=True)
            self.seconds[bucket] = self.seconds.get(bucket, 0.0) + JIT_CACHE.compile_seconds - before
        return self._compiled[name]

    def forget(self) -> None:
        """Forgets the compiled steps, because the structure of the state has changed."""
        self._compiled.clear()

    def _function(self, bucket: int, pair: Pair, state: SpecState) -> tuple:
        """Returns the step of `bucket` and its arguments."""
        step = decode_step if bucket == 0 and self._step is speculate_step else self._step
        return step, pair, state, bucket_spec(self.spec, bucket)


def bucket_spec(spec: SpecConfig, bucket: int) -> SpecConfig:
    """Returns the configuration of a step of `bucket`.

    Without drafts, all rules except the greedy one sample from the target's distribution.
    """
    if bucket:
        return dataclasses.replace(spec, draft_len=bucket)
    rule = "greedy" if spec.acceptance == "greedy" else "token"
    return dataclasses.replace(spec, draft_len=0, acceptance=rule, record_drafts=False, num_candidates=1)
