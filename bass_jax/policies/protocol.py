"""The protocol of policies, and the registry of policies."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from bass_jax.config import DRAFT_LEN_BUCKETS, draft_len_bucket
from bass_jax.runtime.checks import check_integer, check_kind, check_pytree, shown
from bass_jax.runtime.debug import debug_check
from bass_jax.runtime.imports import call_part, import_attribute, parse_part
from bass_jax.runtime.names import expected_one_of
from bass_jax.typing import Array, check_array


class PolicyStats(NamedTuple):
    """What a policy receives after a step. On a mesh, every device has the same values.

    The policy is also called before the first step, with no active row and counts of 0.
    """

    is_active: Array  # [B] bool, the row took part in the last step
    is_running: Array  # [B] bool, the row will take part in the next
    num_wanted: Array  # [B] int32, drafts that the last plan wanted
    num_drafted: Array  # [B] int32, at most num_wanted; limits, the drafter or its confidence can reduce it
    num_accepted: Array  # [B] int32
    num_emitted: Array  # [B] int32
    was_clipped: Array  # [B] bool, the row's token limit allowed fewer drafts than planned
    lengths: Array  # [B] int32, committed tokens
    room: Array  # [B] int32, tokens that the row may still emit
    step_seconds: Array  # [A] float32, estimated time of a step with each of the policy's lengths; NaN: unknown
    is_compiled: Array  # [A] bool, whether the step of each length is compiled
    resume_seconds: Array  # [] float32, further time of a step with drafts after steps without; NaN: not measured
    is_refilled: Array | bool = False  # [] bool, whether other requests take the rows of those that end
    num_steps: Array | int = 1  # [] int32, steps since the last plan; more than 1 only after steps without drafts
    num_acceptable: Array | None = None  # [B] int32, drafts that would be accepted next; only in a simulator


class Plan(NamedTuple):
    """What the next step drafts."""

    draft_lens: Array  # [B] int32, 0 to max(lengths); 0 for all rows is a regular step
    min_confidence: Array | None = None  # [B] float32, a row stops before the first draft below it; None: never


@runtime_checkable
class Policy(Protocol):
    """Chooses draft lengths. A policy is a frozen pytree with two pure functions.

    The same code is compiled for the host loop, the device loop and the simulator. A lossless rule keeps the target's
    distribution with every policy, because a draft length depends on committed tokens only and not on the drafts
    themselves.
    """

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths that a plan can contain; static, ascending. Their buckets are compiled in advance."""
        ...

    def init(self, num_rows: int) -> Any:
        """Returns the initial state, a pytree of arrays, for a batch of `num_rows` (static)."""
        ...

    def update(self, state: Any, stats: PolicyStats) -> tuple[Any, Plan]:
        """Updates the state after a step and plans the next one. It is also called before the first step."""
        ...


_REGISTRY: dict[str, Callable[[], Policy]] = {}


def register_policy(name: str, make: Callable[[], Policy]) -> None:
    """Registers a policy under `name`; `make` builds it, without arguments with its defaults.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _REGISTRY:
        raise ValueError(f"policy={name!r}: a policy of this name is registered already")
    _REGISTRY[name] = make


def registered_policies() -> dict[str, Callable[[], Policy]]:
    """Returns the functions that build the registered policies, by name."""
    return dict(_REGISTRY)


def find_policy(policy: str | Policy, **arguments: Any) -> Policy:
    """Returns the policy that `policy` is or names.

    Args:
        policy: a policy, a registered name, or ``"module:name"`` of a policy or of a function that makes one. A name
            can have arguments, as in ``"bass_heuristic(start=4, limit=8)"``.
        arguments: further arguments.

    Raises:
        ValueError: if there is no such policy, or it does not take the arguments.
    """
    if not isinstance(policy, str):
        return _checked(policy, shown(policy))
    part = parse_part(policy, "policy", "bass_heuristic(start=4, limit=8)")
    if part.arguments:
        raise ValueError(f"policy={policy!r}: expected arguments as in 'bass_heuristic(start=4, limit=8)'")
    if part.name in _REGISTRY:
        make = _REGISTRY[part.name]
    elif ":" in part.name:
        make = import_attribute(part.name, "policy")
    else:
        raise ValueError(f"policy={part.name!r}: {expected_one_of(part.name, sorted(_REGISTRY), "'module:name'")}")
    if not callable(make) or (isinstance(make, Policy) and not isinstance(make, type)):
        return _checked(make, repr(policy))
    return _checked(
        call_part(make, part._replace(keywords=arguments | part.keywords), f"policy={policy!r}"), repr(policy)
    )


def _checked(policy: Any, name: str) -> Policy:
    if not isinstance(policy, Policy) or isinstance(policy, type):
        missing = [member for member in ("lengths", "init", "update") if not hasattr(policy, member)]
        found = f"{type(policy).__name__} has no {' and '.join(missing)}: " if missing else ""
        raise ValueError(f"policy={name}: {found}expected an object with lengths, init and update")
    check_pytree(f"policy={name}", policy)
    lengths = policy.lengths
    check_kind(f"policy={name}: lengths", lengths, tuple, "a tuple of draft lengths")
    for length in lengths:
        check_integer(f"policy={name}: lengths", length, 0, DRAFT_LEN_BUCKETS[-1])
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"policy={name}: expected ascending lengths, not {lengths}")
    return policy


def all_rows(stats: PolicyStats, draft_len: Array | int) -> Plan:
    """Plans `draft_len` for every row of the batch."""
    return Plan(jnp.full(stats.lengths.shape, draft_len, jnp.int32))


def policy_buckets(policy: Policy) -> tuple[int, ...]:
    """Returns the buckets of the draft lengths that `policy` can plan, ascending."""
    return tuple(sorted({draft_len_bucket(length) for length in policy.lengths}))


def plan_bucket(buckets: tuple[int, ...], num_wanted: int) -> int:
    """Returns the smallest of `buckets` that holds `num_wanted` drafts."""
    return next(bucket for bucket in buckets if bucket >= num_wanted)


def checked_plan(policy: Policy, plan: Any, num_rows: int) -> Plan:
    """Returns the plan with its lengths clipped to the range of `policy.lengths`.

    Raises:
        ValueError: during tracing, if it is not a `Plan` or a field has another type or shape.
    """
    name = type(policy).__name__
    if not isinstance(plan, Plan):
        raise ValueError(f"{name}.update returned {type(plan).__name__}: expected (state, Plan)")
    check_array(plan.draft_lens, f"{name}.update: draft_lens", (num_rows,), jnp.integer)
    if plan.min_confidence is not None:
        check_array(plan.min_confidence, f"{name}.update: min_confidence", (num_rows,), jnp.floating)
    lowest, highest = policy.lengths[0], policy.lengths[-1]

    def lengths():
        message = f"{name}.update: draft_lens has values from {{low}} to {{high}}: expected {lowest} to {highest}"
        is_valid = (plan.draft_lens >= lowest) & (plan.draft_lens <= highest)
        return is_valid, message, {"low": plan.draft_lens.min(), "high": plan.draft_lens.max()}

    debug_check(lengths)
    draft_lens = jnp.clip(plan.draft_lens.astype(jnp.int32), lowest, highest)
    confidence = None if plan.min_confidence is None else plan.min_confidence.astype(jnp.float32)
    return Plan(draft_lens, confidence)
