"""Acceptance rules: which drafts stand, and which token follows them.

A rule is one pure function behind `AcceptanceRule`; `template.py` beside this file is the one to copy.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from bass_jax.runtime.checks import check_kind, shown
from bass_jax.runtime.imports import import_attribute
from bass_jax.sampling.distribution import TokenDistribution
from bass_jax.sampling.params import SamplingParams
from bass_jax.typing import Array, check_array


class RuleKeys(NamedTuple):
    """Independent streams of one step."""

    accept: Array  # [B] key
    residual: Array  # [B] key
    positions: Array  # [B, G + 1] key, of the absolute positions that the distributions are for: regular decoding's own


class AcceptanceResult(NamedTuple):
    """A rule's decision."""

    num_accepted: Array  # [B] int32, leading drafts that stand, at most num_drafted
    next_token: Array  # [B] int32, the residual token, or the bonus token after a full acceptance


class MultiDraftAcceptanceResult(NamedTuple):
    """A rule's decision over several chains of drafts."""

    candidate: Array  # [B] int32, the chain whose drafts stand; any where none stands
    num_accepted: Array  # [B] int32, leading drafts of it that stand
    next_token: Array  # [B] int32


@runtime_checkable
class AcceptanceFunction(Protocol):
    """The function of a rule; row by row, nothing crosses rows."""

    def __call__(
        self,
        draft_tokens: Array,
        num_drafted: Array,
        draft_probs: Array | None,
        target: TokenDistribution,
        keys: RuleKeys,
    ) -> AcceptanceResult:
        """Judges each row's drafts.

        Args:
            draft_tokens: ``[B, G]`` int32.
            num_drafted: ``[B]`` int32; drafts past it are padding and never stand.
            draft_probs: ``[B, G, V]`` float32, the distribution that each draft was drawn from; None if the drafter
                is deterministic, which is a one-hot distribution.
            target: the target's distribution over ``[B, G + 1]`` positions, each given the drafts before it.
            keys: the row's noise; consumed.
        """
        ...


@runtime_checkable
class MultiDraftAcceptanceFunction(Protocol):
    """What a rule does with M chains per row that begin with different tokens."""

    def __call__(
        self,
        draft_tokens: Array,
        num_drafted: Array,
        draft_probs: Array | None,
        target: TokenDistribution,
        keys: RuleKeys,
    ) -> MultiDraftAcceptanceResult:
        """Judges each row's chains.

        Args:
            draft_tokens: ``[B, M, G]`` int32.
            num_drafted: ``[B, M]`` int32.
            draft_probs: ``[B, M, G, V]`` float32, the distribution that each draft was drawn from *given the chains
                before its own*: the first tokens of earlier chains have probability 0 in it. None if deterministic.
            target: the target's distribution over ``[B, M, G + 1]`` positions; the first is the same for all chains.
            keys: the row's noise; consumed.
        """
        ...


@dataclasses.dataclass(frozen=True)
class AcceptanceRule:
    """A rule with what a user must know of it on its face.

    Attributes:
        name: as in `SpecConfig.acceptance`.
        evaluate: the function.
        lossless: the emitted tokens follow the target's distribution exactly.
        noise: ``"none"``, ``"step"`` (keyed by the row's step) or ``"position"`` (keyed by position).
        source: where the rule comes from.
        accept_candidates: for ``SpecConfig.num_candidates`` above 1; None if the rule knows one chain alone.
    """

    name: str
    accept: AcceptanceFunction
    lossless: bool
    noise: Literal["none", "step", "position"]
    source: str
    accept_candidates: MultiDraftAcceptanceFunction | None = None


def check_acceptance(rule: AcceptanceRule, result: Any, kind: type, num_drafted: Array, vocab_size: int) -> Any:
    """Checks the types and shapes of what `rule` decided, and clips what only its values can show.

    Args:
        rule: for the message.
        result: what its function returned.
        kind: the type that was expected.
        num_drafted: ``[B]`` int32, or ``[B, M]`` for several chains.
        vocab_size: V.

    Returns:
        The result, with 0 to `num_drafted` accepted drafts and a token of the vocabulary.

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
    num_accepted = jnp.clip(result.num_accepted, 0, num_drafted).astype(jnp.int32)
    next_token = jnp.clip(result.next_token, 0, vocab_size - 1).astype(jnp.int32)
    return result._replace(num_accepted=num_accepted, next_token=next_token)


def check_greedy(rule: AcceptanceRule, sampling: SamplingParams) -> None:
    """Refuses a rule without randomness for rows that are sampled: it would decode them greedily.

    Raises:
        ValueError: naming the temperature and the rule.
    """
    if rule.noise == "none" and not sampling.is_greedy:
        raise ValueError(
            f"temperature={shown(sampling.temperature)}: expected 0, because acceptance={rule.name!r} is greedy"
        )


_REGISTRY: dict[str, AcceptanceRule] = {}
_FACTORIES: dict[str, Callable[..., AcceptanceRule]] = {}


def register_rule(rule: AcceptanceRule) -> AcceptanceRule:
    """Adds `rule` under its name.

    Raises:
        ValueError: if the name is taken.
    """
    if rule.name in _REGISTRY:
        raise ValueError(f"acceptance={rule.name!r}: a rule of this name is registered already")
    _REGISTRY[rule.name] = rule
    return rule


def register_factory(name: str, make: Callable[..., AcceptanceRule]) -> None:
    """Lets ``"name(0.3, 0.5)"`` stand for ``make(0.3, 0.5)`` wherever a rule is named."""
    _FACTORIES[name] = make


def registered_rules() -> dict[str, AcceptanceRule]:
    """Returns all registered rules by name."""
    return dict(_REGISTRY)


def find_rule(name: str) -> AcceptanceRule:
    """Returns the registered rule `name`, the one that ``"module:attribute"`` names, or a family's ``"name(0.3)"``.

    Raises:
        ValueError: if there is none.
    """
    check_kind("acceptance", name, str, "the name of a rule")
    if name in _REGISTRY:
        return _REGISTRY[name]
    family, bracket, numbers = name.partition("(")
    if bracket and family in _FACTORIES:
        try:
            arguments = [float(number) for number in numbers.removesuffix(")").split(",")]
        except ValueError:
            raise ValueError(f"acceptance={name!r}: expected numbers, as in '{family}(0.5, 0.4)'") from None
        return _FACTORIES[family](*arguments)
    if ":" not in name:
        raise ValueError(f"acceptance={name!r}: expected one of {sorted(_REGISTRY)} or 'module:attribute'")
    rule = import_attribute(name, "acceptance")
    if not isinstance(rule, AcceptanceRule):
        raise ValueError(f"acceptance={name!r}: expected an AcceptanceRule, not {type(rule).__name__}")
    return rule
