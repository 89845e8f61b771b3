"""Heads that draft all tokens of a step in one pass: P-EAGLE and DFlash."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import bass_jax as bass
from bass_jax.models.kv_cache import as_paged, pages_of, with_pages
from tests import tiny
from tests.drafters.test_protocol import context
from tests.tiny import VOCAB

MLP_SHAPE = (2 * 24, 16)
"""Of the joined gate and up projection of the tiny heads, which have one layer, or two with DFlash."""


def count_layers(jaxpr, *, in_loops):
    """Returns how often the jaxpr multiplies by the MLP's first weight."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while" and not in_loops:
            continue
        is_product = equation.primitive.name == "dot_general"
        count += is_product and any(one.aval.shape in (MLP_SHAPE, MLP_SHAPE[::-1]) for one in equation.invars)
        inner = jax.tree.leaves(equation.params, is_leaf=lambda one: isinstance(one, Jaxpr | ClosedJaxpr))
        for one in inner:
            if isinstance(one, Jaxpr | ClosedJaxpr):
                count += count_layers(getattr(one, "jaxpr", one), in_loops=in_loops)
    return count


@pytest.mark.parametrize("draft_len", [1, 2, 4])
def test_the_layers_are_traversed_once_per_step(draft_len):
    target, rows = tiny.model(1), context()
    rows = rows._replace(keys=rows.keys[:, :draft_len])
    drafters = {
        "eagle3": tiny.eagle3_drafter(target),
        "p-eagle": tiny.eagle3_drafter(target, mask=4),
        "dflash": tiny.dflash_drafter(target),
    }
    passes = {}
    for name, drafter in drafters.items():
        hidden = jnp.zeros((*rows.tokens.shape, 2 * target.config.width))
        state = jax.eval_shape(drafter.init, rows.tokens, rows.lengths, hidden)
        propose = jax.make_jaxpr(lambda state, own=drafter: own.propose(state, rows, draft_len, is_sampled=False))
        jaxpr = propose(state).jaxpr
        passes[name] = count_layers(jaxpr, in_loops=False), count_layers(jaxpr, in_loops=True)
    # One loop of EAGLE-3 and P-EAGLE catches up after steps without drafts. EAGLE-3 has another, with a pass for each
    # draft after the first. DFlash has two layers and nothing to catch up with.
    assert passes == {"eagle3": (1, 2 if draft_len == 1 else 3), "p-eagle": (1, 2), "dflash": (2, 2)}


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def read(target):
    """Returns a function that gives a DFlash drafter the hidden states of the rows of `context`."""
    table = np.random.default_rng(3).normal(size=(VOCAB, 2 * target.config.width)).astype(np.float32)

    def init(drafter, rows):
        return drafter.init(rows.tokens, rows.lengths, jnp.asarray(table)[rows.tokens])

    return jax.jit(init)


@functools.partial(jax.jit, static_argnames=("draft_len", "is_sampled"))
def propose(drafter, state, rows, draft_len, is_sampled):
    return drafter.propose(state, rows, draft_len, is_sampled=is_sampled)[0]


def test_a_block_does_not_depend_on_the_draft_length(target, read):
    drafter, rows = tiny.dflash_drafter(target), context()
    state = read(drafter, rows)
    whole = propose(drafter, state, rows, 4, True)
    one = propose(drafter, state, rows._replace(keys=rows.keys[:, :1]), 1, True)
    np.testing.assert_allclose(whole.probs[:, :1], one.probs, atol=1e-6)


def test_more_drafts_than_a_block_has_are_refused(target, read):
    """The bucket of the longest draft is accepted, and its last positions are not drafted."""
    drafter, rows = tiny.dflash_drafter(target, block_size=6), context()
    assert drafter.max_draft_len == 5
    rows = rows._replace(num_wanted=jnp.full(5, 6), keys=jnp.concatenate([rows.keys, rows.keys[:, :4]], axis=1))
    proposal = propose(drafter, read(drafter, rows), rows._replace(keys=rows.keys[:, :6]), 6, False)
    assert proposal.num_drafted.tolist() == [5] * 5
    with pytest.raises(ValueError, match="draft_len=8: expected at most 5, the drafts of a block of block_size=6"):
        jax.eval_shape(lambda: drafter.propose(read(drafter, rows), rows, 8, is_sampled=False))
    pair = bass.Pair(target, drafter)
    with pytest.raises(ValueError, match="draft_len=6: the drafter proposes at most 5 tokens per step"):
        bass.generate(pair, [[1, 2]], bass.SpecConfig(6), max_new_tokens=4)
    with pytest.raises(ValueError, match="draft_len=6: the drafter proposes at most 5 tokens per step"):
        bass.Engine(pair, bass.SpecConfig(6), config=bass.EngineConfig(1, 64))
    with pytest.raises(ValueError, match="block_size=1: expected a block with at least one draft"):
        dataclasses.replace(drafter.model.head, block_size=1)


def test_a_block_reads_known_positions_only(target, read):
    """Slots of rejected drafts are not read."""
    drafter, rows = tiny.dflash_drafter(target), context()
    state = read(drafter, rows)
    expected = propose(drafter, state, rows, 4, True)
    slots = jnp.arange(state.cache.capacity)
    is_known = (slots < rows.lengths[:, None] - 1)[:, None, :, None]
    spoiled = jax.tree.map(lambda layer: jnp.where(is_known, layer, 100.0), state.cache)
    found = propose(drafter, state._replace(cache=spoiled), rows, 4, True)
    np.testing.assert_array_equal(found.probs, expected.probs)


def test_paged_and_dense_caches_give_the_same_drafts(target, read):
    drafter, rows = tiny.dflash_drafter(target), context()
    expected = propose(drafter, read(drafter, rows), rows, 4, True)
    num_rows, capacity = rows.tokens.shape
    # Each row has the one page that its tokens fill. NaN is what other rows left there.
    tables = jnp.full((num_rows, capacity // 16), num_rows).at[:, 0].set(jnp.arange(num_rows)[::-1])
    empty = as_paged(drafter.start(num_rows, capacity), num_rows, 16, tables)
    pages = jax.tree.map(lambda one: jnp.full_like(one, jnp.nan), pages_of(empty))
    empty = with_pages(empty, pages)
    table = np.random.default_rng(3).normal(size=(VOCAB, 2 * target.config.width)).astype(np.float32)
    positions = jnp.arange(16)
    positions = jnp.where(positions < rows.lengths[:, None] - 1, positions, capacity)
    state = drafter.read(empty, rows.tokens[:, :16], positions, jnp.asarray(table)[rows.tokens[:, :16]])
    found = propose(drafter, state, rows, 4, True)
    np.testing.assert_allclose(found.probs, expected.probs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_steps_without_drafts_come_between(target, kind):
    """Rows lag behind for a while, each for another number of steps, and the tokens stay those of regular decoding."""
    drafter = {"mtp": tiny.mtp_drafter, "dflash": tiny.dflash_drafter}[kind](target)
    pair, spec = bass.Pair(target, drafter), bass.SpecConfig(4, "greedy")
    expected = bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=30).tokens
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=30)
    steps = {name: jax.jit(step) for name, step in (("draft", bass.speculate_step), ("decode", bass.decode_step))}
    random, count = np.random.default_rng(0), 0
    while not state.done.all():
        wanted = jnp.asarray(random.integers(0, 5, state.lengths.shape) * random.integers(0, 2, state.lengths.shape))
        step = steps["decode" if count % 5 in (1, 2) else "draft"]
        state, _ = step(pair, state._replace(draft_lens=wanted.astype(jnp.int32)), spec)
        count += 1
    for row, tokens in enumerate(expected):
        np.testing.assert_array_equal(bass.output_tokens(state, row), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_the_default_policy_drafts_what_a_block_has(target, block_size):
    pair = bass.Pair(target, tiny.dflash_drafter(target, block_size=block_size))
    run = bass.generate(pair, tiny.PROMPTS, max_new_tokens=60)
    expected = bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=60).tokens
    for found, tokens in zip(run.tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)
    assert max(info.num_drafted.max() for info in run.infos) <= block_size - 1


@pytest.mark.slow
def test_a_block_is_part_of_an_ensemble(target):
    """Drafts of the other parts have no hidden states, so the context of the block ends before them."""
    pair = bass.Pair(target, tiny.ensemble_drafter(tiny.dflash_drafter(target)))
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(3, "greedy"), max_new_tokens=40)
    expected = bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=40).tokens
    for found, tokens in zip(run.tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)
