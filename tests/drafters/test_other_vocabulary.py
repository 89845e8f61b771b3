"""A draft model with another tokenizer: what it reads, what it proposes, and its cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import EnsembleDrafter, NgramDrafter, other_vocabulary_drafter
from bass_jax.drafters.other_vocabulary import VocabularyMatch
from bass_jax.models.kv_cache import KVCache, is_paged
from bass_jax.testing import check_drafter, verify_lossless
from bass_jax.testing.lossless import SETTINGS
from tests import tiny
from tests.decoding.test_caches import FORWARD, PLANS, SAMPLED, SPEC, TOLERANCE, advance, start
from tests.drafters.test_protocol import LENGTHS, WANTED, context, propose
from tests.marks import mostly_slow
from tests.models import own_models
from tests.tiny import VOCAB

MATCH = tiny.vocabulary_match()


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


def own_text(tokens) -> list[int]:
    own = [MATCH.start_tokens, *(MATCH.own_tokens[token, : MATCH.num_own[token]] for token in tokens)]
    return np.concatenate(own).tolist()


def assert_cache_is_correct(model, kept, state):
    """Compares with one pass over the draft's own tokens of the committed text."""
    capacity = kept.cache.capacity
    for row in range(3):
        num_cached = int(kept.num_cached[row])
        assert num_cached <= int(state.lengths[row]) - 1
        text = own_text(np.asarray(state.tokens[row, :num_cached]))
        tokens = np.zeros((1, capacity), np.int32)
        tokens[0, : len(text)] = text
        slots = np.arange(capacity, dtype=np.int32)
        positions = np.where(slots < len(text), slots, capacity)[None]
        fresh = FORWARD(model, tokens, positions, model.init_cache(1, capacity)).cache
        for found, expected in zip(*map(jax.tree.leaves, jax.device_get((kept.cache, fresh))), strict=True):
            found, expected = found[row, :, : len(text)], expected[0, :, : len(text)]
            np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("plan", PLANS)
def test_the_cache_equals_a_fresh_reading(target, plan):
    """After ragged acceptance, steps without drafts, and regular decoding."""
    drafter = tiny.other_vocabulary()
    pair = bass.Pair(target, drafter)
    state, infos = advance(pair, start(pair), PLANS[plan])
    if plan in ("full length", "mixed"):
        accepted = np.concatenate([info.num_accepted for info in infos])
        assert len(set(accepted.tolist())) > 1
    assert_cache_is_correct(drafter.model.model, state.drafter_state, state)


@pytest.mark.slow
def test_the_cache_is_correct_while_other_parts_draft(target):
    network = tiny.other_vocabulary()
    pair = bass.Pair(target, EnsembleDrafter((NgramDrafter(3, 2), network), sufficient_score=0.5))
    step, state = jax.jit(bass.speculate_step), start(pair)
    for _ in range(6):
        state, _ = step(pair, state, SPEC)
        assert_cache_is_correct(network.model.model, state.drafter_state[1], state)


@pytest.mark.parametrize("is_sampled", mostly_slow([True, False], lambda is_sampled: is_sampled))
def test_only_shared_tokens_are_proposed(is_sampled):
    proposal, _ = propose(tiny.other_vocabulary(), context(), is_sampled)
    others = np.setdiff1d(np.arange(VOCAB), MATCH.output_ids)
    is_draft = np.arange(proposal.tokens.shape[1]) < np.asarray(proposal.num_drafted)[:, None]
    np.testing.assert_array_equal(proposal.num_drafted, WANTED)
    assert not np.isin(np.asarray(proposal.tokens)[is_draft], others).any()
    if is_sampled:
        assert not np.asarray(proposal.probs)[..., others].any()


def test_the_distribution_is_the_draft_models_restricted_and_renormalized():
    """Compares the first draft with a pass over the draft's own tokens."""
    drafter, rows = tiny.other_vocabulary(), context()
    rows = rows._replace(sampling_arrays=bass.SamplingParams(temperature=1.0).sampling_arrays(len(LENGTHS), VOCAB))
    proposal, _ = propose(drafter, rows)
    model = drafter.model.model
    for row in np.flatnonzero(WANTED):
        text = own_text(np.asarray(rows.tokens[row, : LENGTHS[row]]))
        tokens, slots = np.zeros((1, 64), np.int32), np.arange(64, dtype=np.int32)
        tokens[0, : len(text)] = text
        positions = np.where(slots < len(text), slots, 64)[None]
        logits = FORWARD(model, tokens, positions, model.init_cache(1, 64)).logits[0, len(text) - 1]
        expected = np.zeros(VOCAB)
        expected[MATCH.output_ids] = jax.nn.softmax(logits[MATCH.own_ids])
        np.testing.assert_allclose(proposal.probs[row, 0], expected, atol=1e-5)


@pytest.mark.slow
def test_a_users_own_model_can_be_the_draft():
    """Its cache has another layout, and it has no separate head."""
    check_drafter(other_vocabulary_drafter(own_models.plain_model(VOCAB + 2, 0), MATCH), VOCAB)


def permuted(target):
    """Returns the target as a draft with its tokens in another order, and how they match."""
    order = np.random.default_rng(0).permutation(VOCAB)
    params = target.params | {name: target.params[name][np.argsort(order)] for name in ("embedding", "head")}
    match = VocabularyMatch(order[:, None], np.ones(VOCAB, np.int32), np.arange(VOCAB), order, order[:0])
    return other_vocabulary_drafter(dataclasses.replace(target, params=params), match)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["after no drafts", "after regular", "mixed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_drafts_of_the_same_model_with_other_ids_are_accepted(target, plan, temperature):
    pair = bass.Pair(target, permuted(target))
    state = start(pair, sampling=bass.SamplingParams(temperature=temperature))
    _, infos = advance(pair, state, PLANS[plan])
    drafted = np.stack([info.num_drafted for info in infos])
    assert drafted.sum() > 0
    np.testing.assert_array_equal(np.stack([info.num_accepted for info in infos]), drafted)


@pytest.mark.slow
def test_a_draft_with_a_reduced_vocabulary_proposes_what_both_allow(target):
    model = tiny.model(6, vocab_size=VOCAB + 2, output_vocab_size=6)
    own_ids = jnp.asarray([*MATCH.own_ids[1:4], *np.setdiff1d(np.arange(VOCAB + 2), MATCH.own_ids)[:3]], jnp.int32)
    drafter = other_vocabulary_drafter(dataclasses.replace(model, output_ids=own_ids), MATCH)
    assert sorted(drafter.model.output_ids.tolist()) == sorted(MATCH.output_ids[1:4].tolist())
    proposal, _ = propose(drafter, context())
    others = np.setdiff1d(np.arange(VOCAB), MATCH.output_ids[1:4])
    assert not np.asarray(proposal.probs)[..., others].any()


@pytest.mark.slow
def test_a_row_whose_text_needs_too_many_slots_stops_drafting(target):
    """Token 7 is three of the draft's tokens, and the cache has two slots per token."""
    pair = bass.Pair(target, tiny.other_vocabulary())
    prompts = [[7] * 40, [7] * 50, [1, 2, 3]]
    regular = bass.generate(pair, prompts, step="decode", max_new_tokens=14)
    run = bass.generate(pair, prompts, bass.SpecConfig(4, "greedy"), max_new_tokens=14)
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular.tokens]
    drafted = np.stack([info.num_drafted for info in run.infos])
    assert drafted[0, 0] > 0 and not drafted[:, 1].any()
    sampled = bass.generate(pair, prompts, bass.SpecConfig(4), max_new_tokens=14, sampling=SAMPLED)
    assert all(len(row) == 14 for row in sampled.tokens)


@pytest.mark.slow
def test_an_engine_gives_requests_that_come_and_go_what_they_get_alone(target):
    pair = bass.Pair(target, tiny.other_vocabulary())
    random, spec = np.random.default_rng(0), bass.SpecConfig(3)
    engine = bass.Engine(pair, spec, config=bass.EngineConfig(4, 64, chunk=16, buckets=(1, 4)), warm_up=False)
    requests, handles = [], []
    while len(handles) < 12 or not engine.loop.is_idle:
        if len(handles) < 12 and random.random() < 0.5:
            sampling = bass.SamplingParams(float(random.choice([0.0, 1.0])))
            prompt = random.integers(0, VOCAB, random.integers(1, 30)).tolist()
            requests.append({"prompt": prompt, "max_new_tokens": int(random.integers(1, 30)), "sampling": sampling})
            handles.append(engine.submit(**requests[-1], seed=len(handles)))
        engine.advance()
    for index, (request, handle) in enumerate(zip(requests, handles, strict=True)):
        options = {name: request[name] for name in ("max_new_tokens", "sampling")}
        alone = bass.generate(pair, [request["prompt"]], spec, seeds=[index], **options)
        np.testing.assert_array_equal(handle.output().tokens, alone.tokens[0])
    assert engine.counts.num_accepted > 10


def test_the_cache_is_dense_if_that_of_the_target_has_pages(target):
    """`tests/engine/test_all_drafters.py` compares the tokens."""
    config = bass.EngineConfig(2, 64, page_size=16)
    engine = bass.Engine(bass.Pair(target, tiny.other_vocabulary()), SPEC, config=config, warm_up=False)
    state = engine.executor.state
    assert is_paged(state.target_cache) and isinstance(state.drafter_state.cache, KVCache)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("rule", ["token", "block", "shared_noise"])
def test_rows_that_allow_no_shared_token_are_exact_too(rule):
    """Some settings allow no token that the draft can propose, so those rows draft nothing."""
    ids = np.arange(5)
    own_tokens, num_own = np.stack([ids, ids], axis=1), np.where(np.isin(ids, [1, 4]), 1, 2)
    drafter = other_vocabulary_drafter(
        tiny.model(13, vocab_size=5), VocabularyMatch(own_tokens, num_own, ids[[1, 4]], ids[[1, 4]], ids[:0])
    )
    settings = (*SETTINGS[-2:], {"temperature": 1.0, "banned_tokens": (1, 4)})
    assert verify_lossless(drafter, rule, settings=settings, num_samples=60_000).p_value > 1e-5
