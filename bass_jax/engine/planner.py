"""Runs a policy on the host's processor, whatever device the models are on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.decoding.policy_runner import StepTimes, advance_rows, no_times
from bass_jax.policies import Plan, Policy
from bass_jax.runtime.cpu_workarounds import call_beside_steps
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.typing import Array, Bool, Int


class Planner:
    """A policy and its state.

    An update is some hundred operations on a few numbers. On a GPU each of them is a kernel, and steps of 4 ms took
    1.6 ms longer with ``auto`` (H200, SmolLM2-135M, 2026-11-26).

    Attributes:
        state: of the policy, after the last update.
    """

    def __init__(self, policy: Policy, num_rows: int):
        """Starts the policy for a batch of `num_rows`."""
        self._device = _host_device()
        with jax.default_device(self._device):
            policy, state = jax.tree.map(jnp.asarray, (policy, policy.init(num_rows)))
        self._policy, self.state = jax.device_put((policy, state), self._device)
        self._has_rows = has_rows(policy)
        self._is_new = np.zeros(num_rows, bool)
        self._compiled: dict[int, Callable] = {}

    def plan(self, rows: Sequence[Any], counts: Sequence[Any], times: StepTimes) -> tuple[Plan, np.ndarray]:
        """Updates the policy after a step.

        Args:
            rows: `rows_of` the state after the step, as NumPy arrays.
            counts: `counts_of` the step, as NumPy arrays.
            times: measured times of steps.

        Returns:
            ``(plan, wanted)`` as NumPy arrays; see `plan_rows`.
        """
        update = self.compile(rows, counts)
        arguments = self._policy, self.state, self._is_new, tuple(rows), tuple(counts), times
        self.state, plan, wanted = call_beside_steps(update, *arguments)
        self._is_new = np.zeros_like(self._is_new)
        return jax.tree.map(np.asarray, (plan, wanted))

    def compile(self, rows: Sequence[Any], counts: Sequence[Any]) -> Callable:
        """Returns the update for this batch size; a thread compiles it."""
        size = len(self._is_new)
        if size not in self._compiled:
            arguments = self._policy, self.state, self._is_new, tuple(rows), tuple(counts), no_times(self._policy)
            with jax.default_device(self._device):
                self._compiled[size] = JIT_CACHE.get(plan_rows, *arguments, in_background=True)
        return self._compiled[size]

    def insert(self, row: int) -> None:
        """Starts a request in `row`: the state of the row is a fresh one in the next update."""
        self._is_new[row] = True

    def regroup(self, rows: np.ndarray) -> None:
        """Makes a batch of `rows`."""
        self._is_new = self._is_new[rows]
        self.state = jax.tree.map(
            lambda is_row, leaf: leaf[rows] if is_row else leaf, self._has_rows, jax.tree.map(_as_numpy, self.state)
        )


def plan_rows(
    policy: Policy, policy_state: Any, is_new: Bool[Array, "B"], rows, counts, times: StepTimes
) -> tuple[Any, Plan, Int[Array, "2"]]:
    """Updates the policy after a step, in which the rows `is_new` took part for the first time.

    Returns:
        ``(policy_state, plan, wanted)``. `wanted` holds the largest number of drafts that a running row can use in the
        next step, and the largest planned draft length, which applies to rows that join.
    """

    def started(is_row: bool, own: Array, fresh: Array) -> Array:
        return jnp.where(is_new.reshape(-1, *[1] * (own.ndim - 1)), fresh, own) if is_row else own

    num_rows = rows[0].shape[0]
    policy_state = jax.tree.map(started, has_rows(policy), policy_state, policy.init(num_rows))
    policy_state, plan, num_wanted = advance_rows(policy, policy_state, rows, counts, times)
    return policy_state, plan, jnp.stack([num_wanted, plan.draft_lens.max()]).astype(jnp.int32)


def with_joined(wanted: np.ndarray, room: int) -> np.ndarray:
    """Returns `wanted` of `plan_rows` after a row has joined that can use `room` drafts."""
    return np.maximum(wanted, [min(wanted[1], room), 0])


def has_rows(policy: Policy) -> Any:
    """Returns which leaves of the policy's state have one entry per row: their shapes depend on the batch size."""
    few, many = (jax.eval_shape(lambda num=num: policy.init(num)) for num in (2, 3))
    return jax.tree.map(lambda one, other: one.shape != other.shape, few, many)


def _as_numpy(leaf: Any) -> Any:
    """Returns an array whose indexing compiles nothing; JAX's random keys stay as they are."""
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


def _host_device() -> jax.Device:
    """Returns the processor of this process, or its first device if jax runs without a backend for processors."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
