"""The interface of an acceptance rule, and the registry of rules.

A rule is one pure function and its declared properties (`AcceptanceRule`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from bass_jax.runtime.checks import check_kind, shown
from bass_jax.runtime.debug import debug_check
from bass_jax.runtime.imports import import_part
from bass_jax.runtime.names import expected_one_of
from bass_jax.sampling.distribution import TokenDistribution
from bass_jax.sampling.params import SamplingParams
from bass_jax.typing import Array, Bool, Int, check_array


class RuleKeys(NamedTuple):
    """The random keys of one step. The streams are independent."""

    accept: Array  # [B] key
    residual: Array  # [B] key
    positions: Array  # [B, G + 1] key, of the absolute positions of the tokens, as in regular decoding


class AcceptanceResult(NamedTuple):
    """What a rule returns."""

    num_accepted: Array  # [B] int32, the length of the accepted prefix, at most num_drafted
    next_token: Array  # [B] int32, the residual token, or if all drafts are accepted the bonus token after them


class MultiDraftAcceptanceResult(NamedTuple):
    """What a rule returns for several candidate drafts."""

    candidate: Array  # [B] int32, the accepted candidate; arbitrary if none is accepted
    num_accepted: Array  # [B] int32, the length of its accepted prefix
    next_token: Array  # [B] int32


@runtime_checkable
class AcceptanceFunction(Protocol):
    """The function of a rule. A row's result depends only on that row's arguments."""

    def __call__(
        self,
        draft_tokens: Array,
        num_drafted: Array,
        draft_probs: Array | None,
        target: TokenDistribution,
        keys: RuleKeys,
    ) -> AcceptanceResult:
        """Accepts a prefix of each row's drafts.

        Args:
            draft_tokens: ``[B, G]`` int32.
            num_drafted: ``[B]`` int32; drafts past it are padding and are never accepted.
            draft_probs: ``[B, G, V]`` float32, the distribution that each draft was sampled from. None if the drafter
                is deterministic; the distributions are then one-hot.
            target: the target's distributions at ``[B, G + 1]`` positions, each given the drafts before it.
            keys: the row's random keys; consumed.
        """
        ...


@runtime_checkable
class MultiDraftAcceptanceFunction(Protocol):
    """The function of a rule for M candidate drafts per row, which begin with different tokens."""

    def __call__(
        self,
        draft_tokens: Array,
        num_drafted: Array,
        draft_probs: Array | None,
        target: TokenDistribution,
        keys: RuleKeys,
    ) -> MultiDraftAcceptanceResult:
        """Accepts a prefix of one candidate per row.

        Args:
            draft_tokens: ``[B, M, G]`` int32.
            num_drafted: ``[B, M]`` int32.
            draft_probs: ``[B, M, G, V]`` float32, the distribution that each draft was sampled from *given the earlier
                candidates*: it gives probability 0 to their first tokens. None if the drafter is deterministic.
            target: the target's distributions at ``[B, M, G + 1]`` positions. The first is the same for all candidates.
            keys: the row's random keys; consumed.
        """
        ...


def leading_run(is_accepted: Bool[Array, "... G"], num_drafted: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns the length of the longest prefix of `is_accepted` that is True, at most `num_drafted`."""
    is_real = jnp.arange(is_accepted.shape[-1]) < num_drafted[..., None]
    return jnp.cumprod((is_accepted & is_real).astype(jnp.int32), axis=-1).sum(axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class AcceptanceRule:
    """An acceptance rule and its properties.

    Attributes:
        name: as in `SpecConfig.acceptance`.
        accept: the function.
        lossless: whether the emitted tokens follow the target's distribution exactly.
        noise: what the random numbers of drafter and rule are keyed by: ``"step"``, ``"position"``, or ``"none"`` for a
            deterministic rule.
        source: the paper.
        accept_candidates: the function for ``SpecConfig.num_candidates`` above 1; None if the rule has none.
    """

    name: str
    accept: AcceptanceFunction
    lossless: bool
    noise: Literal["none", "step", "position"]
    source: str
    accept_candidates: MultiDraftAcceptanceFunction | None = None

    @property
    def is_deterministic(self) -> bool:
        """Whether the rule uses no random numbers: it decodes greedily."""
        return self.noise == "none"


def check_acceptance(rule: AcceptanceRule, result: Any, kind: type, num_drafted: Array, vocab_size: int) -> Any:
    """Checks the types and shapes of a rule's result, and clips its values to the valid range.

    Args:
        rule: named in the error message.
        result: the object that its function returned.
        kind: the expected type.
        num_drafted: ``[B]`` int32, or ``[B, M]`` for several candidates.
        vocab_size: V.

    Returns:
        The result, with 0 to `num_drafted` accepted drafts and a next token inside the vocabulary.

    Raises:
        ValueError: naming rule and field.
    """
    if not isinstance(result, kind):
        raise ValueError(f"acceptance={rule.name!r}: returned {type(result).__name__}: expected {kind.__name__}")
    num_rows = num_drafted.shape[0]
    for field, value in zip(result._fields, result, strict=True):
        check_array(value, f"acceptance={rule.name!r}: {field}", (num_rows,), jnp.integer)
    if isinstance(result, MultiDraftAcceptanceResult):
        candidate = jnp.clip(result.candidate, 0, num_drafted.shape[1] - 1).astype(jnp.int32)
        result = result._replace(candidate=candidate)
        num_drafted = num_drafted[jnp.arange(num_rows), candidate]
    debug_check(lambda: _valid_counts(rule, result.num_accepted, num_drafted))
    debug_check(lambda: _valid_tokens(rule, result.next_token, vocab_size))
    num_accepted = jnp.clip(result.num_accepted, 0, num_drafted).astype(jnp.int32)
    next_token = jnp.clip(result.next_token, 0, vocab_size - 1).astype(jnp.int32)
    return result._replace(num_accepted=num_accepted, next_token=next_token)


def _valid_counts(rule: AcceptanceRule, num_accepted: Array, num_drafted: Array):
    worst = jnp.argmax(jnp.maximum(num_accepted - num_drafted, -num_accepted))
    message = f"acceptance={rule.name!r}: num_accepted has the value {{value}}: expected 0 to the {{most}} drafts"
    values = {"value": num_accepted[worst], "most": num_drafted[worst]}
    return (num_accepted >= 0) & (num_accepted <= num_drafted), message, values


def _valid_tokens(rule: AcceptanceRule, next_token: Array, vocab_size: int):
    is_token = (next_token >= 0) & (next_token < vocab_size)
    message = f"acceptance={rule.name!r}: next_token has the value {{value}}: expected 0 to {vocab_size - 1}"
    return is_token, message, {"value": next_token[jnp.argmax(~is_token)]}


def check_greedy(rule: AcceptanceRule, sampling: SamplingParams) -> None:
    """Refuses a deterministic rule if any row has a temperature above 0, because it would decode that row greedily.

    Raises:
        ValueError: naming the temperature and the rule.
    """
    if rule.is_deterministic and not sampling.is_greedy:
        raise ValueError(
            f"temperature={shown(sampling.temperature)}: expected 0, because acceptance={rule.name!r} is greedy"
        )


_REGISTRY: dict[str, AcceptanceRule] = {}
_FACTORIES: dict[str, Callable[..., AcceptanceRule]] = {}


def register_rule(rule: AcceptanceRule) -> AcceptanceRule:
    """Registers `rule` under its name.

    Raises:
        ValueError: if the name is taken.
    """
    if rule.name in _REGISTRY:
        raise ValueError(f"acceptance={rule.name!r}: a rule of this name is registered already")
    _REGISTRY[rule.name] = rule
    return rule


def register_factory(name: str, make: Callable[..., AcceptanceRule]) -> None:
    """Registers a function that makes rules: ``"name(0.3, 0.5)"`` then names the rule ``make(0.3, 0.5)``."""
    _FACTORIES[name] = make


def registered_rules() -> dict[str, AcceptanceRule]:
    """Returns all registered rules by name."""
    return dict(_REGISTRY)


def find_rule(rule: str | AcceptanceRule) -> AcceptanceRule:
    """Returns the rule that `rule` is or names.

    Args:
        rule: a rule, a registered name, ``"family(0.3)"`` of a registered factory, or ``"module:name"`` of a rule or of
            a function that makes one, with arguments or without.

    Raises:
        ValueError: if there is no such rule.
    """
    if isinstance(rule, AcceptanceRule):
        return rule
    check_kind("acceptance", rule, str, "an AcceptanceRule or the name of a rule")
    if rule in _REGISTRY:
        return _REGISTRY[rule]
    family, bracket, numbers = rule.partition("(")
    if bracket and family in _FACTORIES:
        try:
            arguments = [float(number) for number in numbers.removesuffix(")").split(",")]
        except ValueError:
            raise ValueError(f"acceptance={rule!r}: expected numbers, as in '{family}(0.5, 0.4)'") from None
        return _FACTORIES[family](*arguments)
    if ":" not in family:
        raise ValueError(f"acceptance={rule!r}: {expected_one_of(family, sorted(_REGISTRY), "'module:attribute'")}")
    return _import_rule(rule)


@functools.cache
def _import_rule(name: str) -> AcceptanceRule:
    """Imports a rule once, so that a rule that a function makes is one object, and a step of it compiles once."""
    rule = import_part(name, "acceptance", AcceptanceRule)
    if not isinstance(rule, AcceptanceRule):
        raise ValueError(f"acceptance={name!r}: expected an AcceptanceRule, not {type(rule).__name__}")
    return rule
