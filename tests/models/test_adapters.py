"""Models of other libraries follow the protocol, decode greedily as they do alone, and are served by the engine."""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import ModelDrafter
from bass_jax.models.adapters import from_function, from_tunix
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.testing import check_target
from tests import tiny
from tests.models import own_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses names that JAX and Flax will remove.
VOCAB, NUM_NEW = 23, 14
needs_tunix = pytest.mark.skipif(
    importlib.util.find_spec("tunix") is None, reason="needs google-tunix, the extra 'tunix'"
)
MAKERS = [
    pytest.param(own_models.plain_model, id="function"),
    pytest.param(own_models.linen_model, id="linen", marks=pytest.mark.slow),
    pytest.param(own_models.equinox_model, id="equinox", marks=pytest.mark.slow),
    pytest.param(own_models.nnx_model, id="nnx"),
    pytest.param(own_models.tunix_model, id="tunix", marks=needs_tunix),
    pytest.param(lambda vocab_size, seed: tiny.model(seed, vocab_size=vocab_size), id="ours", marks=pytest.mark.slow),
]


def pair_of(make, vocab_size: int = VOCAB) -> bass.Pair:
    """Returns a model and the same model with noise as its draft model, both behind the same adapter."""
    target, random = make(vocab_size, 1), np.random.default_rng(2)
    draft = jax.tree.map(
        lambda leaf: leaf + 0.1 * leaf.std() * random.normal(size=leaf.shape).astype(leaf.dtype), target
    )
    return bass.Pair(target, ModelDrafter(draft, vocab_size))


def is_greedy(model, prompt, output) -> bool:
    """Returns whether every token of the output is the most probable one in one pass over the whole text."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(prompt) + len(output)] = [*prompt, *output]
    positions = np.arange(64, dtype=np.int32)[None]
    logits = jax.jit(type(model).forward)(model, tokens, positions, model.init_cache(1, 64)).logits
    chosen = np.asarray(jnp.argmax(logits[0], axis=-1))
    return bool((chosen[len(prompt) - 1 : len(prompt) + len(output) - 1] == output).all())


@pytest.mark.parametrize("make", MAKERS)
def test_a_model_of_another_library_is_a_target_and_a_draft_model(make):
    """20 prompts of different lengths in a batch of 8, then the same in the engine."""
    pair, random = pair_of(make), np.random.default_rng(3)
    check_target(pair.target)
    prompts = [random.integers(0, VOCAB, random.integers(1, 30)).tolist() for _ in range(20)]
    output = bass.generate(pair, prompts, bass.SpecConfig(3), max_new_tokens=NUM_NEW, max_batch=8)
    for prompt, tokens in zip(prompts, output.tokens, strict=True):
        assert is_greedy(pair.target, prompt, tokens)
    assert 1.2 < output.metrics.tokens_per_pass < 3.9  # drafts are accepted and rejected
    config = bass.EngineConfig(num_slots=2, capacity=64)
    engine = bass.Engine(pair, bass.SpecConfig(3), config=config, warm_up=False)
    handles = [engine.submit(prompt, max_new_tokens=NUM_NEW) for prompt in prompts[:4]]
    for handle, tokens in zip(handles, output.tokens[:4], strict=True):
        np.testing.assert_array_equal(handle.result().tokens, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_sampled_tokens_follow_the_distribution_of_a_model_of_another_library(make):
    pair = pair_of(make, 5)
    report = bass.verify_lossless(pair.drafter, target=pair.target, num_samples=20_000)
    assert report.is_lossless, report
    assert report.tokens_per_step > 1.2


@pytest.mark.parametrize("make", MAKERS[1:5])
def test_new_parameters_need_no_compilation(make):
    """The target's parameters are replaced by those of another module of the same structure."""
    pair, new = pair_of(make), make(VOCAB, 7)
    bass.generate(pair, [[1, 2, 3]], bass.SpecConfig(3), max_new_tokens=NUM_NEW)
    before = JIT_CACHE.num_compiled
    output = bass.generate(
        dataclasses.replace(pair, target=new), [[1, 2, 3]], bass.SpecConfig(3), max_new_tokens=NUM_NEW
    )
    assert JIT_CACHE.num_compiled == before
    assert is_greedy(new, [1, 2, 3], output.tokens[0])


@needs_tunix
def test_long_passes_of_a_tunix_model_are_split():
    """A pass that is wider than the margin gives the logits of several passes."""
    model = own_models.tunix_model(VOCAB, 1)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 150)).astype(np.int32)
    positions = np.broadcast_to(np.arange(150, dtype=np.int32), tokens.shape)
    run = jax.jit(type(model).forward)
    whole = run(model, tokens, positions, model.init_cache(2, 160)).logits
    cache, parts = model.init_cache(2, 160), []
    for start in range(0, 150, 50):
        output = run(model, tokens[:, start : start + 50], positions[:, start : start + 50], cache)
        cache = output.cache
        parts.append(output.logits)
    np.testing.assert_allclose(whole, np.concatenate(parts, axis=1), atol=1e-4)


@needs_tunix
def test_a_tunix_model_that_ignores_the_mask_is_refused():
    with pytest.raises(ValueError, match=r"use_flash_attention=True: expected False"):
        from_tunix(own_models.tunix_module(VOCAB, 1, use_flash_attention=True))


def broken(change) -> Any:
    def forward(params, tokens, positions, cache):
        return change(params, tokens, positions, cache)

    params = own_models.random_params(VOCAB, 1)
    return from_function(forward, params, init_cache=own_models.init_cache, vocab_size=VOCAB)


def clamped(params, tokens, positions, cache):
    """Writes padding to the last slot, as an index that is clamped to the capacity does."""
    return own_models.forward(params, tokens, jnp.minimum(positions, cache.shape[1] - 1), cache)


def shared_offset(params, tokens, positions, cache):
    """Writes the whole batch at the position of its first row."""
    return own_models.forward(params, tokens, jnp.broadcast_to(positions[:1], positions.shape), cache)


def append_only(params, tokens, positions, cache):
    """Adds to the slot what was there, so that rejected tokens remain."""
    before = cache
    logits, cache = own_models.forward(params, tokens, positions, cache)
    return logits, cache + before


def reads_all(params, tokens, positions, cache):
    """Adds the sum of all rows' embeddings to the logits."""
    logits, cache = own_models.forward(params, tokens, positions, cache)
    return logits + params["embedding"][tokens].sum(), cache


@pytest.mark.parametrize(
    "change, message",
    [
        (clamped, r"a position at or past the capacity \(64\) writes nothing"),
        (append_only, "logits that do not depend on rejected tokens"),
        (reads_all, "the logits of one pass over the whole|do not depend on the other rows"),
        (shared_offset, "logits"),
    ],
)
def test_a_broken_model_is_found(change, message):
    with pytest.raises(AssertionError, match=f"^FunctionModel.forward: expected .*({message})"):
        check_target(broken(change))


def test_hidden_states_of_a_function_without_them_are_refused():
    tokens = jnp.zeros((1, 2), jnp.int32)
    model = own_models.plain_model(VOCAB, 1)
    with pytest.raises(ValueError, match=r"hidden_layers=\(1,\): the model's function has no such parameter"):
        model.forward(tokens, jnp.arange(2)[None], model.init_cache(1, 8), hidden_layers=(1,))
