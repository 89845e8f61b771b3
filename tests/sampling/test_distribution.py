"""`token_distribution` against a sort in float64, and at the limits of float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.runtime.cpu_workarounds import CPU_COMPILE_TIME_OPTIONS, CPU_COMPILER_OPTIONS
from bass_jax.sampling import SamplingArrays, sample_tokens, token_distribution
from bass_jax.sampling.distribution import log_normalizer
from bass_jax.testing.enumeration import reference_distribution

token_distribution = jax.jit(token_distribution)

TOLERANCE = 2e-6
"""Rounding of exponent, sum and quotient over 97 tokens: about eps * sqrt(97) * (1 + |largest scaled logit|) / 10."""

SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 500},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.1},
    {"temperature": 0.8, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.4, "top_k": 5, "top_p": 0.95},
    {"temperature": 0.9, "top_p": 0.6, "min_p": 0.1},
)


def sampling_arrays(settings) -> SamplingArrays:
    rows = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting for setting in settings]
    return bass.SamplingParams(**{name: [row[name] for row in rows] for name in rows[0]}).sampling_arrays(len(rows), 4)


def random_logits(count: int, vocab_size: int) -> np.ndarray:
    random = np.random.default_rng(0)
    spread = random.uniform(0.1, 6, (count, 1))
    return (random.normal(size=(count, vocab_size)) * spread).astype(np.float32)


def test_the_distribution_equals_that_of_a_sort():
    logits = random_logits(2000, 97).reshape(len(SETTINGS), 125, 97)
    distribution = token_distribution(jnp.asarray(logits), sampling_arrays(SETTINGS))
    for row, setting in enumerate(SETTINGS):
        np.testing.assert_allclose(
            distribution.probs[row],
            reference_distribution(logits[row], **setting),
            atol=TOLERANCE,
            err_msg=str(setting),
        )
    np.testing.assert_array_equal(distribution.argmax, logits.argmax(-1))


@pytest.mark.parametrize("setting", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_a_setting_counts_where_it_is_the_only_one(setting):
    """On a CPU the search is left out if no row of the batch uses top-k, top-p or min-p."""
    setting = {"temperature": 0.8, **setting}
    logits = random_logits(50, 97)
    distribution = token_distribution(jnp.asarray(logits)[None], sampling_arrays([setting]))
    np.testing.assert_allclose(distribution.probs[0], reference_distribution(logits, **setting), atol=TOLERANCE)


def test_tokens_equal_to_the_last_one_kept_are_kept():
    """Rounded logits have many ties. Splitting ties would make the result depend on the order of the vocabulary."""
    logits = np.round(random_logits(2000, 12) / 2).reshape(len(SETTINGS), 125, 12)
    distribution = token_distribution(jnp.asarray(logits), sampling_arrays(SETTINGS))
    for row, setting in enumerate(SETTINGS):
        np.testing.assert_allclose(
            distribution.probs[row],
            reference_distribution(logits[row], **setting),
            atol=TOLERANCE,
            err_msg=str(setting),
        )


def test_banned_tokens_stay_banned():
    logits = random_logits(len(SETTINGS), 16)
    logits[:, 3:] = -np.inf
    probs = np.asarray(token_distribution(jnp.asarray(logits)[:, None], sampling_arrays(SETTINGS)).probs[:, 0])
    assert (probs[:, 3:] == 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)


def test_the_search_for_a_threshold_writes_nothing_of_the_vocabularys_size():
    """Each pass is one reduction. On a CPU a pass that writes arrays first takes four times as long."""
    rows = sampling_arrays([{"temperature": 0.8, "top_k": 20, "top_p": 0.95}] * 2)
    lowered = token_distribution.lower(jax.ShapeDtypeStruct((2, 5, 4099), jnp.float32), rows)
    program = lowered.compile(CPU_COMPILER_OPTIONS | CPU_COMPILE_TIME_OPTIONS).as_text()
    bodies = re.findall(r" while\(.*body=(%[\w.]+)", program)
    assert len(bodies) == 2
    for body in bodies:
        (lines,) = re.findall(rf"^{re.escape(body)} .*\n((?:  .*\n)*)", program, re.MULTILINE)
        written = [line for line in lines.splitlines() if re.match(r" *(ROOT )?%[^=]*= [^(]*4099[^(]*fusion\(", line)]
        assert " fusion(" in lines and not written, written


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy_and_finite(temperature):
    """If logits divided by a tiny temperature overflow, the distribution is NaN and token 0 is emitted."""
    distribution = token_distribution(
        jnp.asarray([[[1.0, 3.0, -2.0, 2.0]]]), sampling_arrays([{"temperature": temperature}])
    )
    np.testing.assert_array_equal(distribution.probs[0, 0], [0, 1, 0, 0])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0xFFFFFFFF])
def test_no_nan_makes_the_search_endless(bits):
    """NaN on a GPU can have all bits set. The search for a threshold ends, and other rows are not affected."""
    nan = np.array(bits, np.uint32).view(np.float32)
    logits = jnp.asarray(np.array([[nan, 1.0, 2.0], [0.0, 1.0, 2.0], [nan, nan, nan]]))[:, None]
    settings = [{"temperature": 1.0, "top_k": 2, "top_p": 0.9}] * 3
    distribution = token_distribution(logits, sampling_arrays(settings))
    np.testing.assert_allclose(
        distribution.probs[1, 0], reference_distribution(np.array([0.0, 1.0, 2.0]), **settings[0]), atol=TOLERANCE
    )
    assert not np.isfinite(log_normalizer(logits[0])).any()


@pytest.mark.parametrize(
    "row, is_finite",
    [
        ([0, 1, 2], True),
        ([-np.inf, 1, 2], True),
        ([np.inf, 1, 2], False),
        ([np.nan, 1, 2], False),
        ([-np.inf] * 3, False),
    ],
)
def test_log_normalizer_is_nan_where_no_distribution_exists(row, is_finite):
    assert bool(np.isfinite(log_normalizer(jnp.asarray(row, jnp.float32)))) == is_finite


def test_a_token_of_probability_0_is_never_sampled():
    """Not if its noise is very large, and not if the other probabilities are tiny."""
    noise = jnp.asarray([[100.0, 0.0, -5.0]])
    assert int(sample_tokens(jnp.asarray([[0.0, 0.0, 1e-30]]), noise)[0]) == 2


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -1.0),
        ("temperature", np.nan),
        ("temperature", np.inf),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", [0.1, 2.0]),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}="):
        bass.SamplingParams(**{name: value})


def test_a_setting_per_row_must_have_one_value_per_row():
    with pytest.raises(ValueError, match=r"top_p has 2 values: expected 1 or 3"):
        bass.SamplingParams(top_p=[0.5, 0.6]).sampling_arrays(3, 4)
