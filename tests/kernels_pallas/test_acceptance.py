"""Masked acceptance: every implementation against the reference, the distribution it draws from, and its guards."""

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
from kernels_pallas.acceptance import noise
from kernels_pallas.acceptance.triton import masked_acceptance_triton
from kernels_pallas.arg_specs import ACCEPTANCE_SPECS, AcceptanceSpec, acceptance_arguments
from kernels_pallas.tuning import AcceptanceTiles

IMPLEMENTATIONS = ("triton", "xla")
SPEC_BY_NAME = {spec.name: spec for spec in ACCEPTANCE_SPECS}
SMALL = AcceptanceSpec("small", 8, 3, 37)


# One compilation per shape: interpreting costs milliseconds, compiling the interpreter's loop seconds.
make_arguments = functools.cache(acceptance_arguments)
expect = jax.jit(lambda arguments: reference.masked_acceptance(**arguments))


@functools.partial(jax.jit, static_argnames="implementation")
def run(arguments, implementation):
    return masked_acceptance(**arguments, implementation=implementation, interpret=True)


def assert_same(out, expected):
    np.testing.assert_array_equal(out.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(out.next_token, expected.next_token)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(out.is_valid, expected.is_valid)


def plain_sampling(batch, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    values = ((temperature, jnp.float32), (top_k, jnp.int32), (top_p, jnp.float32), (min_p, jnp.float32))
    return KernelSampling(*(jnp.full((batch,), value, dtype) for value, dtype in values))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SPEC_BY_NAME)
def test_equals_reference_token_for_token(name, implementation):
    for seed in range(2):
        arguments = make_arguments(SPEC_BY_NAME[name].reduced(), seed=seed)
        assert_same(run(arguments, implementation), expect(arguments))


def test_chunks_of_a_vocabulary_merge():
    """Several chunks, the last one ragged, and several blocks in a search."""
    for spec in (SPEC_BY_NAME["smollm2_135m"].reduced(), SPEC_BY_NAME["qwen3_8b_ngram"].reduced()):
        arguments = acceptance_arguments(spec, seed=5)
        out = masked_acceptance_triton(*arguments.values(), tiles=AcceptanceTiles(128, 64, 4), interpret=True)
        assert_same(out, expect(arguments))


# Few shapes, so that few programs are compiled; what is drawn freely is traced.
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    draft_len=st.sampled_from([0, 3]),
    vocab_size=st.sampled_from([2, 41]),
    seed=st.integers(0, 2**31 - 1),
    data=st.data(),
)
def test_any_shape_and_sampling(draft_len, vocab_size, seed, data):
    batch = 4
    spec = AcceptanceSpec("drawn", batch, draft_len, vocab_size, "float32", vocab_size == 41)
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
def test_noise_is_jax_random(seed):
    key = jax.random.key(seed)
    words = tuple(jax.random.key_data(key))
    index = jnp.arange(1000, dtype=jnp.uint32)
    np.testing.assert_array_equal(noise.random_bits(words, index), jax.random.bits(key, (1000,)))
    np.testing.assert_array_equal(noise.uniform(words, index), 1.0 - jax.random.uniform(key, (1000,)))
    np.testing.assert_array_equal(noise.gumbel(words, index), jax.random.gumbel(key, (1000,)))


def test_uniform_is_never_zero(monkeypatch):
    """With u = 0 a draft of target probability 0 would stand."""
    for bits in (0, 2**32 - 1):
        monkeypatch.setattr(noise, "random_bits", lambda key, index, bits=bits: jnp.full_like(index, bits))
        value = noise.uniform((0, 0), jnp.zeros((1,), jnp.uint32))[0]
        assert 0.0 < value <= 1.0


def probs_arguments(batch, vocab_size, draft_len, sampling, is_deterministic=False, seed=11):
    """The same distributions in every row, drafts drawn from them, another key per row."""
    one = make_arguments(AcceptanceSpec("spec", 1, draft_len, vocab_size), seed=seed)
    keys = jax.random.split(jax.random.key(seed), 3)
    draft_probs = jnp.broadcast_to(one["draft_probs"], (batch, draft_len, vocab_size))
    drafts = jax.random.categorical(keys[0], jnp.log(draft_probs), axis=-1).astype(jnp.int32)
    if is_deterministic:
        drafts = jnp.broadcast_to(one["draft_tokens"], (batch, draft_len))
    return {
        "draft_tokens": drafts,
        "num_drafted": jnp.full((batch,), draft_len, jnp.int32),
        "target_logits": jnp.broadcast_to(one["target_logits"] / 2, (batch, draft_len + 1, vocab_size)),
        "draft_probs": None if is_deterministic else draft_probs,
        "accept_keys": jax.random.key_data(jax.random.split(keys[1], batch)),
        "residual_keys": jax.random.key_data(jax.random.split(keys[2], batch)),
        "sampling": sampling,
    }


def probs_at(arguments, position):
    """`[V]` float64 target distribution of every row at `position`."""
    logits = arguments["target_logits"][:1, position : position + 1]
    distribution = reference.target_probs(logits, *(setting[:1] for setting in arguments["sampling"]))
    return np.asarray(distribution, np.float64)[0, 0]


def first_token_p_value(arguments, implementation):
    """Chi-square of each row's first emitted token against the target's warped distribution."""
    out = run(arguments, implementation)
    first = jnp.where(out.num_accepted > 0, arguments["draft_tokens"][:, 0], out.next_token)
    distribution = np.asarray(
        reference.target_probs(arguments["target_logits"][:1, :1], *(s[:1] for s in arguments["sampling"]))
    )
    distribution = distribution[0, 0].astype(np.float64)
    counts = np.bincount(np.asarray(first), minlength=distribution.size)
    assert not counts[distribution == 0].any()
    kept = distribution > 0
    return scipy.stats.chisquare(counts[kept], distribution[kept] / distribution[kept].sum() * counts.sum()).pvalue


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.8, "top_k": 6, "top_p": 0.9}, {"min_p": 0.1}])
def test_first_token_follows_the_target_distribution(implementation, is_deterministic, setting):
    batch = 3000
    arguments = probs_arguments(batch, 8, 2, plain_sampling(batch, **setting), is_deterministic)
    assert first_token_p_value(arguments, implementation) > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wrong_draft_law_is_caught(implementation):
    """The control of the test above: drafts that did not come from the distribution that is given."""
    arguments = probs_arguments(3000, 8, 2, plain_sampling(3000))
    arguments["draft_probs"] = jnp.full_like(arguments["draft_probs"], 1 / 8)
    assert first_token_p_value(arguments, implementation) < 1e-9


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_token_follows_the_target_law_given_the_first(implementation):
    """Acceptance noise of two positions is independent of each other and of the residual's."""
    batch = 3000
    arguments = probs_arguments(batch, 8, 2, plain_sampling(batch))
    out = run(arguments, implementation)
    has_second = np.asarray(out.num_accepted) >= 1
    second = jnp.where(out.num_accepted >= 2, arguments["draft_tokens"][:, 1], out.next_token)
    distribution = probs_at(arguments, 1)
    counts = np.bincount(np.asarray(second)[has_second], minlength=8)
    assert has_second.sum() > 500
    assert scipy.stats.chisquare(counts, distribution / distribution.sum() * counts.sum()).pvalue > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zero_residual_falls_back_on_the_target(implementation):
    """The draft distribution is the target's (scaled up, as rounding may): all that is left after a rejection is
    nothing.
    """
    arguments = probs_arguments(600, 8, 1, plain_sampling(600))
    target = reference.target_probs(arguments["target_logits"], *arguments["sampling"])
    arguments["draft_probs"] = 4.0 * target[:, :1]
    out = run(arguments, implementation)
    rejected = np.asarray(out.num_accepted) == 0
    assert rejected.sum() > 300
    counts = np.bincount(np.asarray(out.next_token)[rejected], minlength=8)
    distribution = np.asarray(target[0, 0], np.float64)
    assert scipy.stats.chisquare(counts, distribution / distribution.sum() * counts.sum()).pvalue > 1e-3
    assert out.is_valid.all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dropped_token_never_stands(implementation):
    """Drafts outside top-k, however improbable the draft distribution calls them."""
    arguments = probs_arguments(64, 16, 2, plain_sampling(64, top_k=3))
    order = jnp.argsort(arguments["target_logits"][:, :2], axis=-1)
    arguments["draft_tokens"] = order[..., 5].astype(jnp.int32)
    arguments["draft_probs"] = jnp.full_like(arguments["draft_probs"], 1e-30)
    out = run(arguments, implementation)
    assert not out.num_accepted.any()
    assert (jnp.argsort(order[:, 0], axis=-1)[jnp.arange(64), out.next_token] >= 13).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_placeholders_never_stand(implementation):
    """Rows with fewer drafts than slots; the placeholders are the target's own favorites, or no tokens at all."""
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8, temperature=0.0)}
    mode = jnp.argmax(arguments["target_logits"], axis=-1).astype(jnp.int32)
    num_drafted = jnp.array([0, 1, 2, 3, 0, 1, 2, 3], jnp.int32)
    is_placeholder = jnp.arange(3) >= num_drafted[:, None]
    for placeholder in (mode[:, :3], jnp.full((8, 3), -1), jnp.full((8, 3), 2**31 - 1)):
        arguments["draft_tokens"] = jnp.where(is_placeholder, placeholder, mode[:, :3]).astype(jnp.int32)
        arguments["num_drafted"] = num_drafted
        out = run(arguments, implementation)
        np.testing.assert_array_equal(out.num_accepted, num_drafted)
        np.testing.assert_array_equal(out.next_token, mode[jnp.arange(8), num_drafted])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_rows_need_no_draft_distribution(implementation):
    """One-hot distributions, not a softmax at a small temperature; and the draft distribution is not even read."""
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8, temperature=0.0, top_k=2, top_p=0.1)}
    mode = jnp.argmax(arguments["target_logits"], axis=-1).astype(jnp.int32)
    wrong = (mode[:, :3] + 1) % SMALL.vocab_size
    first_wrong = jnp.arange(8) % 4
    arguments["draft_tokens"] = jnp.where(jnp.arange(3) < first_wrong[:, None], mode[:, :3], wrong)
    arguments["num_drafted"] = jnp.full((8,), 3, jnp.int32)
    arguments["draft_probs"] = jnp.full_like(arguments["draft_probs"], jnp.nan)
    out = run(arguments, implementation)
    np.testing.assert_array_equal(out.num_accepted, first_wrong)
    np.testing.assert_array_equal(out.next_token, mode[jnp.arange(8), first_wrong])
    assert out.is_valid.all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_logits_are_a_guarded_row(implementation, temperature, bad):
    """No index out of range, no token, no effect on the neighbors, and none past the drafts."""
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8, temperature=temperature)}
    mode = jnp.argmax(arguments["target_logits"], axis=-1).astype(jnp.int32)
    arguments["draft_tokens"] = mode[:, :3]
    arguments["num_drafted"] = jnp.array([3, 3, 3, 1, 3, 3, 3, 3], jnp.int32)
    arguments["draft_probs"] = jnp.full_like(arguments["draft_probs"], 1e-9)
    expected = run(arguments, implementation)
    logits = arguments["target_logits"]
    logits = logits.at[0, 0, 5].set(bad).at[1, 2].set(bad).at[2, 3, 0].set(bad).at[3, 2].set(bad)
    out = run(arguments | {"target_logits": logits}, implementation)
    np.testing.assert_array_equal(out.num_accepted[:4], [0, 2, 3, 1])
    np.testing.assert_array_equal(out.is_valid, [False, False, False, True, True, True, True, True])
    assert not out.next_token[:3].any()
    assert np.isfinite(out.logprobs).all()
    assert_same(jax.tree.map(lambda x: x[3:], out), jax.tree.map(lambda x: x[3:], expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_draft_law_is_a_guarded_row(implementation):
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(8)}
    arguments["num_drafted"] = jnp.full((8,), 3, jnp.int32)
    arguments["draft_probs"] = arguments["draft_probs"].at[2].set(jnp.nan)
    out = run(arguments, implementation)
    assert not out.is_valid[2] and out.is_valid.sum() == 7 and out.next_token[2] == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_of_the_last_kept_token_are_kept(implementation):
    """Five tokens share the second place of top-k = 2: all six stay. -inf logits are no tokens."""
    logits = jnp.array([3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, -jnp.inf])
    batch = 2000
    arguments = probs_arguments(batch, 8, 0, plain_sampling(batch, top_k=2))
    arguments["target_logits"] = jnp.broadcast_to(logits, (batch, 1, 8))
    out = run(arguments, implementation)
    assert set(np.unique(out.next_token)) == {0, 1, 2, 3, 4, 5}
    # More places than tokens: everything with a finite logit stays.
    arguments["sampling"] = plain_sampling(batch, top_k=8)
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
def test_rows_do_not_depend_on_their_neighbours(implementation):
    arguments = make_arguments(SMALL)
    out = run(arguments, implementation)
    backwards = jax.tree.map(lambda x: x[::-1], run(jax.tree.map(lambda x: x[::-1], arguments), implementation))
    assert_same(backwards, out)


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
def test_mistakes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        masked_acceptance(**make_arguments(SMALL) | changes)


def test_deterministic_spec_has_no_distribution():
    assert acceptance_arguments(dataclasses.replace(SMALL, is_deterministic=True))["draft_probs"] is None
