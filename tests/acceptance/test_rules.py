"""Properties of every acceptance rule: the registered rules and the template."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from bass_jax.acceptance import (
    BLOCK,
    SHARED_NOISE,
    RuleKeys,
    find_rule,
    register_rule,
    registered_rules,
    threshold,
    typical,
)
from bass_jax.acceptance.greedy import accept as accept_greedy
from bass_jax.acceptance.template import REJECT_ALL
from bass_jax.acceptance.token import TOKEN
from bass_jax.sampling import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import Role, draw_keys, gumbel, position_keys, row_keys, step_draft_keys
from bass_jax.testing import check_rule
from tests.marks import mostly_slow

RULES = registered_rules() | {"reject_all": REJECT_ALL}
LOSSLESS = sorted(name for name, rule in RULES.items() if rule.lossless)
SAMPLED = sorted(name for name in LOSSLESS if RULES[name].noise == "step")
B, G, V = 4096, 3, 5


@functools.partial(jax.jit, static_argnums=1)
def distributions(seed: int, num: int) -> jax.Array:
    return jax.nn.softmax(1.5 * jax.random.normal(jax.random.key(seed), (num, V)))


def target_distribution(probs) -> TokenDistribution:
    return TokenDistribution(probs=probs, argmax=probs.argmax(axis=-1).astype(np.int32))


def case(seed=0, num_rows=B, *, is_shared=False):
    """Returns arguments of a rule. Rows share the distributions and differ in their keys and numbers of drafts.

    All but the keys are on the host, because jax compiles every operation outside of a jitted function.
    """
    *arrays, keys = _case(seed, num_rows, is_shared=is_shared)
    return *jax.device_get(arrays), keys


@functools.partial(jax.jit, static_argnames=("num_rows", "is_shared"))
def _case(seed, num_rows, *, is_shared):
    keys = row_keys(jax.random.key(seed), jnp.arange(num_rows, dtype=jnp.uint32))
    draft_probs = jnp.broadcast_to(distributions(1, G), (num_rows, G, V))
    target = target_distribution(jnp.broadcast_to(distributions(2, G + 1), (num_rows, G + 1, V)))
    start = jnp.zeros(num_rows, jnp.int32)
    positions = position_keys(keys, start, G + 1)
    draft_keys = positions if is_shared else step_draft_keys(keys, start, G)
    drafts = jnp.stack([sample_tokens(draft_probs[:, i], gumbel(draft_keys[:, i], V)) for i in range(G)], axis=1)
    accept, residual = (draw_keys(keys, start, role) for role in (Role.ACCEPT, Role.RESIDUAL))
    num_drafted = jnp.arange(num_rows, dtype=jnp.int32) % (G + 1)
    return drafts, num_drafted, draft_probs, target, RuleKeys(accept, residual, positions)


@jax.jit
def take_rows(arguments, rows):
    return jax.tree.map(lambda leaf: leaf[rows], arguments)


def run(rule, *arguments):
    return jax.device_get(jax.jit(rule.accept)(*arguments))


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_passes_the_conformance_test(name):
    rule = RULES[name]
    check_rule(rule)
    assert rule.name == name
    assert rule.source


@pytest.mark.parametrize("name", sorted(RULES))
def test_without_drafts_the_next_token_follows_the_target(name):
    _, num_drafted, _, target, keys = case()
    distribution = target_distribution(target.probs[:, :1])
    keys = keys._replace(positions=keys.positions[:, :1])
    result = run(RULES[name], np.zeros((B, 0), np.int32), np.zeros_like(num_drafted), None, distribution, keys)
    assert not result.num_accepted.any()
    if RULES[name].noise == "none":
        np.testing.assert_array_equal(result.next_token, distribution.argmax[:, 0])
    else:
        counts = np.bincount(result.next_token, minlength=V)
        expected = np.asarray(distribution.probs[0, 0], np.float64) * B
        assert scipy.stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("name", sorted(set(LOSSLESS) - {"reject_all"}))
def test_temperature_0_accepts_exact_matches(name):
    """With one-hot distributions a draft is accepted if and only if it is the target's token."""
    drafts, num_drafted, _, target, keys = case()
    one_hot = target_distribution(np.eye(V, dtype=np.float32)[target.argmax])
    result = run(RULES[name], drafts, num_drafted, None, one_hot, keys)
    is_right = (drafts == target.argmax[:, :-1]) & (np.arange(G) < num_drafted[:, None])
    np.testing.assert_array_equal(result.num_accepted, np.cumprod(is_right, axis=1).sum(axis=1))


@pytest.mark.parametrize("name", sorted(set(SAMPLED) - {"reject_all"}))
def test_equal_distributions_accept_all_drafts(name):
    drafts, _, draft_probs, target, keys = case()
    same = target_distribution(np.concatenate([draft_probs, target.probs[:, -1:]], axis=1))
    result = run(RULES[name], drafts, np.full(B, G, np.int32), draft_probs, same, keys)
    np.testing.assert_array_equal(result.num_accepted, G)


@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_token_of_target_probability_0_is_never_emitted(name, has_probs):
    drafts, num_drafted, draft_probs, target, keys = case()
    probs = target.probs.copy()
    probs[..., 2] = 0.0
    distribution = target_distribution(probs / probs.sum(-1, keepdims=True))
    drafts = drafts if has_probs else np.full_like(drafts, 2)
    result = run(RULES[name], drafts, num_drafted, draft_probs if has_probs else None, distribution, keys)
    assert (result.next_token != 2).all()
    is_accepted = np.arange(G) < result.num_accepted[:, None]
    assert not ((drafts == 2) & is_accepted).any()


def test_a_zero_residual_falls_back_on_the_target():
    """Rounding can reject a draft although the residual is zero everywhere. A wrong fallback emits arbitrary tokens."""
    drafts, _, _, _, keys = case()
    # The draft's probability is larger for every token, which for normalized distributions only rounding can cause.
    target = target_distribution(np.broadcast_to(np.float32([0.0, 0.0, 0.0, 0.5, 0.5]), (B, G + 1, V)))
    draft_probs = np.broadcast_to(np.float32([0.5, 0.5, 0.5, 1.0, 1.0]), (B, G, V))
    result = run(TOKEN, drafts, np.full(B, G, np.int32), draft_probs, target, keys)
    is_rejected = np.asarray(result.num_accepted) < G
    assert is_rejected.sum() > 100
    assert (np.asarray(result.next_token)[is_rejected] >= 3).all()


def test_the_token_rule_accepts_the_overlap():
    """The first draft is accepted with probability sum(min(draft, target))."""
    drafts, _, draft_probs, target, keys = case(num_rows=40_000)
    result = run(TOKEN, drafts, np.full(40_000, G, np.int32), draft_probs, target, keys)
    overlap = float(np.minimum(draft_probs[0, 0], target.probs[0, 0]).sum())
    # Four standard deviations of a proportion.
    np.testing.assert_allclose((result.num_accepted > 0).mean(), overlap, atol=4 * 0.5 / 40_000**0.5)


def mean_accepted(rule, target_probs, draft_probs, num_rows=200_000) -> float:
    """Returns the mean number of accepted drafts, for draft distributions ``[G, V]`` and target ``[G + 1, V]``."""
    return float(_num_accepted(rule, target_probs, draft_probs, num_rows).mean())


@functools.partial(jax.jit, static_argnums=(0, 3))
def _num_accepted(rule, target_probs, draft_probs, num_rows):
    num_slots, vocab_size = draft_probs.shape
    keys = row_keys(jax.random.key(5), jnp.arange(num_rows, dtype=jnp.uint32))
    start = jnp.zeros(num_rows, jnp.int32)
    draft_keys = step_draft_keys(keys, start, num_slots)
    all_draft_probs = jnp.broadcast_to(draft_probs, (num_rows, *draft_probs.shape))
    noise = gumbel(draft_keys.reshape(-1), vocab_size)
    drafts = sample_tokens(all_draft_probs.reshape(-1, vocab_size), noise).reshape(num_rows, num_slots)
    target = target_distribution(jnp.broadcast_to(target_probs, (num_rows, *target_probs.shape)))
    accept, residual = (draw_keys(keys, start, role) for role in (Role.ACCEPT, Role.RESIDUAL))
    rule_keys = RuleKeys(accept, residual, position_keys(keys, start, num_slots + 1))
    num_drafted = jnp.full(num_rows, num_slots, jnp.int32)
    return rule.accept(drafts, num_drafted, all_draft_probs, target, rule_keys).num_accepted


@pytest.mark.parametrize("rule, expected", [(TOKEN, 10 / 9), (BLOCK, 11 / 9)], ids=["token", "block"])
def test_the_example_of_the_block_verification_paper(rule, expected):
    """Target (1/3, 2/3), draft (2/3, 1/3), two drafts."""
    found = mean_accepted(rule, np.float32([[1 / 3, 2 / 3]] * 3), np.float32([[2 / 3, 1 / 3]] * 2))
    # Four standard deviations of a mean over 200,000 rows, each at most 1.
    np.testing.assert_allclose(found, expected, atol=4 / 200_000**0.5)


@pytest.mark.parametrize("seed", mostly_slow(range(3), lambda seed: seed == 0))
def test_the_block_rule_accepts_at_least_as_many_as_the_token_rule(seed):
    target_probs, draft_probs = distributions(10 + seed, G + 1), distributions(20 + seed, G)
    found = [mean_accepted(rule, target_probs, draft_probs, 50_000) for rule in (TOKEN, BLOCK)]
    # Both means are of the same drafts, with independent random numbers in the rules.
    assert found[1] > found[0] - 4 * G / 50_000**0.5


def test_shared_noise_accepts_all_drafts_of_an_equal_distribution():
    drafts, _, draft_probs, target, keys = case(is_shared=True)
    same = target_distribution(np.concatenate([draft_probs, target.probs[:, -1:]], axis=1))
    result = run(SHARED_NOISE, drafts, np.full(B, G, np.int32), draft_probs, same, keys)
    np.testing.assert_array_equal(result.num_accepted, G)


def test_shared_noise_acceptance_is_within_the_bounds_of_the_paper():
    """Daliri et al. 2025: at least (1 - TV) / (1 + TV), and at most 1 - TV."""
    drafts, _, draft_probs, target, keys = case(num_rows=40_000, is_shared=True)
    result = run(SHARED_NOISE, drafts, np.full(40_000, G, np.int32), draft_probs, target, keys)
    distance = float(np.abs(draft_probs[0, 0] - target.probs[0, 0]).sum() / 2)
    rate, spread = float((result.num_accepted > 0).mean()), 4 * 0.5 / 40_000**0.5
    assert (1 - distance) / (1 + distance) - spread < rate < 1 - distance + spread


@pytest.mark.parametrize(
    "make, arguments",
    [
        (typical, {"epsilon": 0.0}),
        (typical, {"delta": 1.5}),
        (threshold, {"fraction": 0.0}),
        (threshold, {"fraction": 2.0}),
    ],
)
def test_a_lossy_rule_refuses_an_argument_out_of_range(make, arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"^{name}={value}"):
        make(**arguments)


def test_lossy_rules_accept_drafts_above_their_threshold():
    """The distribution (0.6, 0.3, 0.1) has the entropy 0.898, and exp(-entropy) is 0.407."""
    probs = np.broadcast_to(np.float32([0.6, 0.3, 0.1]), (3, 2, 3))
    keys = take_rows(case()[-1], np.arange(3))
    arguments = np.arange(3, dtype=np.int32)[:, None], np.ones(3, np.int32), None, target_distribution(probs), keys
    for rule, expected in [
        (typical(epsilon=0.5, delta=0.5), [1, 1, 0]),  # above 0.204
        (typical(epsilon=0.5, delta=0.9), [1, 0, 0]),  # above 0.367
        (typical(epsilon=0.05, delta=0.9), [1, 1, 1]),  # above 0.05
        (threshold(0.4), [1, 1, 0]),
        (threshold(1.0), [1, 0, 0]),
    ]:
        np.testing.assert_array_equal(run(rule, *arguments).num_accepted, expected)


def test_only_deterministic_rules_ignore_the_keys():
    arguments, other = case(), case(seed=1)[-1]
    for name, rule in RULES.items():
        first, second = run(rule, *arguments), run(rule, *arguments[:-1], other)
        is_same = all((a == b).all() for a, b in zip(first, second, strict=True))
        assert is_same == (rule.noise == "none"), name


# The registry.


def test_a_rule_is_found_by_name_or_module():
    assert find_rule("token") is TOKEN
    assert find_rule("bass_jax.acceptance.template:REJECT_ALL") is REJECT_ALL


@pytest.mark.parametrize(
    "name, reason",
    [
        ("tokens", r"expected one of .*'greedy'.*'token'.* or 'module:attribute'; did you mean 'token'"),
        ("no_such_module:RULE", "No module named"),
        ("bass_jax.acceptance.template:RULE", "no attribute 'RULE'"),
        ("bass_jax.acceptance.template:accept", "missing a required argument: 'draft_tokens'"),
        (":RULE", "Empty module name|expected"),
    ],
)
def test_an_unknown_rule_is_explained(name, reason):
    with pytest.raises(ValueError, match=reason) as error:
        find_rule(name)
    assert f"acceptance={name!r}" in str(error.value)


def test_a_name_can_be_registered_only_once():
    with pytest.raises(ValueError, match="'token'"):
        register_rule(dataclasses.replace(REJECT_ALL, name="token"))


def test_the_greedy_rule_takes_the_argmax_after_the_accepted_drafts():
    """None, some and all of three drafts are accepted; after all of them the next token is the one after the last."""
    argmax = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    is_right = jnp.asarray([[False, True, True], [True, True, False], [True, True, True]])
    drafts = jnp.where(is_right, argmax[:, :3], 99)
    target = TokenDistribution(probs=jax.nn.one_hot(argmax, 100), argmax=argmax)
    keys = RuleKeys(*jax.random.split(jax.random.key(0), (2, 3)), jax.random.split(jax.random.key(1), (3, 4)))
    found = accept_greedy(drafts, jnp.full(3, 3), None, target, keys)
    assert found.num_accepted.tolist() == [0, 2, 3]
    assert found.next_token.tolist() == [0, 6, 11]
