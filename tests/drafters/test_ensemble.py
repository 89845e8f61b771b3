"""The ensemble: which part proposes a draft, its distribution, and the cache of a network while other parts draft."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import EnsembleDrafter, NgramDrafter, reads_hidden_states
from bass_jax.drafters.ensemble import ensemble_drafter
from bass_jax.drafters.template import RepeatDrafter
from tests import tiny
from tests.decoding.test_caches import assert_eagle_state_is_correct, assert_is_prefix
from tests.drafters.test_protocol import LENGTHS, WANTED, G, context, init, propose
from tests.marks import mostly_slow

SPEC = bass.SpecConfig(4)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


def network_of(kind, target):
    return tiny.model_drafter(target) if kind == "model" else tiny.eagle_drafter(target)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PeriodicDrafter(RepeatDrafter):
    """Repeats the last token, but drafts nothing if the number of tokens is divisible by 3."""

    def propose(self, state, context, draft_len, *, is_sampled):
        proposal, state = super().propose(state, context, draft_len, is_sampled=is_sampled)
        return proposal._replace(num_drafted=jnp.where(context.lengths % 3 == 0, 0, proposal.num_drafted)), state


@jax.jit
def propose_one(drafter, current, num_committed):
    state = init(drafter, current.tokens, current.lengths)
    if reads_hidden_states(drafter):
        hidden_states = predicted(drafter.model, current, state.hidden, num_committed)
        state = drafter.init(current.tokens, current.lengths, hidden_states)
    return drafter.propose(state, current, 1, is_sampled=True)[0]


def predicted(model, current, hidden_states, num_committed):
    """Returns the target's hidden states where they are known, and the draft model's predictions after them."""
    slots = jnp.arange(hidden_states.shape[1])
    is_known = (slots < num_committed[:, None] - 1)[..., None]
    positions = jnp.where(slots < current.lengths[:, None], slots, len(slots))
    for _ in range(G):
        before = jnp.pad(hidden_states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        own = model.hidden_states(current.tokens, positions, model.init_cache(*current.tokens.shape), before).hidden
        hidden_states = jnp.where(is_known, hidden_states, model.next_hidden(own))
    return hidden_states


OTHERS = (
    ("lookup and retrieval", None, 1.0),
    ("lookup and retrieval", (0.9, 0.3, 1.0), 0.5),
    ("lookup and retrieval", (0.1, 1.0, 0.4), 0.05),
    ("periodic", None, 1.0),  # The network is skipped, and is then run after tokens that it has not read.
)


@pytest.mark.parametrize(
    "kind, others, confidence_scale, sufficient_score",
    mostly_slow(
        [(kind, *others) for kind in ("model", "eagle") for others in OTHERS],
        lambda case: False,
    ),
)
def test_every_draft_is_that_of_the_most_confident_part(target, kind, others, confidence_scale, sufficient_score):
    """Compares with single drafts of each part, computed from a new state after the drafts so far."""
    parts = tiny.ensemble_drafter(network_of(kind, target)).parts
    if others == "periodic":
        parts = (PeriodicDrafter(), parts[-1])
    proposal, _ = propose(EnsembleDrafter(parts, confidence_scale, sufficient_score), context(), True)
    expected = [[] for _ in LENGTHS]
    turns = np.zeros(len(parts), int)
    current = context()._replace(min_confidence=jnp.zeros(len(LENGTHS)))
    for slot in range(G):
        wanted = jnp.asarray((slot < WANTED) & (np.array([len(row) for row in expected]) == slot), jnp.int32)
        one = current._replace(num_wanted=wanted, keys=context().keys[:, slot : slot + 1])
        found = [propose_one(part, one, jnp.asarray(LENGTHS)) for part in parts]
        confidence = [np.ones(len(LENGTHS)) if part.confidence is None else part.confidence[:, 0] for part in found]
        for row in np.flatnonzero(wanted):
            turn, best = None, -1.0
            for index, part in enumerate(found):
                score = float(confidence[index][row]) * (1.0 if confidence_scale is None else confidence_scale[index])
                if part.num_drafted[row] and best < sufficient_score and score > best:
                    turn, best = index, score
            if turn is None:
                continue
            turns[turn] += 1
            expected[row].append(int(found[turn].tokens[row, 0]))
            probs = found[turn].probs
            probs = np.eye(tiny.VOCAB)[expected[row][-1]] if probs is None else probs[row, 0]
            np.testing.assert_allclose(proposal.probs[row, slot], probs, atol=1e-6)
            np.testing.assert_allclose(proposal.confidence[row, slot], confidence[turn][row], atol=1e-6)
            column = int(current.lengths[row])
            current = current._replace(tokens=current.tokens.at[row, column].set(expected[row][-1]))
        current = current._replace(lengths=current.lengths + wanted)
    found = [proposal.tokens[row, : int(num)].tolist() for row, num in enumerate(proposal.num_drafted)]
    assert found == expected
    assert (turns > 0).sum() > 1


def test_a_part_without_confidence_counts_as_fully_confident():
    """Later parts are therefore only run for rows where it drafts nothing."""
    parts = (RepeatDrafter(), NgramDrafter(), tiny.model_drafter(tiny.model(1)))
    alone, _ = propose(parts[0], context(), False)
    together, (_, _, kept) = propose(EnsembleDrafter(parts), context(), False)
    np.testing.assert_array_equal(together.num_drafted, alone.num_drafted)
    for row, num in enumerate(alone.num_drafted):
        np.testing.assert_array_equal(together.tokens[row, :num], alone.tokens[row, :num])
    assert (kept.num_cached == LENGTHS - 1).all()  # The network was not run.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_a_networks_cache_stays_correct_while_other_parts_draft(target, kind):
    """An error in this cache would reduce acceptance without changing the output."""
    network = network_of(kind, target)
    pair = bass.Pair(target, EnsembleDrafter((NgramDrafter(3, 2), network), sufficient_score=0.5))
    step = jax.jit(bass.speculate_step)
    state = bass.prefill(pair, tiny.PROMPTS, SPEC, sampling=bass.SamplingParams(1.0), max_new_tokens=60)
    lags = []
    for _ in range(20):
        state, _ = step(pair, state, SPEC)
        _, kept = state.drafter_state
        lags += (state.lengths - kept.num_cached)[:3].tolist()
        assert (kept.num_cached <= state.lengths - 1).all()
        if kind == "model":
            assert_is_prefix(network.model, kept.cache, state, kept.num_cached)
        else:
            assert_eagle_state_is_correct(target, network.model, kept, state, num_behind=max(lags))
    assert max(lags) > 3  # Lookup drafted for several steps in a row.


@pytest.mark.slow
def test_drafts_of_a_perfect_network_after_lookup_are_accepted(target):
    pair = bass.Pair(target, EnsembleDrafter((NgramDrafter(8, 8), tiny.model_drafter(target))))
    run = bass.generate(pair, tiny.PROMPTS[:2], SPEC, max_new_tokens=40)
    drafted, accepted = run.metrics.num_drafted, run.metrics.num_accepted
    assert drafted > 40
    # Matches of 8 tokens are rare. A wrong draft of lookup can reject the rest of a step.
    assert accepted > 0.8 * drafted


def test_invalid_parts_are_refused():
    with pytest.raises(ValueError, match="parts"):
        EnsembleDrafter(())
    with pytest.raises(ValueError, match=r"confidence_scale=.*: expected 1 numbers, one for each part"):
        EnsembleDrafter((NgramDrafter(),), (0.5, 1.0))


def test_an_ensemble_has_the_given_parts():
    network = tiny.model_drafter(tiny.model(1))
    assert [type(part).__name__ for part in ensemble_drafter(None).parts] == ["NgramDrafter"]
    parts = ensemble_drafter(network, tiny.retrieval_drafter()).parts
    assert [type(part).__name__ for part in parts] == ["NgramDrafter", "ModelDrafter", "RetrievalDrafter"]
