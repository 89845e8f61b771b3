"""Several candidate drafts per row: exact tokens, and caches that stay correct."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.acceptance import GREEDY, MULTI_DRAFT, RuleKeys
from bass_jax.drafters import NgramDrafter
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.sampling import TokenDistribution
from tests import tiny
from tests.marks import mostly_slow

LIMITS = (40, 37, 40)
STEP = jax.jit(bass.speculate_step)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "often accepted": tiny.model_drafter(tiny.perturbed(target, 0.2)),
        "reduced vocabulary": tiny.model_drafter(tiny.reduced_vocabulary((1, 3, 4, 5, 9))),
        "ngram": NgramDrafter(),
        "table": tiny.table_drafter(),
    }


@pytest.fixture(scope="module")
def regular(target):
    pair = bass.Pair(target, NgramDrafter())
    return bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=LIMITS).tokens


CANDIDATES = (("often accepted", 3), ("reduced vocabulary", 8), ("ngram", 2), ("table", 2))
QUICK = {("multi_draft", "ngram")}


@pytest.mark.parametrize(
    "rule, drafter, num_candidates",
    mostly_slow(
        [(rule, *drafter) for drafter in CANDIDATES for rule in ("greedy", "multi_draft")],
        lambda case: case[:2] in QUICK,
    ),
)
def test_greedy_speculation_equals_regular_decoding(target, drafters, regular, rule, drafter, num_candidates):
    """The cache has to hold the accepted candidate, not the one that was written last."""
    pair, spec = bass.Pair(target, drafters[drafter]), bass.SpecConfig(4, rule, num_candidates=num_candidates)
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS)
    random = np.random.default_rng(0)
    while not state.done.all():
        wanted = jnp.asarray(random.integers(0, 5, state.lengths.shape), jnp.int32)
        state, _ = STEP(pair, state._replace(draft_lens=wanted), spec)
    for row, expected in enumerate(regular):
        np.testing.assert_array_equal(bass.output_tokens(state, row), expected)


@pytest.mark.slow
def test_more_candidates_need_fewer_steps(target, drafters, regular):
    pair = bass.Pair(target, drafters["often accepted"])
    one, three = (
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4, "multi_draft", num_candidates=num), max_new_tokens=LIMITS)
        for num in (1, 3)
    )
    assert three.metrics.tokens_per_pass > one.metrics.tokens_per_pass
    for tokens, expected in zip(three.tokens, regular, strict=True):
        np.testing.assert_array_equal(tokens, expected)


def test_caches_equal_a_fresh_prefill(target, drafters):
    """Whichever candidate is accepted, both caches equal those of a prefill of the committed tokens."""
    pair, spec = bass.Pair(target, drafters["often accepted"]), bass.SpecConfig(4, "multi_draft", num_candidates=3)
    sampling = bass.SamplingParams(temperature=1.0)
    state = bass.prefill(pair, tiny.PROMPTS, spec, sampling=sampling, max_new_tokens=30)
    for _ in range(5):
        state, _ = STEP(pair, state, spec)
        rows = [np.asarray(state.tokens[row])[: state.lengths[row]] for row in range(3)]
        fresh = bass.prefill(pair, rows, spec, max_new_tokens=30)
        for row, tokens in enumerate(rows):
            num_target, num_draft = len(tokens) - 1, int(state.drafter_state.num_cached[row])
            assert num_draft <= num_target
            for found, expected, num in [
                (state.target_cache, fresh.target_cache, num_target),
                (state.drafter_state.cache, fresh.drafter_state.cache, num_draft),
            ]:
                for one, other in zip(*map(jax.tree.leaves, jax.device_get((found, expected))), strict=True):
                    np.testing.assert_allclose(one[row, :, :num], other[row, :, :num], atol=1e-4)


def accept_first_tokens(rule, draft_tokens, draft_probs, target_probs, num_drafted=None):
    """Applies a rule to M first tokens per row, ``[B, M]``, of one target distribution ``[V]``."""
    B, M = draft_tokens.shape
    num_drafted = np.ones((B, M)) if num_drafted is None else np.asarray(num_drafted)

    @jax.jit
    def accept(draft_tokens, num_drafted, draft_probs):
        probs = jnp.broadcast_to(jnp.asarray(target_probs, jnp.float32), (B, M, 2, len(target_probs)))
        keys = jax.random.split(jax.random.key(0), (3, B))
        distribution = TokenDistribution(probs, jnp.argmax(probs, axis=-1).astype(jnp.int32))
        rule_keys = RuleKeys(keys[0], keys[1], keys[2][:, None])
        return rule.accept_candidates(draft_tokens, num_drafted, draft_probs, distribution, rule_keys)

    draft_probs = None if draft_probs is None else np.asarray(draft_probs, np.float32)[:, :, None]
    result = accept(draft_tokens[..., None].astype(np.int32), num_drafted.astype(np.int32), draft_probs)
    return jax.device_get(result)


def test_candidates_that_cover_the_vocabulary_are_always_accepted():
    """Sampled without replacement, the last candidate is the only token left."""
    target, draft = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    first = np.random.default_rng(0).choice(2, 5000, p=draft)
    tokens = np.stack([first, 1 - first], axis=1)
    probs = np.stack([np.broadcast_to(draft, (5000, 2)), np.eye(2)[1 - first]], axis=1)
    result = accept_first_tokens(MULTI_DRAFT, tokens, probs, target)
    assert (result.num_accepted == 1).all()
    accepted = tokens[np.arange(5000), result.candidate]
    assert abs(accepted.mean() - 2 / 3) < 4 * np.sqrt(2 / 9 / 5000)


def test_deterministic_candidates_keep_the_targets_distribution():
    """Tokens 0 and 1 are always proposed. If both are rejected, one of the other tokens is sampled."""
    target = np.array([0.2, 0.3, 0.1, 0.4])
    tokens = np.tile([[0, 1]], (20_000, 1))
    result = accept_first_tokens(MULTI_DRAFT, tokens, None, target)
    chosen = np.where(result.num_accepted == 1, result.candidate, result.next_token)
    counts = np.bincount(chosen, minlength=4)
    assert (np.abs(counts / 20_000 - target) < 4 * np.sqrt(target * (1 - target) / 20_000)).all()
    assert (result.next_token[result.num_accepted == 0] >= 2).all()


def test_a_candidate_without_drafts_is_ignored():
    tokens = np.tile([[3, 1]], (100, 1))
    result = accept_first_tokens(MULTI_DRAFT, tokens, None, [0.0, 0.0, 0.0, 1.0], num_drafted=[[0, 1]] * 100)
    assert not result.num_accepted.any()
    assert (result.next_token == 3).all()


def test_the_greedy_rule_accepts_the_candidate_that_matches():
    tokens = np.array([[2, 0, 1], [0, 1, 2], [0, 2, 3]])
    result = accept_first_tokens(GREEDY, tokens, None, [0.1, 0.6, 0.2, 0.1])
    np.testing.assert_array_equal(result.num_accepted, [1, 1, 0])
    np.testing.assert_array_equal(result.candidate[:2], [2, 1])
    np.testing.assert_array_equal(result.next_token, [1, 1, 1])


@pytest.mark.parametrize(
    "drafter, rule, message",
    [
        (NgramDrafter(), "token", "num_candidates=2: expected 1 with acceptance='token'"),
        (RepeatDrafter(), "multi_draft", "RepeatDrafter has no propose_many"),
    ],
)
def test_several_candidates_are_refused_by_parts_for_one(target, drafter, rule, message):
    pair, spec = bass.Pair(target, drafter), bass.SpecConfig(2, rule, num_candidates=2)
    with pytest.raises(ValueError, match=message):
        bass.speculate_step(pair, bass.prefill(pair, tiny.PROMPTS, spec), spec)


@pytest.mark.parametrize("num_candidates", [0, 9])
def test_a_number_of_candidates_out_of_range_is_refused(num_candidates):
    with pytest.raises(ValueError, match=f"num_candidates={num_candidates}: expected a whole number from 1 to 8"):
        bass.SpecConfig(num_candidates=num_candidates)
