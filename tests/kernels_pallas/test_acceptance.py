"""Masked acceptance: every implementation against the reference, the distribution of its tokens, invalid inputs."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from kernels_pallas import KernelSampling, masked_acceptance, reference
from kernels_pallas.acceptance import random_bits
from kernels_pallas.acceptance.triton import masked_acceptance_triton
from kernels_pallas.acceptance.types import AcceptanceInputs
from kernels_pallas.arg_specs import ACCEPTANCE_SPECS, AcceptanceSpec, acceptance_arguments
from kernels_pallas.tuning import AcceptanceTiles
from tests.marks import mostly_slow

IMPLEMENTATIONS = ("triton", "xla")
SPEC_BY_NAME = {spec.name: spec for spec in ACCEPTANCE_SPECS}
SMALL = AcceptanceSpec("small", 8, 3, 37)
BATCH = 3000
"""Rows of the statistical tests; one number, because compiling the interpreter's loop takes seconds per shape."""

# Tests change arguments and results in NumPy, because jax compiles every operation outside of a jitted function.
_expect = jax.jit(lambda arguments: reference.masked_acceptance(**arguments))
_target_probs = jax.jit(reference.target_probs)


@functools.cache
def make_arguments(spec, seed=0):
    return jax.device_get(acceptance_arguments(spec, seed=seed))


def expect(arguments):
    return jax.device_get(_expect(arguments))


@functools.partial(jax.jit, static_argnames="implementation")
def _run(arguments, implementation):
    return masked_acceptance(**arguments, implementation=implementation, interpret=True)


def run(arguments, implementation):
    return jax.device_get(_run(arguments, implementation))


def assert_same(out, expected):
    np.testing.assert_array_equal(out.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(out.next_token, expected.next_token)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(out.is_valid, expected.is_valid)


def plain_sampling(batch, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    values = ((temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (min_p, np.float32))
    return KernelSampling(*(np.full(batch, value, dtype) for value, dtype in values))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", mostly_slow(SPEC_BY_NAME, lambda name: name == "qwen3_8b_ngram"))
def test_equals_reference_token_for_token(name, implementation):
    for seed in range(2):
        arguments = make_arguments(SPEC_BY_NAME[name].reduced(), seed=seed)
        assert_same(run(arguments, implementation), expect(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2_135m", "qwen3_8b_ngram"])
def test_blocks_of_a_vocabulary_merge(name):
    """Several blocks, of which the last is partly past the vocabulary, in every launch."""
    arguments = acceptance_arguments(SPEC_BY_NAME[name].reduced(), seed=5)
    out = masked_acceptance_triton(AcceptanceInputs(**arguments), tiles=AcceptanceTiles(128, 64, 4), interpret=True)
    assert_same(out, expect(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("draft_len, vocab_size", [(0, 2), (0, 41), (3, 2), (3, 41)])
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31 - 1), data=st.data())
def test_any_sampling_parameters(draft_len, vocab_size, seed, data):
    batch = 4
    spec = AcceptanceSpec("random", batch, draft_len, vocab_size, "float32", vocab_size == 41)
    arguments = make_arguments(spec, seed=seed % 5)
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), 2 * batch))
    arguments = arguments | {"accept_keys": keys[:batch], "residual_keys": keys[batch:]}

    def rows(values, dtype):
        return jnp.asarray(data.draw(st.lists(values, min_size=batch, max_size=batch)), dtype)

    arguments["num_drafted"] = rows(st.integers(0, draft_len), jnp.int32)
    arguments["sampling"] = KernelSampling(
        rows(st.sampled_from([0.0, 0.3, 1.0, 2.0]), jnp.float32),
        rows(st.integers(0, vocab_size + 3), jnp.int32),
        rows(st.sampled_from([0.013, 0.21, 0.77, 0.93, 1.0]), jnp.float32),
        rows(st.sampled_from([0.0, 0.031, 0.4, 1.0]), jnp.float32),
    )
    expected = expect(arguments)
    for implementation in IMPLEMENTATIONS:
        assert_same(run(arguments, implementation), expected)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_random_bits_equal_jax_random(seed):
    key = jax.random.key(seed)
    words = tuple(jax.random.key_data(key))
    index = jnp.arange(1000, dtype=jnp.uint32)
    np.testing.assert_array_equal(random_bits.random_bits(words, index), jax.random.bits(key, (1000,)))
    np.testing.assert_array_equal(random_bits.uniform_at(words, index), 1.0 - jax.random.uniform(key, (1000,)))
    np.testing.assert_array_equal(random_bits.gumbel_at(words, index), jax.random.gumbel(key, (1000,)))


def test_uniform_is_never_zero(monkeypatch):
    """With u = 0 a draft of target probability 0 would be accepted."""
    for bits in (0, 2**32 - 1):
        monkeypatch.setattr(random_bits, "random_bits", lambda key, index, bits=bits: jnp.full_like(index, bits))
        value = random_bits.uniform_at((0, 0), jnp.zeros((1,), jnp.uint32))[0]
        assert 0.0 < value <= 1.0


def equal_rows(is_deterministic=False, seed=11, **sampling):
    """Returns arguments with the same distributions in every row, drafts sampled from them, and a key per row."""
    batch, vocab_size, draft_len = BATCH, 8, 2
    one = make_arguments(AcceptanceSpec("spec", 1, draft_len, vocab_size), seed=seed)
    draft_probs = np.broadcast_to(one["draft_probs"], (batch, draft_len, vocab_size))
    drafts, accept_keys, residual_keys = jax.device_get(random_drafts(seed, draft_probs))
    if is_deterministic:
        drafts = np.broadcast_to(one["draft_tokens"], (batch, draft_len))
    return {
        "draft_tokens": drafts,
        "num_drafted": np.full(batch, draft_len, np.int32),
        "target_logits": np.broadcast_to(one["target_logits"] / 2, (batch, draft_len + 1, vocab_size)),
        "draft_probs": None if is_deterministic else draft_probs,
        "accept_keys": accept_keys,
        "residual_keys": residual_keys,
        "sampling": plain_sampling(batch, **sampling),
    }


@jax.jit
def random_drafts(seed, draft_probs):
    """Returns drafts that follow `draft_probs`, and two keys per row."""
    keys = jax.random.split(jax.random.key(seed), 3)
    drafts = jax.random.categorical(keys[0], jnp.log(draft_probs), axis=-1).astype(jnp.int32)
    return drafts, *(jax.random.key_data(jax.random.split(key, len(draft_probs))) for key in keys[1:])


def probs_at(arguments, position):
    """Returns the `[V]` float64 target distribution of every row at `position`."""
    logits = arguments["target_logits"][:1, position : position + 1]
    distribution = _target_probs(logits, *(setting[:1] for setting in arguments["sampling"]))
    return np.asarray(distribution, np.float64)[0, 0]


def first_token_p_value(arguments, implementation):
    """Returns the p-value of a chi-square test of the first emitted tokens against the target's distribution."""
    out = run(arguments, implementation)
    first = np.where(out.num_accepted > 0, arguments["draft_tokens"][:, 0], out.next_token)
    distribution = probs_at(arguments, 0)
    counts = np.bincount(np.asarray(first), minlength=distribution.size)
    assert not counts[distribution == 0].any()
    kept = distribution > 0
    return scipy.stats.chisquare(counts[kept], distribution[kept] / distribution[kept].sum() * counts.sum()).pvalue


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.8, "top_k": 6, "top_p": 0.9}, {"min_p": 0.1}])
def test_first_token_follows_the_target_distribution(implementation, is_deterministic, setting):
    arguments = equal_rows(is_deterministic, **setting)
    assert first_token_p_value(arguments, implementation) > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wrong_draft_distribution_is_detected(implementation):
    """The negative control of the test above: the drafts were sampled from another distribution."""
    arguments = equal_rows()
    arguments["draft_probs"] = np.full_like(arguments["draft_probs"], 1 / 8)
    assert first_token_p_value(arguments, implementation) < 1e-9


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_token_follows_the_target_distribution_given_the_first(implementation):
    """The random numbers of two positions and of the residual are independent."""
    arguments = equal_rows()
    out = run(arguments, implementation)
    has_second = np.asarray(out.num_accepted) >= 1
    second = np.where(out.num_accepted >= 2, arguments["draft_tokens"][:, 1], out.next_token)
    distribution = probs_at(arguments, 1)
    counts = np.bincount(np.asarray(second)[has_second], minlength=8)
    assert has_second.sum() > 500
    assert scipy.stats.chisquare(counts, distribution / distribution.sum() * counts.sum()).pvalue > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_residual_falls_back_to_the_target(implementation):
    """The draft distribution is a multiple of the target's, so the residual is empty, as it can be by rounding."""
    arguments = equal_rows()
    target = jax.device_get(_target_probs(arguments["target_logits"], *arguments["sampling"]))
    arguments["draft_probs"] = np.float32(4.0) * target[:, :2]
    out = run(arguments, implementation)
    rejected = np.asarray(out.num_accepted) == 0
    assert rejected.sum() > 300
    counts = np.bincount(np.asarray(out.next_token)[rejected], minlength=8)
    distribution = np.asarray(target[0, 0], np.float64)
    assert scipy.stats.chisquare(counts, distribution / distribution.sum() * counts.sum()).pvalue > 1e-3
    assert out.is_valid.all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dropped_token_is_never_accepted(implementation):
    """Drafts outside top-k, even if the draft distribution gives them almost no probability."""
    arguments = equal_rows(top_k=3)
    order = np.argsort(arguments["target_logits"][:, :2], axis=-1)
    arguments["draft_tokens"] = order[..., 2].astype(np.int32)
    arguments["draft_probs"] = np.full_like(arguments["draft_probs"], 1e-30)
    out = run(arguments, implementation)
    assert not out.num_accepted.any()
    assert (np.argsort(order[:, 0], axis=-1)[np.arange(BATCH), out.next_token] >= 5).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_drafts_are_never_accepted(implementation):
    """Rows with fewer drafts than slots; the padding is the target's own choice, or no token at all."""
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8, temperature=0.0)}
    mode = np.argmax(arguments["target_logits"], axis=-1).astype(np.int32)
    num_drafted = np.array([0, 1, 2, 3, 0, 1, 2, 3], np.int32)
    is_padding = np.arange(3) >= num_drafted[:, None]
    for padding in (mode[:, :3], np.full((8, 3), -1), np.full((8, 3), 2**31 - 1)):
        arguments["draft_tokens"] = np.where(is_padding, padding, mode[:, :3]).astype(np.int32)
        arguments["num_drafted"] = num_drafted
        out = run(arguments, implementation)
        np.testing.assert_array_equal(out.num_accepted, num_drafted)
        np.testing.assert_array_equal(out.next_token, mode[np.arange(8), num_drafted])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_rows_need_no_draft_distribution(implementation):
    """The draft distribution, here NaN, is not read."""
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8, temperature=0.0, top_k=2, top_p=0.1)}
    mode = np.argmax(arguments["target_logits"], axis=-1).astype(np.int32)
    wrong = (mode[:, :3] + 1) % SMALL.vocab_size
    first_wrong = np.arange(8) % 4
    arguments["draft_tokens"] = np.where(np.arange(3) < first_wrong[:, None], mode[:, :3], wrong)
    arguments["num_drafted"] = np.full(8, 3, np.int32)
    arguments["draft_probs"] = np.full_like(arguments["draft_probs"], np.nan)
    out = run(arguments, implementation)
    np.testing.assert_array_equal(out.num_accepted, first_wrong)
    np.testing.assert_array_equal(out.next_token, mode[np.arange(8), first_wrong])
    assert out.is_valid.all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_invalid_logits_invalidate_their_row_only(implementation, temperature, bad):
    """No token is emitted from them, and positions past the drafts have no effect."""
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8, temperature=temperature)}
    mode = np.argmax(arguments["target_logits"], axis=-1).astype(np.int32)
    arguments["draft_tokens"] = mode[:, :3]
    arguments["num_drafted"] = np.array([3, 3, 3, 1, 3, 3, 3, 3], np.int32)
    arguments["draft_probs"] = np.full_like(arguments["draft_probs"], 1e-9)
    expected = run(arguments, implementation)
    logits = arguments["target_logits"].copy()
    logits[0, 0, 5] = logits[1, 2] = logits[2, 3, 0] = logits[3, 2] = bad
    out = run(arguments | {"target_logits": logits}, implementation)
    np.testing.assert_array_equal(out.num_accepted[:4], [0, 2, 3, 1])
    np.testing.assert_array_equal(out.is_valid, [False, False, False, True, True, True, True, True])
    assert not out.next_token[:3].any()
    assert np.isfinite(out.logprobs).all()
    assert_same(jax.tree.map(lambda x: x[3:], out), jax.tree.map(lambda x: x[3:], expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_draft_distribution_invalidates_its_row_only(implementation):
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8)}
    arguments["num_drafted"] = np.full(8, 3, np.int32)
    arguments["draft_probs"] = arguments["draft_probs"].copy()
    arguments["draft_probs"][2] = np.nan
    out = run(arguments, implementation)
    assert not out.is_valid[2] and out.is_valid.sum() == 7 and out.next_token[2] == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_of_the_last_kept_token_are_kept(implementation):
    """Five tokens share the second place of top-k = 2, so six are kept. Logits of -inf are never kept."""
    logits = np.array([3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, -np.inf], np.float32)
    arguments = equal_rows(top_k=2) | {"num_drafted": np.zeros(BATCH, np.int32)}
    arguments["target_logits"] = np.broadcast_to(logits, (BATCH, 3, 8))
    out = run(arguments, implementation)
    assert set(np.unique(out.next_token)) == {0, 1, 2, 3, 4, 5}
    # Top-k of 8 keeps all tokens with a finite logit.
    arguments["sampling"] = plain_sampling(BATCH, top_k=8)
    assert set(np.unique(run(arguments, implementation).next_token)) == {0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logprobs_are_of_the_raw_distribution(implementation):
    arguments = make_arguments(SMALL)
    out = run(arguments, implementation)
    raw = np.asarray(jax.nn.log_softmax(arguments["target_logits"]))
    for b in range(8):
        tokens = [*np.asarray(arguments["draft_tokens"][b, : out.num_accepted[b]]), out.next_token[b]]
        expected = [raw[b, g, token] for g, token in enumerate(tokens)]
        np.testing.assert_allclose(out.logprobs[b, : len(tokens)], expected, atol=1e-5)
        assert not out.logprobs[b, len(tokens) :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_depend_on_other_rows(implementation):
    arguments = make_arguments(SMALL)
    out = run(arguments, implementation)
    backwards = jax.tree.map(lambda x: x[::-1], run(jax.tree.map(lambda x: x[::-1], arguments), implementation))
    assert_same(backwards, out)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_runs_in_a_while_loop(implementation):
    arguments = make_arguments(SMALL)

    @jax.jit
    def loop(arguments):
        def body(carry):
            step, total = carry
            keys = arguments["residual_keys"] + step
            out = masked_acceptance(
                **arguments | {"residual_keys": keys}, implementation=implementation, interpret=True
            )
            return step + jnp.uint32(1), total + out.next_token

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.uint32(0), jnp.zeros((8,), jnp.int32)))[1]

    expected = sum(
        reference.masked_acceptance(**arguments | {"residual_keys": arguments["residual_keys"] + step}).next_token
        for step in np.arange(3, dtype=np.uint32)
    )
    np.testing.assert_array_equal(loop(arguments), expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"draft_tokens": jnp.zeros((8,), jnp.int32)}, "draft_tokens has shape"),
        ({"draft_tokens": jnp.zeros((8, 3))}, "draft_tokens has dtype"),
        ({"target_logits": jnp.zeros((8, 3, 37))}, r"target_logits has shape .* expected \[8, 4, V\]"),
        ({"target_logits": jnp.zeros((8, 4, 37), jnp.int32)}, "target_logits has dtype"),
        ({"draft_probs": jnp.zeros((8, 4, 37))}, "draft_probs has shape"),
        ({"draft_probs": jnp.zeros((8, 3, 37), jnp.int32)}, "draft_probs has dtype"),
        ({"accept_keys": jnp.zeros((8,), jnp.uint32)}, "accept_keys has shape"),
        ({"residual_keys": jnp.zeros((8, 2), jnp.int32)}, "residual_keys has shape .* int32"),
        ({"num_drafted": jnp.zeros((7,), jnp.int32)}, "num_drafted has shape"),
        ({"sampling": plain_sampling(8)._replace(top_p=jnp.ones(()))}, "top_p has shape"),
        ({"sampling": plain_sampling(8)._replace(top_k=jnp.ones((8,)))}, "top_k has dtype"),
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        masked_acceptance(**make_arguments(SMALL) | changes)


def test_deterministic_spec_has_no_distribution():
    assert acceptance_arguments(dataclasses.replace(SMALL, is_deterministic=True))["draft_probs"] is None
