"""Bias, bans, penalties and minimum length against plain loops, at every position of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.decoding.state import FinishReason
from bass_jax.sampling import LogitsProcessors
from tests import tiny
from tests.marks import mostly_slow

V, C, T = 13, 24, 5
PROMPT_LENGTHS = np.array([3, 1, 6, 4], np.int32)
LENGTHS = np.array([3, 7, 9, 15], np.int32)
SETTINGS = {
    "repetition_penalty": [1.3, 1.0, 0.7, 2.0],
    "frequency_penalty": [0.5, 0.0, -0.4, 1.5],
    "presence_penalty": [0.0, 0.8, 0.3, -0.2],
    "logit_bias": [{2: 1.5, 4: -0.5}, None, {0: -np.inf}, {5: 3.0}],
    "allowed_tokens": [None, (1, 2, 3, 5, 8), None, None],
    "banned_tokens": [(7,), None, (), (3, 4)],
    "min_new_tokens": [3, 0, 5, 20],
}
PROCESS = jax.jit(LogitsProcessors.__call__)
STOPS = np.array([[1, 9, -1]] * 4, np.int32)


def case(seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(4, T, V)).astype(np.float32) * 3, random.integers(0, V, (4, C)).astype(np.int32)


def processed_by_loops(logits, tokens):
    """Computes the processed logits position by position and token by token, in float64."""
    logits = logits.astype(np.float64)
    for row in range(4):
        setting = {name: values[row] for name, values in SETTINGS.items()}
        for t in range(T):
            before = tokens[row, : LENGTHS[row] + t].tolist()
            output = before[PROMPT_LENGTHS[row] :]
            for token in range(V):
                x = logits[row, t, token] + (setting["logit_bias"] or {}).get(token, 0.0)
                is_banned = setting["allowed_tokens"] is not None and token not in setting["allowed_tokens"]
                is_banned |= token in (setting["banned_tokens"] or ())
                is_banned |= len(output) < setting["min_new_tokens"] and token in STOPS[row]
                if token in before:
                    x = x * setting["repetition_penalty"] if x < 0 else x / setting["repetition_penalty"]
                x -= setting["frequency_penalty"] * output.count(token)
                x -= setting["presence_penalty"] * (token in output)
                logits[row, t, token] = -np.inf if is_banned else x
    return logits


def processors(settings=SETTINGS, processors=()) -> LogitsProcessors:
    sampling_arrays = bass.SamplingParams(**settings).sampling_arrays(4, V)
    return LogitsProcessors(
        sampling_arrays.processor_arrays, jnp.asarray(PROMPT_LENGTHS), jnp.asarray(STOPS), processors
    )


def test_every_position_is_processed_with_the_tokens_before_it():
    for seed in range(20):
        logits, tokens = case(seed)
        found = PROCESS(processors(), jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(LENGTHS))
        np.testing.assert_allclose(found, processed_by_loops(logits, tokens), rtol=1e-5, atol=1e-5)


def test_tokens_at_or_after_a_position_are_not_read():
    logits, tokens = case()
    dirty = np.where(np.arange(C) < LENGTHS[:, None] + T - 1, tokens, 1_000_000)
    arguments = jnp.asarray(logits), jnp.asarray(LENGTHS)
    one, other = (PROCESS(processors(), arguments[0], jnp.asarray(some), arguments[1]) for some in (tokens, dirty))
    np.testing.assert_array_equal(one, other)


def test_without_settings_the_logits_are_returned_unchanged():
    """The same array object is returned, so a decoder without penalties has no cost."""
    logits, tokens = case()
    idle = processors({})
    assert idle.is_identity
    given = jnp.asarray(logits)
    assert idle(given, jnp.asarray(tokens), jnp.asarray(LENGTHS)) is given


def test_a_processor_receives_only_the_tokens_before_the_position():
    def last_token_again(logits, tokens, position):
        return logits + 10.0 * jax.nn.one_hot(tokens[position - 1], V) - jnp.where(tokens[position] == -1, 0.0, jnp.inf)

    logits, tokens = case()
    found = processors({}, (last_token_again,))(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(LENGTHS))
    for row in range(4):
        for t in range(T):
            expected = logits[row, t].copy()
            expected[tokens[row, LENGTHS[row] + t - 1]] += 10
            np.testing.assert_allclose(found[row, t], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"repetition_penalty": 0.0}, r"^repetition_penalty=0.0: expected a finite number above 0"),
        ({"repetition_penalty": [1.0, -1.0]}, r"^repetition_penalty=-1.0"),
        ({"frequency_penalty": np.nan}, r"^frequency_penalty=nan"),
        ({"presence_penalty": np.inf}, r"^presence_penalty=inf"),
        ({"min_new_tokens": -1}, r"^min_new_tokens=-1"),
        ({"min_new_tokens": 1.5}, r"^min_new_tokens=1.5"),
        ({"logit_bias": {1: np.nan}}, r"^logit_bias=nan"),
        ({"logit_bias": {1: np.inf}}, r"^logit_bias=inf"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        bass.SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"logit_bias": {V: 1.0}}, r"^logit_bias has token 13: the vocabulary has 13 tokens"),
        ({"allowed_tokens": [-1]}, r"^allowed_tokens has token -1: the vocabulary has 13 tokens"),
        ({"banned_tokens": np.array([1.5])}, r"^banned_tokens=array.*: expected a sequence of token ids"),
        ({"banned_tokens": [(1,), (2,)]}, r"^banned_tokens has 2 values: expected one for all or 4"),
        ({"logit_bias": [{1: 1.0}, None]}, r"^logit_bias has 2 values"),
        ({"allowed_tokens": [1, 2], "banned_tokens": [1, 2]}, r"^row 0: .* ban all tokens"),
        ({"allowed_tokens": ()}, r"^row 0: .* ban all tokens"),
    ],
)
def test_invalid_token_ids_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        bass.SamplingParams(**settings).sampling_arrays(4, V)


def _ban_all_after_7(logits, tokens, position):
    return jnp.where(tokens[position - 1] == 7, -jnp.inf, logits)


def _nan_after_7(logits, tokens, position):
    return jnp.where(tokens[position - 1] == 7, jnp.nan, logits)


REASONS = ((_ban_all_after_7, FinishReason.NO_TOKEN), (_nan_after_7, FinishReason.NOT_FINITE))


@pytest.mark.parametrize(
    "drafter, rule, processor, reason",
    mostly_slow(
        [
            (drafter, rule, *reason)
            for drafter in ("table", "model")
            for rule in ("greedy", "token", "block", "shared_noise")
            for reason in REASONS
        ],
        lambda case: (
            case[0] == "table" and (case[1], case[2] == _ban_all_after_7) in (("greedy", True), ("token", False))
        ),
    ),
)
def test_a_row_without_a_possible_token_ends_with_a_reason(drafter, rule, processor, reason):
    """Otherwise the argmax of an invalid distribution would appear in the text."""
    target = tiny.model(1)
    drafter = tiny.table_drafter() if drafter == "table" else tiny.model_drafter(tiny.perturbed(target, 0.2))
    pair = bass.Pair(target, drafter)
    sampling = bass.SamplingParams(temperature=0.0 if rule == "greedy" else 1.3)
    prompts = [[token] for token in range(8)]
    spec = bass.SpecConfig(4, rule, logits_processors=(processor,))
    run = bass.generate(pair, prompts, spec, sampling=sampling, max_new_tokens=30)
    ended = [row for row, finish in enumerate(run.finish_reasons) if finish == reason.name.lower()]
    assert 7 in ended and not run.tokens[7].size
    for row in range(8):
        is_ended = row in ended
        assert 7 not in run.tokens[row][:-1].tolist()
        assert (run.tokens[row].size < 30 and (row == 7 or run.tokens[row][-1] == 7)) == is_ended


def test_an_invalid_processor_is_refused():
    pair = bass.Pair(tiny.model(1), tiny.table_drafter())
    for processor, message in [
        ("nowhere:nothing", "logits_processors='nowhere:nothing'"),
        ("math:pi", "logits_processors='math:pi': expected a function"),
        (lambda logits, tokens, position: logits[:3], "returned shape"),
    ]:
        spec = bass.SpecConfig(2, logits_processors=(processor,))
        with pytest.raises(ValueError, match=message):
            bass.decode_step(pair, bass.prefill(pair, [[1]], spec), spec)


ALL_SETTINGS = bass.SamplingParams(
    repetition_penalty=[1.2, 1.0, 1.5],
    frequency_penalty=[0.3, 1.0, 0.0],
    presence_penalty=0.2,
    logit_bias={1: 0.7},
    banned_tokens=(2,),
    min_new_tokens=[12, 0, 40],
)


@pytest.fixture(scope="module")
def regular():
    pair = bass.Pair(tiny.model(1), tiny.table_drafter())
    return bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=40, stop_tokens=[9], sampling=ALL_SETTINGS)


@pytest.mark.parametrize(
    "drafter, draft_len",
    mostly_slow(
        [("model", 4), ("model", 1), ("reduced vocabulary", 4), ("reduced vocabulary", 1)],
        lambda case: case == ("model", 4),
    ),
)
def test_greedy_speculation_with_all_settings_equals_regular_decoding(regular, drafter, draft_len):
    """Penalties change at every position of a step."""
    assert all(2 not in row for row in regular.tokens)
    assert 9 not in regular.tokens[0][:12] and 9 not in regular.tokens[2]
    target = tiny.model(1)
    draft = tiny.perturbed(target, 0.1) if drafter == "model" else tiny.reduced_vocabulary((1, 3, 5))
    pair = bass.Pair(target, tiny.model_drafter(draft))
    run = bass.generate(
        pair,
        tiny.PROMPTS,
        bass.SpecConfig(draft_len),
        max_new_tokens=40,
        stop_tokens=[9],
        sampling=ALL_SETTINGS,
    )
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular.tokens]
    assert run.finish_reasons == regular.finish_reasons


@pytest.mark.slow
def test_the_draft_model_applies_the_same_processors():
    """With the target as its own draft model, all drafts are accepted. Ignoring penalties would reduce acceptance."""
    target = tiny.model(1)
    sampling = bass.SamplingParams(temperature=[0.0, 1.0, 1.0], repetition_penalty=1.8, frequency_penalty=0.5)
    pair = bass.Pair(target, tiny.model_drafter(target))
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), sampling=sampling, max_new_tokens=40)
    assert run.metrics.acceptance_rate > 0.99
