"""Where rows end: stop tokens and limits inside an accepted run, invalid drafts and invalid distributions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bass_jax as bass
from bass_jax.drafters import Proposal
from bass_jax.engine.generate import GenerateLoop
from tests import tiny
from tests.tiny import VOCAB

NUM_NEW = 24
SPEC = bass.SpecConfig(4)
STEP = jax.jit(bass.speculate_step)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def pair(target):
    """A pair whose drafts are all accepted, so accepted runs are as long as possible."""
    return bass.Pair(target, tiny.model_drafter(target))


@pytest.fixture(scope="module")
def endless(pair):
    """The tokens of each row without stop tokens."""
    return bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=NUM_NEW).tokens


def expected_end(tokens, stop_tokens, limit):
    """Returns the tokens up to the first stop token or the limit, and the finish reason."""
    for i, token in enumerate(tokens[:limit]):
        if token in stop_tokens:
            return tokens[: i + 1].tolist(), "stop"
    return tokens[:limit].tolist(), "length"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    stop_tokens=st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True),
    limits=st.lists(st.integers(1, NUM_NEW), min_size=3, max_size=3),
    draft_len=st.integers(0, 4),
    step=st.sampled_from(["speculate", "speculate", "decode"]),
)
def test_rows_end_at_the_first_stop_token_or_the_limit(pair, endless, stop_tokens, limits, draft_len, step):
    """Also if the end is inside an accepted run. A limit must not hide a stop token."""
    run = GenerateLoop(pair, tiny.PROMPTS, SPEC, max_new_tokens=limits, stop_tokens=stop_tokens, step=step)
    run.state = run.state._replace(draft_lens=jnp.full_like(run.state.lengths, draft_len))
    for _ in run:
        pass
    result = run.result()
    for row in range(3):
        tokens, reason = expected_end(endless[row], stop_tokens, limits[row])
        assert result.tokens[row].tolist() == tokens
        assert result.finish_reasons[row] == reason
        assert bass.output_tokens(run.state, row).tolist() == tokens


def test_nothing_is_written_past_the_end(pair, endless):
    """Tokens after a stop token are in no buffer, and a finished row does not change any more."""
    state = bass.prefill(pair, tiny.PROMPTS, SPEC, max_new_tokens=[1, 2, 20], stop_tokens=[int(endless[2][9])])
    finished = {}
    while not state.done.all():
        state, _ = STEP(pair, state, SPEC)
        for row in np.flatnonzero(state.done):
            kept = finished.setdefault(row, (state.tokens[row], state.lengths[row], state.finish[row]))
            for before, now in zip(kept, (state.tokens[row], state.lengths[row], state.finish[row]), strict=True):
                np.testing.assert_array_equal(before, now)
    for tokens, length in zip(np.asarray(state.tokens), np.asarray(state.lengths), strict=True):
        assert not tokens[length:].any()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedDrafter:
    """Proposes given tokens, of which `num_drafted` are drafts and the others padding."""

    tokens: jax.Array  # [B, G]
    num_drafted: jax.Array  # [B]

    def init(self, tokens, lengths):
        return None

    def propose(self, state, context, draft_len, *, is_sampled):
        return Proposal(self.tokens[:, :draft_len], self.num_drafted, None), state

    def commit(self, state, lengths):
        return state


@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_padding_is_never_accepted(target, endless, rule):
    """Rows can have fewer drafts than the bucket, even if the padding equals the target's tokens."""
    right = np.stack([*(row[:6] for row in endless), endless[0][:6]])
    spec = bass.SpecConfig(6, rule)
    for num_drafted in ([0, 2, 6, 0], [1, 5, 3, 0]):
        pair = bass.Pair(target, FixedDrafter(jnp.asarray(right), jnp.asarray(num_drafted, jnp.int32)))
        state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=NUM_NEW)
        state, info = STEP(pair, state, spec)
        np.testing.assert_array_equal(info.num_accepted, np.minimum(num_drafted, [6, 6, 6, 0]))
        for row in range(3):
            np.testing.assert_array_equal(bass.output_tokens(state, row), endless[row][: num_drafted[row] + 1])


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_drafts_end_before_a_token_outside_the_vocabulary(target, endless, rule, wrong):
    right = np.stack([*(row[:6] for row in endless), endless[0][:6]])
    right[:, 2] = wrong
    pair = bass.Pair(target, FixedDrafter(jnp.asarray(right), jnp.full(4, 99, jnp.int32)))
    spec = bass.SpecConfig(6, rule)
    state = bass.prefill(pair, tiny.PROMPTS, spec, max_new_tokens=NUM_NEW)
    state, info = STEP(pair, state, spec)
    np.testing.assert_array_equal(info.num_drafted[:3], 2)
    for row in range(3):
        np.testing.assert_array_equal(bass.output_tokens(state, row), endless[row][:3])


def test_token_0_can_be_generated():
    """It must be neither banned nor taken for padding."""
    target = tiny.model(1)
    params = target.params | {"final_norm": jnp.full_like(target.params["final_norm"], 0.0)}
    flat = dataclasses.replace(target, params=params)  # All logits are 0, so the argmax is token 0.
    run = bass.generate(bass.Pair(flat, tiny.model_drafter(flat)), tiny.PROMPTS, SPEC, max_new_tokens=9)
    assert [row.tolist() for row in run.tokens] == [[0] * 9] * 3
    assert run.metrics.acceptance_rate == 1.0


# Invalid distributions.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BrokenModel(bass.models.Model):
    """A target with invalid logits after token 10: the first is ``value[0]``, and all are scaled by ``value[1]``."""

    value: jax.Array | None = None

    def forward(self, tokens, positions, cache, *, hidden_layers=()):
        output = super().forward(tokens, positions, cache, hidden_layers=hidden_layers)
        broken = output.logits.at[..., 0].set(self.value[0]) * self.value[1]
        return output._replace(logits=jnp.where((tokens == 10)[..., None], broken, output.logits))


def broken(target, first, factor=1.0):
    return BrokenModel(target.params, target.config, None, jnp.asarray([first, factor]))


@pytest.mark.parametrize("first, factor", [(np.nan, 1), (np.inf, 1), (0, np.nan), (0, np.inf)])
@pytest.mark.parametrize("step", ["speculate", "decode"])
def test_a_row_with_an_invalid_distribution_ends_with_a_reason(target, first, factor, step):
    """It emits nothing from that distribution, and the other rows are the same as without it."""
    pair = bass.Pair(broken(target, first, factor), bass.drafters.NgramDrafter())
    sampling = bass.SamplingParams(temperature=[1.0, 1.0, 0.0], top_p=[0.9, 0.95, 1.0], top_k=[3, 0, 0])
    options = {"sampling": sampling, "max_new_tokens": 12, "step": step, "seeds": [1, 2, 3]}
    prompts = [[1, 2, 10], [3, 1, 4, 1], [5, 6, 7, 5]]
    broken_run = bass.generate(pair, prompts, **options)
    expected = bass.generate(pair, [[1, 2, 3], *prompts[1:]], **options)
    assert broken_run.finish_reasons[0] == "not_finite"
    assert broken_run.tokens[0].size == 0
    for row in (1, 2):
        np.testing.assert_array_equal(broken_run.tokens[row], expected.tokens[row])


def test_nan_in_a_rows_cache_stays_in_the_row(target):
    """A NaN in an embedding reaches keys and values, but only of rows that contain the token."""
    embedding = target.params["embedding"].at[10, 0].set(np.nan)
    with_nan = dataclasses.replace(target, params=target.params | {"embedding": embedding})
    prompts = [[1, 2, 10], [3, 1, 4, 1], [5, 6, 7, 5]]
    found, expected = (
        bass.generate(bass.Pair(model, bass.drafters.NgramDrafter()), prompts, step="decode", max_new_tokens=8)
        for model in (with_nan, target)
    )
    assert found.finish_reasons[0] == "not_finite"
    for row in (1, 2):
        if 10 not in expected.tokens[row]:
            np.testing.assert_array_equal(found.tokens[row], expected.tokens[row])


def test_speculation_ends_a_row_at_the_same_invalid_distribution_as_regular_decoding(target):
    """The invalid distribution can be at any position of a step."""
    pair = bass.Pair(broken(target, np.nan), tiny.model_drafter(target))
    prompts = [[token] for token in range(8)]
    regular = bass.generate(pair, prompts, step="decode", max_new_tokens=20)
    assert "not_finite" in regular.finish_reasons
    for draft_len in (0, 1, 2, 3, 4):
        run = GenerateLoop(pair, prompts, SPEC, max_new_tokens=20)
        run.state = run.state._replace(draft_lens=jnp.full_like(run.state.lengths, draft_len))
        for _ in run:
            pass
        assert run.result().finish_reasons == regular.finish_reasons
        assert [row.tolist() for row in run.result().tokens] == [row.tolist() for row in regular.tokens]
