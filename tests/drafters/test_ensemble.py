"""Several drafters as one: whose turn it is, whose distribution it is, and what a network keeps while others draft."""

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
from tests.decoding.test_caches import assert_is_prefix, assert_knows_the_truth
from tests.drafters.test_protocol import LENGTHS, WANTED, G, context, init, propose

SPEC = bass.SpecConfig(4)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


def network_of(kind, target):
    return tiny.model_drafter(target) if kind == "model" else tiny.hidden_drafter(target)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NowAndThen(RepeatDrafter):
    """Says the last token again, but nothing behind a number of tokens that three divides."""

    def propose(self, state, context, draft_len, *, is_sampled):
        proposal, state = super().propose(state, context, draft_len, is_sampled=is_sampled)
        return proposal._replace(num_drafted=jnp.where(context.lengths % 3 == 0, 0, proposal.num_drafted)), state


@jax.jit
def ask(drafter, asked, num_committed):
    state = init(drafter, asked.tokens, asked.lengths)
    if reads_hidden_states(drafter):
        hidden_states = predicted(drafter.model, asked, state.hidden, num_committed)
        state = drafter.init(asked.tokens, asked.lengths, hidden_states)
    return drafter.propose(state, asked, 1, is_sampled=True)[0]


def predicted(model, asked, hidden_states, num_committed):
    """The target's hidden states as far as they are known, and what the draft takes for those behind: pass after
    pass.
    """
    slots = jnp.arange(hidden_states.shape[1])
    is_known = (slots < num_committed[:, None] - 1)[..., None]
    positions = jnp.where(slots < asked.lengths[:, None], slots, len(slots))
    for _ in range(G):
        before = jnp.pad(hidden_states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        own, _ = model.hidden_states(asked.tokens, positions, model.init_cache(*asked.tokens.shape), before)
        hidden_states = jnp.where(is_known, hidden_states, model.next_hidden(own))
    return hidden_states


@pytest.mark.parametrize("kind", ["model", "hidden"])
@pytest.mark.parametrize(
    "others, confidence_scale, enough",
    [
        ("lookup and store", None, 1.0), ("lookup and store", (0.9, 0.3, 1.0), 0.5),
        ("lookup and store", (0.1, 1.0, 0.4), 0.05),
        ("now and then", None, 1.0),  # The network is skipped, and asked behind tokens that it has not read.
    ],
)  # fmt: skip
def test_every_draft_is_the_surest_parts(target, kind, others, confidence_scale, enough):
    """Each part asked for one draft behind what stands, from a fresh start."""
    parts = tiny.ensemble_drafter(network_of(kind, target)).parts
    if others == "now and then":
        parts = (NowAndThen(), parts[-1])
    proposal, _ = propose(EnsembleDrafter(parts, confidence_scale, enough), context(), True)
    expected = [[] for _ in LENGTHS]
    turns = np.zeros(len(parts), int)
    asked = context()._replace(min_confidence=jnp.zeros(len(LENGTHS)))
    for slot in range(G):
        wanted = jnp.asarray((slot < WANTED) & (np.array([len(row) for row in expected]) == slot), jnp.int32)
        one = asked._replace(num_wanted=wanted, keys=context().keys[:, slot : slot + 1])
        found = [ask(part, one, jnp.asarray(LENGTHS)) for part in parts]
        # A part that does not say counts as sure.
        sure = [np.ones(len(LENGTHS)) if part.confidence is None else part.confidence[:, 0] for part in found]
        for row in np.flatnonzero(wanted):
            turn, most = None, -1.0
            for index, part in enumerate(found):
                worth = float(sure[index][row]) * (1.0 if confidence_scale is None else confidence_scale[index])
                if part.num_drafted[row] and most < enough and worth > most:
                    turn, most = index, worth
            if turn is None:
                continue
            turns[turn] += 1
            expected[row].append(int(found[turn].tokens[row, 0]))
            distribution = found[turn].probs
            distribution = np.eye(tiny.VOCAB)[expected[row][-1]] if distribution is None else distribution[row, 0]
            np.testing.assert_allclose(proposal.probs[row, slot], distribution, atol=1e-6)
            np.testing.assert_allclose(proposal.confidence[row, slot], sure[turn][row], atol=1e-6)
            column = int(asked.lengths[row])
            asked = asked._replace(tokens=asked.tokens.at[row, column].set(expected[row][-1]))
        asked = asked._replace(lengths=asked.lengths + wanted)
    found = [proposal.tokens[row, : int(num)].tolist() for row, num in enumerate(proposal.num_drafted)]
    assert found == expected
    assert (turns > 0).sum() > 1


def test_a_part_that_does_not_say_how_sure_it_is_comes_first():
    """It counts as sure, so nobody behind it is asked: parts in order, as long as they have something."""
    parts = (RepeatDrafter(), NgramDrafter(), tiny.model_drafter(tiny.model(1)))
    alone, _ = propose(parts[0], context(), False)
    together, (_, _, kept) = propose(EnsembleDrafter(parts), context(), False)
    np.testing.assert_array_equal(together.num_drafted, alone.num_drafted)
    for row, num in enumerate(alone.num_drafted):
        np.testing.assert_array_equal(together.tokens[row, :num], alone.tokens[row, :num])
    assert (kept.num_cached == LENGTHS - 1).all()  # Never run.


@pytest.mark.parametrize("kind", ["model", "hidden"])
def test_a_networks_cache_is_true_while_others_draft(target, kind):
    """A hole would leave the text right and let acceptance collapse in silence."""
    network = network_of(kind, target)
    pair = bass.Pair(target, EnsembleDrafter((NgramDrafter(3, 2), network), enough=0.5))
    step = jax.jit(bass.speculate_step, static_argnames="spec")
    state = bass.prefill(pair, tiny.PROMPTS, SPEC, sampling=bass.SamplingParams(1.0), max_new_tokens=60)
    lags = []
    for _ in range(8):
        state, _ = step(pair, state, SPEC)
        _, kept = state.drafter
        lags += (state.lengths - kept.num_cached)[:3].tolist()
        assert (kept.num_cached <= state.lengths - 1).all()
        if kind == "model":
            assert_is_prefix(network.model, kept.cache, state, kept.num_cached)
        else:
            assert_knows_the_truth(target, network.model, kept, state, num_behind=max(lags))
    assert max(lags) > 3  # Lookup drafted for several steps meanwhile.


def test_a_perfect_network_behind_lookup_is_always_accepted_where_lookup_is_not_wrong(target):
    pair = bass.Pair(target, EnsembleDrafter((NgramDrafter(8, 8), tiny.model_drafter(target))))
    run = bass.generate(pair, tiny.PROMPTS[:2], SPEC, max_new_tokens=40)
    drafted, accepted = run.summary.num_drafted, run.summary.num_accepted
    assert drafted > 40
    # Texts this long repeat themselves seldom; what lookup got wrong may cost the rest of a step.
    assert accepted > 0.8 * drafted


def test_nothing_to_combine_is_refused():
    with pytest.raises(ValueError, match="parts"):
        EnsembleDrafter(())
    with pytest.raises(ValueError, match=r"confidence_scale=.*: expected 1 numbers, one for each part"):
        EnsembleDrafter((NgramDrafter(),), (0.5, 1.0))


def test_what_a_pair_has_is_combined():
    network = tiny.model_drafter(tiny.model(1))
    assert [type(part).__name__ for part in ensemble_drafter(None).parts] == ["NgramDrafter"]
    parts = ensemble_drafter(network, tiny.retrieval_drafter()).parts
    assert [type(part).__name__ for part in parts] == ["NgramDrafter", "ModelDrafter", "RetrievalDrafter"]
