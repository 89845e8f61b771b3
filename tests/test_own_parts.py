"""A user's drafter, rule or policy with a mistake is refused when it is traced, or its result is clipped.

Otherwise it would run, and its numbers would look like results.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.acceptance import MULTI_DRAFT, TOKEN, AcceptanceResult, MultiDraftAcceptanceResult, register_rule
from bass_jax.acceptance.base import _REGISTRY
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.models.adapters import from_function
from bass_jax.policies import Plan
from bass_jax.policies.template import OneMore
from tests import tiny
from tests.marks import mostly_slow
from tests.models import own_models

NUMBERS = itertools.count()
TARGET = tiny.model(1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrongDrafter(RepeatDrafter):
    """Changes the proposal with a function."""

    change: Any = dataclasses.field(default=None, metadata={"static": True})

    def propose(self, state, context, draft_len, *, is_sampled):
        proposal, state = super().propose(state, context, draft_len, is_sampled=is_sampled)
        return self.change(proposal), state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrongPolicy(OneMore):
    """Changes the plan with a function."""

    change: Any = dataclasses.field(default=None, metadata={"static": True})

    def update(self, state, stats):
        state, plan = super().update(state, stats)
        return state, self.change(plan)


@pytest.fixture
def rule():
    """Registers a rule with a changed function for one test."""
    names = []

    def make(change, base=TOKEN, field="accept"):
        def accept(*arguments):
            return change(getattr(base, field)(*arguments))

        # The name is new, because a step is compiled once per name.
        name = f"wrong{next(NUMBERS)}"
        names.append(register_rule(dataclasses.replace(base, name=name, **{field: accept})).name)
        return names[-1]

    yield make
    for name in names:
        del _REGISTRY[name]


def run(drafter=None, **options):
    pair, spec = bass.Pair(TARGET, drafter or RepeatDrafter()), bass.SpecConfig(4, **options)
    sampling = bass.SamplingParams(temperature=1.0)
    return bass.generate(pair, tiny.PROMPTS, spec, max_new_tokens=12, sampling=sampling)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.tokens, "WrongDrafter.propose returned .*: expected"),
        (lambda p: tuple(p), "WrongDrafter.propose returned tuple: expected"),
        (lambda p: p._replace(tokens=p.tokens.astype(float)), "propose: tokens has dtype float32 .*: expected integer"),
        (lambda p: p._replace(tokens=p.tokens[:, :2]), r"propose: tokens has .* shape \[4, 2\]: .* shape \[4, 4\]"),
        (lambda p: p._replace(tokens=p.tokens[0]), "propose: tokens has"),
        (lambda p: p._replace(tokens=3), "propose: tokens is of type int"),
        (lambda p: p._replace(num_drafted=p.num_drafted[0]), "propose: num_drafted has"),
        (lambda p: p._replace(num_drafted=p.num_drafted / 2), "propose: num_drafted has dtype float32"),
        (lambda p: p._replace(probs=jnp.ones((4, 4, tiny.VOCAB + 1))), "propose: probs has"),
        (lambda p: p._replace(probs=jnp.ones((4, 4, tiny.VOCAB), int)), "propose: probs has dtype int32"),
        (lambda p: p._replace(confidence=jnp.ones(4)), "propose: confidence has"),
    ],
)
def test_an_invalid_proposal_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(WrongDrafter(change))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda v: v.num_accepted, "acceptance='wrong.*': returned .*: expected AcceptanceResult"),
        (lambda v: tuple(v), "acceptance='wrong.*': returned tuple: expected AcceptanceResult"),
        (
            lambda v: MultiDraftAcceptanceResult(v[0], *v),
            "acceptance='wrong.*': returned MultiDraftAcceptanceResult: expected AcceptanceResult",
        ),
        (lambda v: v._replace(num_accepted=v.num_accepted * 0.5), "num_accepted has dtype float32"),
        (lambda v: v._replace(next_token=v.next_token[:2]), r"next_token has .* shape \[2\]"),
        (lambda v: v._replace(next_token=5), "next_token is of type int"),
    ],
)
def test_an_invalid_result_of_a_rule_is_refused(rule, change, message):
    with pytest.raises(ValueError, match=message):
        run(acceptance=rule(change))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda plan: plan.draft_lens, "WrongPolicy.update returned .*: expected"),
        (lambda plan: Plan(plan.draft_lens * 0.5), "update: draft_lens has dtype float32"),
        (lambda plan: Plan(plan.draft_lens[:1]), "update: draft_lens has"),
        (lambda plan: Plan(plan.draft_lens, plan.draft_lens), "update: min_confidence has dtype int32"),
    ],
)
def test_an_invalid_plan_is_refused(change, message):
    pair = bass.Pair(TARGET, RepeatDrafter())
    with pytest.raises(ValueError, match=message):
        bass.generate(pair, tiny.PROMPTS, policy=WrongPolicy(change=change), max_new_tokens=12)


def test_the_result_of_a_rule_is_clipped(rule):
    """A rule that accepted 99 of 4 drafts once gave 5.33 tokens per target pass."""
    accepts_all = np.array([True, False, True, False])

    def change(result):
        num_accepted = jnp.where(accepts_all, jnp.full_like(result.num_accepted, 99), -7)
        return result._replace(num_accepted=num_accepted, next_token=jnp.full_like(result.next_token, 10**6))

    result = run(acceptance=rule(change))
    for info in result.infos:
        np.testing.assert_array_equal(info.num_accepted, np.where(accepts_all, info.num_drafted, 0))
        assert (info.num_emitted <= info.num_accepted + 1).all()
    assert any(info.num_drafted.any() for info in result.infos)
    assert [len(row) for row in result.tokens] == [12, 12, 12]
    assert all(0 <= token < tiny.VOCAB for row in result.tokens for token in row)


def test_the_result_of_a_multi_draft_rule_is_clipped(rule):
    def change(result: MultiDraftAcceptanceResult) -> AcceptanceResult | MultiDraftAcceptanceResult:
        return result._replace(candidate=result.candidate + 50, num_accepted=jnp.full_like(result.num_accepted, 99))

    name = rule(change, MULTI_DRAFT, "accept_candidates")
    result = run(tiny.table_drafter(), acceptance=name, num_candidates=2)
    for info in result.infos:
        assert (info.num_accepted <= info.num_drafted).all()


class NoPytree(RepeatDrafter):
    """A class that is not decorated itself."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NotStatic(RepeatDrafter):
    """A function in a field that is not static."""

    function: Any = abs


class WithoutCommit:
    def init(self, tokens, lengths): ...

    def propose(self, state, context, draft_len, *, is_sampled): ...


def own_target(change, make_cache=own_models.init_cache):
    """Returns a model whose result is changed."""

    def forward(*arguments):
        return change(*own_models.forward(*arguments))

    params = own_models.random_params(tiny.VOCAB, 1)
    return from_function(forward, params, init_cache=make_cache, vocab_size=tiny.VOCAB)


def decode(target=TARGET, drafter=None, acceptance="token", policy=None):
    """Decodes sampled tokens in the debug mode."""
    options = {"max_new_tokens": 8, "sampling": bass.SamplingParams(temperature=1.0), "policy": policy}
    spec = bass.SpecConfig(None if policy else 4, acceptance)
    pair = bass.Pair(target, RepeatDrafter())
    if drafter is not None:  # The tests check the annotations of `Pair`, a user's program does not.
        object.__setattr__(pair, "drafter", drafter)
    with bass.debug_checks():
        return bass.generate(pair, [[1, 2]], spec, **options)


WRONG_PARTS = {
    "width": (
        {"drafter": WrongDrafter(lambda p: p._replace(tokens=p.tokens[:, :2]))},
        "WrongDrafter.propose: tokens has dtype int32 and shape [1, 2]: expected integer values of shape [1, 4]",
    ),
    "dtype": (
        {"drafter": WrongDrafter(lambda p: p._replace(tokens=p.tokens * 1.0))},
        "WrongDrafter.propose: tokens has dtype float32 and shape [1, 4]: expected integer values of shape [1, 4]",
    ),
    "return type": (
        {"drafter": WrongDrafter(lambda p: p.tokens)},
        "WrongDrafter.propose returned DynamicJaxprTracer: expected (Proposal, state)",
    ),
    "drafts above the wanted": (
        {"drafter": WrongDrafter(lambda p: p._replace(num_drafted=p.num_drafted + 9))},
        "WrongDrafter.propose: num_drafted has the value 13: expected 0 to num_wanted, here 4",
    ),
    "ids outside the vocabulary": (
        {"drafter": WrongDrafter(lambda p: p._replace(tokens=p.tokens * 0 + 99))},
        "WrongDrafter.propose: tokens has the value 99: expected 0 to 10",
    ),
    "not normalized": (
        {"drafter": WrongDrafter(lambda p: p._replace(probs=2 * jax.nn.one_hot(p.tokens, tiny.VOCAB)))},
        "WrongDrafter.propose: probs has the sum 2.0: expected distributions that sum to 1",
    ),
    "vocabulary of probs": (
        {"drafter": WrongDrafter(lambda p: p._replace(probs=jnp.ones((*p.tokens.shape, 7))))},
        "WrongDrafter.propose: probs has dtype float32 and shape [1, 4, 7]: expected floating values of shape",
    ),
    "no pytree": (
        {"drafter": NoPytree()},
        "pair.drafter=NoPytree(): NoPytree is no pytree; make it a frozen dataclass and decorate it with "
        "@jax.tree_util.register_dataclass",
    ),
    "field that is no array": (
        {"drafter": NotStatic()},
        "pair.drafter: NotStatic has a leaf of type builtin_function_or_method: expected arrays; declare other fields "
        'with dataclasses.field(metadata={"static": True})',
    ),
    "missing method": (
        {"drafter": WithoutCommit()},
        "pair.drafter is WithoutCommit without commit: expected an object with init, propose and commit",
    ),
    "class in place of an object": (
        {"drafter": RepeatDrafter},
        "pair.drafter is the class RepeatDrafter: expected an object with init, propose and commit",
    ),
    "accepts too many": (
        {
            "acceptance": dataclasses.replace(
                TOKEN, name="99", accept=lambda *a: TOKEN.accept(*a)._replace(num_accepted=a[1] + 95)
            )
        },
        "acceptance='99': num_accepted has the value 99: expected 0 to the 4 drafts",
    ),
    "plan outside the lengths": (
        {"policy": WrongPolicy(change=lambda plan: Plan(plan.draft_lens + 50))},
        "WrongPolicy.update: draft_lens has values from",
    ),
    "logits of another vocabulary": (
        {"target": own_target(lambda logits, cache: (logits[..., :7], cache))},
        "FunctionModel.forward: logits has dtype float32 and shape [1, 64, 7]: expected floating values of shape "
        "[1, 64, 11]",
    ),
    "cache of another dtype": (
        {"target": own_target(lambda logits, cache: (logits, cache.astype(jnp.bfloat16)))},
        "FunctionModel.forward: cache: expected a cache with the structure, shapes and dtypes of init_cache's",
    ),
    "model that returns logits only": (
        {"target": own_target(lambda logits, cache: logits)},
        "FunctionModel.forward returned DynamicJaxprTracer: expected ForwardOutput(logits, cache)",
    ),
    "cache without rows": (
        {"target": own_target(lambda *both: both, lambda batch, capacity: jnp.zeros((capacity, batch, 2, 16)))},
        "FunctionModel.init_cache returned a leaf of shape [64, 1, 2, 16]: expected arrays whose first axis is the",
    ),
}


# The values of a proposal are checked by one function, of which one case is quick.
@pytest.mark.parametrize(
    "name",
    mostly_slow(WRONG_PARTS, lambda name: name not in ("drafts above the wanted", "ids outside the vocabulary")),
)
def test_a_wrong_part_gives_an_error_of_one_sentence(name):
    arguments, message = WRONG_PARTS[name]
    with pytest.raises(ValueError) as error:
        decode(**arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_valid_parts_pass_the_debug_mode():
    """With sampled drafts, several lengths and a policy; and the tokens are those without the mode."""
    options = {"max_new_tokens": 8, "sampling": bass.SamplingParams(temperature=1.0)}
    pair = bass.Pair(TARGET, tiny.table_drafter())
    expected = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), **options)
    with bass.debug_checks():
        found = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), **options)
        decode(policy=bass.policies.fixed(2))
    for one, other in zip(found.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
