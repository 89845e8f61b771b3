"""Several chains of drafts per row: exact, in caches that stay true."""

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


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "often right": tiny.model_drafter(tiny.perturbed(target, 0.2)),
        "trimmed": tiny.model_drafter(tiny.reduced_vocabulary((1, 3, 4, 5, 9))),
        "ngram": NgramDrafter(),
        "table": tiny.table_drafter(),
    }


@pytest.fixture(scope="module")
def regular(target):
    pair = bass.Pair(target, NgramDrafter())
    return bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=LIMITS).tokens


CANDIDATES = (("often right", 3), ("trimmed", 8), ("ngram", 2), ("table", 2))


@pytest.mark.parametrize(
    "rule, drafter, num_candidates",
    mostly_slow(
        [(rule, *drafter) for drafter in CANDIDATES for rule in ("greedy", "multi_draft")],
        lambda case: case[1] == "ngram" or case[:2] in (("multi_draft", "often right"), ("greedy", "table")),
    ),
)
def test_greedy_speculation_by_chains_is_regular_decoding(target, drafters, regular, rule, drafter, num_candidates):
    """Breaking it: the cache holds the chain that was written last, not the one that was accepted."""
    pair, spec = bass.Pair(target, drafters[drafter]), bass.SpecConfig(4, rule, num_candidates=num_candidates)
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS)
    step = jax.jit(bass.speculate_step)
    random = np.random.default_rng(0)
    while not state.done.all():
        wanted = jnp.asarray(random.integers(0, 5, state.lengths.shape), jnp.int32)
        state, _ = step(pair, state._replace(draft_lens=wanted), spec)
    for row, expected in enumerate(regular):
        np.testing.assert_array_equal(bass.output_tokens(state, row), expected)


@pytest.mark.slow
def test_chains_take_fewer_steps(target, drafters, regular):
    pair = bass.Pair(target, drafters["often right"])
    one, three = (
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4, "multi_draft", num_candidates=num), max_new_tokens=LIMITS)
        for num in (1, 3)
    )
    assert three.summary.block_efficiency > one.summary.block_efficiency
    for tokens, expected in zip(three.tokens, regular, strict=True):
        np.testing.assert_array_equal(tokens, expected)


def test_both_caches_stay_true(target, drafters):
    """Both equal a fresh prefill of the committed tokens, whichever chain stood."""
    pair, spec = bass.Pair(target, drafters["often right"]), bass.SpecConfig(3, "multi_draft", num_candidates=3)
    sampling = bass.SamplingParams(temperature=1.0)
    state = bass.prefill(pair, tiny.PROMPTS, spec, sampling=sampling, max_new_tokens=30)
    step = jax.jit(bass.speculate_step)
    for _ in range(5):
        state, _ = step(pair, state, spec)
        rows = [np.asarray(state.tokens[row, : state.lengths[row]]) for row in range(3)]
        fresh = bass.prefill(pair, rows, spec, max_new_tokens=30)
        for row, tokens in enumerate(rows):
            num_target, num_draft = len(tokens) - 1, int(state.drafter.num_cached[row])
            assert num_draft <= num_target
            for found, expected, num in [
                (state.target_cache, fresh.target_cache, num_target),
                (state.drafter.cache, fresh.drafter.cache, num_draft),
            ]:
                for one, other in zip(*map(jax.tree.leaves, jax.device_get((found, expected))), strict=True):
                    np.testing.assert_allclose(one[row, :, :num], other[row, :, :num], atol=1e-4)


def one_position(rule, draft_tokens, draft_probs, target_probs, num_drafted=None, seed=0):
    """Judges M first tokens per row, ``[B, M]``, under one target distribution ``[V]``."""
    B, M = draft_tokens.shape
    probs = jnp.broadcast_to(jnp.asarray(target_probs, jnp.float32), (B, M, 2, len(target_probs)))
    keys = jax.random.split(jax.random.key(seed), (3, B))
    drafted = jnp.full((B, M), 1, jnp.int32) if num_drafted is None else jnp.asarray(num_drafted, jnp.int32)
    distribution = TokenDistribution(probs, jnp.argmax(probs, axis=-1).astype(jnp.int32))
    token_logprobs = None if draft_probs is None else draft_probs[:, :, None]
    return rule.accept_candidates(
        draft_tokens[..., None], drafted, token_logprobs, distribution, RuleKeys(keys[0], keys[1], keys[2][:, None])
    )


def test_chains_that_cover_the_vocabulary_are_always_accepted():
    """Without replacement, the last candidate is drawn from all that is left; with it, rejections would remain."""
    target, draft = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    first = jnp.asarray(np.random.default_rng(0).choice(2, 5000, p=draft), jnp.int32)
    tokens = jnp.stack([first, 1 - first], axis=1)
    token_logprobs = jnp.stack(
        [jnp.broadcast_to(jnp.asarray(draft, jnp.float32), (5000, 2)), jax.nn.one_hot(1 - first, 2)], axis=1
    )
    result = one_position(MULTI_DRAFT, tokens, token_logprobs, target)
    assert (result.num_accepted == 1).all()
    accepted = np.asarray(tokens)[np.arange(5000), np.asarray(result.candidate)]
    assert abs(accepted.mean() - 2 / 3) < 4 * np.sqrt(2 / 9 / 5000)


def test_a_deterministic_candidate_takes_its_own_share_away():
    """Candidates 0 and 1 for sure: each stands as often as the target says, and the rest is drawn from what is left."""
    target = np.array([0.2, 0.3, 0.1, 0.4])
    tokens = jnp.tile(jnp.asarray([[0, 1]], jnp.int32), (20_000, 1))
    result = one_position(MULTI_DRAFT, tokens, None, target)
    chosen = np.where(result.num_accepted == 1, np.asarray(result.candidate), result.next_token)
    counts = np.bincount(chosen, minlength=4)
    assert (np.abs(counts / 20_000 - target) < 4 * np.sqrt(target * (1 - target) / 20_000)).all()
    assert (np.asarray(result.next_token)[np.asarray(result.num_accepted) == 0] >= 2).all()


def test_a_chain_without_drafts_is_passed_over():
    tokens = jnp.tile(jnp.asarray([[3, 1]], jnp.int32), (100, 1))
    result = one_position(MULTI_DRAFT, tokens, None, [0.0, 0.0, 0.0, 1.0], num_drafted=[[0, 1]] * 100)
    assert not result.num_accepted.any()
    assert (result.next_token == 3).all()


def test_the_greedy_rule_follows_the_right_chain():
    tokens = jnp.asarray([[2, 0, 1], [0, 1, 2], [0, 2, 3]], jnp.int32)
    result = one_position(GREEDY, tokens, None, [0.1, 0.6, 0.2, 0.1])
    np.testing.assert_array_equal(result.num_accepted, [1, 1, 0])
    np.testing.assert_array_equal(result.candidate[:2], [2, 1])
    np.testing.assert_array_equal(result.next_token, [1, 1, 1])


@pytest.mark.parametrize(
    "drafter, options, message",
    [
        (
            NgramDrafter(),
            {"acceptance": "token", "num_candidates": 2},
            r"num_candidates=2: acceptance='token' evaluates one chain",
        ),
        (RepeatDrafter(), {"acceptance": "multi_draft", "num_candidates": 2}, "RepeatDrafter has no propose_many"),
    ],
)
def test_what_knows_one_chain_is_refused(target, drafter, options, message):
    pair, spec = bass.Pair(target, drafter), bass.SpecConfig(2, **options)
    with pytest.raises(ValueError, match=message):
        bass.speculate_step(pair, bass.prefill(pair, tiny.PROMPTS, spec), spec)


@pytest.mark.parametrize("num_candidates", [0, 9])
def test_a_number_of_chains_out_of_range_is_refused(num_candidates):
    with pytest.raises(ValueError, match=f"num_candidates={num_candidates}: expected 1 to 8"):
        bass.SpecConfig(num_candidates=num_candidates)
