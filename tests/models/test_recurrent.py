"""Recurrent layers: the gated delta rule, states after partly accepted drafts, and hybrid targets in every loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import NgramDrafter, SuffixDrafter, early_exit_drafter
from bass_jax.models import GatedDeltaConfig, place_model, quantize_model, tensor_parallel_mesh
from bass_jax.models.gated_delta import gated_delta_rule
from bass_jax.testing import check_target, verify_lossless
from tests import tiny
from tests.models.passes import read_texts, relative_error

RECURRENCE = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5, kernel_size=3)
SHAPE = {"num_layers": 3, "num_kv_heads": 2, "recurrence": RECURRENCE}


@pytest.fixture(scope="module")
def target():
    return tiny.model(1, **SHAPE)


def attention_draft(target, amount=0.1):
    """Returns a draft model of the target's last layer, which has attention."""
    config = dataclasses.replace(target.config, layers=target.config.layers[-1:])
    params = {name: value for name, value in target.params.items() if not name.startswith("layer_")}
    params["layer_0"] = target.params[f"layer_{target.config.num_layers - 1}"]
    return tiny.model_drafter(tiny.perturbed(bass.models.Model(params, config), amount))


def by_definition(queries, keys, values, log_decays, betas, state):
    """Applies the rule token by token; returns the results and the last state. Arguments without batch, in float64."""
    state, results = state.astype(np.float64).copy(), np.zeros(values.shape)
    for k, r, t in np.ndindex(values.shape[:3]):
        state[k, r] *= np.exp(log_decays[k, r, t])
        written = betas[k, r, t] * (values[k, r, t] - keys[k, t] @ state[k, r])
        state[k, r] += np.outer(keys[k, t], written)
        results[k, r, t] = queries[k, t] @ state[k, r]
    return results, state


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_the_rule_is_that_of_token_by_token_updates(num_tokens):
    """Also where the decays of a pass underflow."""
    draw, B, K, R, A, V = np.random.default_rng(num_tokens), 2, 2, 2, 6, 5
    queries, keys = (draw.normal(size=(B, K, num_tokens, A)) for _ in range(2))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values, state = draw.normal(size=(B, K, R, num_tokens, V)), draw.normal(size=(B, K, R, A, V))
    log_decays, betas = -draw.exponential(size=(B, K, R, num_tokens)), draw.random((B, K, R, num_tokens))
    log_decays[1, 0] *= 100
    arguments = queries, keys, values, log_decays, betas, state
    found, *_ = jax.jit(gated_delta_rule)(*(jnp.asarray(one, jnp.float32) for one in arguments))
    for row in range(B):
        expected, _ = by_definition(*(one[row] for one in arguments))
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_hybrid_model_keeps_the_protocol(target):
    check_target(target)


def test_a_pass_over_a_whole_sequence_needs_no_cache(target):
    """The sequence is longer than a block of the rule."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 150)))
    positions = jnp.broadcast_to(jnp.arange(150), tokens.shape)
    read = jax.jit(type(target).hidden_states)
    whole = read(target, tokens, positions, None).hidden
    cached = read(target, tokens, positions, target.init_cache(2, 256)).hidden
    assert relative_error(np.asarray(whole), np.asarray(cached)) < 5e-5


def test_a_pass_after_an_uncommitted_one_is_refused(target):
    tokens, positions = jnp.zeros((1, 2), jnp.int32), jnp.arange(2)[None]
    cache = jax.eval_shape(type(target).forward, target, tokens, positions, target.init_cache(1, 8)).cache
    with pytest.raises(ValueError, match="expected a cache whose last pass was committed"):
        jax.eval_shape(type(target).forward, target, tokens, positions + 2, cache)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_after_partly_accepted_drafts_equal_those_of_a_fresh_prefill(target, temperature):
    pair, spec = bass.Pair(target, attention_draft(target, 0.3)), bass.SpecConfig(4)
    sampling = bass.SamplingParams(temperature=temperature)
    state = bass.prefill(pair, tiny.PROMPTS, spec, sampling=sampling, max_new_tokens=40)
    step, accepted = jax.jit(bass.speculate_step), []
    for index in range(9):
        wanted = jnp.full_like(state.lengths, (4, 2, 0)[index % 3])
        state, info = step(pair, state._replace(draft_lens=wanted), spec)
        accepted.append(np.asarray(info.num_accepted))
    assert 0 < np.mean(accepted) < 2
    rows = len(tiny.PROMPTS)
    tokens, lengths = jax.device_get((state.tokens, state.lengths))
    fresh = bass.prefill(pair, [tokens[row, : lengths[row]] for row in range(rows)], spec)
    for found, expected in zip(state.target_cache.states, fresh.target_cache.states, strict=True):
        np.testing.assert_allclose(found.state[:rows], expected.state[:rows], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.inputs[:rows], expected.inputs[:rows], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def regular(target):
    pair = bass.Pair(target, NgramDrafter())
    return bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=30).tokens


LOOPS = {
    "speculate": {"spec": bass.SpecConfig(4)},
    "several candidates": {"spec": bass.SpecConfig(3, "multi_draft", num_candidates=3)},
    "synchronized": {"spec": bass.SpecConfig(3), "step": "synchronized", "fixed_batch": True},
    "exhaustive": {"spec": bass.SpecConfig(3), "step": "exhaustive", "fixed_batch": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_greedy_tokens_are_those_of_regular_decoding(target, regular, loop):
    pair = bass.Pair(target, attention_draft(target))
    run = bass.generate(pair, tiny.PROMPTS, max_new_tokens=30, **LOOPS[loop])
    for found, expected in zip(run.tokens, regular, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert 0 < run.metrics.acceptance_rate < 1


DRAFTERS = {
    "model": attention_draft,
    "eagle": tiny.eagle_drafter,
    "eagle3": tiny.eagle3_drafter,
    "suffix": lambda target: SuffixDrafter(),
}
CASES = [(drafter, cache, num) for drafter in DRAFTERS for cache in ("dense", "pages", "INT8 pages") for num in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "cache", "num_devices"), CASES)
def test_requests_get_the_tokens_that_they_get_alone(target, drafter, cache, num_devices):
    """In the engine, with prompts that share their beginning, cancelled requests and freed rows."""
    if len(jax.devices()) < num_devices:
        pytest.skip("needs two devices")
    config = dataclasses.replace(target.config, cache_dtype="int8" if cache == "INT8 pages" else None)
    pair = alone = bass.Pair(dataclasses.replace(target, config=config), DRAFTERS[drafter](target))
    if num_devices == 2:
        mesh = tensor_parallel_mesh(2)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        rules = {"kv_heads": "tp", "mlp": "tp"}
        pair = bass.Pair(place_model(pair.target, mesh, rules), jax.device_put(pair.drafter, whole))
    engine_config = bass.EngineConfig(3, 64, chunk=16, buckets=(4,), page_size=None if cache == "dense" else 16)
    engine = bass.Engine(pair, bass.SpecConfig(3, "greedy"), config=engine_config, warm_up=False)
    shared = [1, 2, 3, 4] * 8
    requests = [([*shared[: 8 * (i % 5)], i % 7, 5], 4 + 3 * i) for i in range(6)]
    handles = [engine.submit(prompt, max_new_tokens=num) for prompt, num in requests]
    for _ in range(6):
        engine.advance()
    handles[4].cancel()
    while not engine.loop.is_idle:
        engine.advance()
    for index, (handle, (prompt, num)) in enumerate(zip(handles, requests, strict=True)):
        expected = bass.generate(alone, [prompt], bass.SpecConfig(3, "greedy"), max_new_tokens=num).tokens[0]
        found = handle.output().tokens
        assert index == 4 or len(found) == num
        np.testing.assert_array_equal(found, expected[: len(found)])


def test_a_row_does_not_depend_on_the_other_rows(target):
    """The last bit of its logits included, in a batch of the same size."""
    texts = np.random.default_rng(0).integers(0, tiny.VOCAB, (3, 5))
    step = jax.jit(lambda tokens: target.forward(tokens, positions, target.init_cache(3, 16)).logits)
    positions = jnp.broadcast_to(jnp.arange(5), texts.shape)
    other = texts.copy()
    other[:2] = 4
    np.testing.assert_array_equal(step(texts)[2], step(other)[2])


@pytest.mark.slow
def test_speculation_keeps_the_distribution_of_a_hybrid_target():
    target = tiny.model(1, 8.0, vocab_size=5, **SHAPE)
    draft = dataclasses.replace(attention_draft(target, 0.2), vocab_size=5)
    report = verify_lossless(draft, target=target, num_samples=100_000)
    assert report.is_lossless
    assert report.tokens_per_step > 1.2


@pytest.mark.slow
def test_two_devices_and_int8_weights_give_the_logits_of_one_device(target):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    texts = [np.random.default_rng(i).integers(0, tiny.VOCAB, n) for i, n in enumerate((21, 34))]
    for model in (target, quantize_model(target)):
        placed = place_model(model, tensor_parallel_mesh(2), {"kv_heads": "tp", "mlp": "tp"})
        for found, expected in zip(read_texts(placed, texts), read_texts(model, texts), strict=True):
            assert relative_error(found, expected) < 1e-5


def test_a_recurrent_draft_model_is_refused(target):
    pair = bass.Pair(target, tiny.model_drafter(target))
    with pytest.raises(ValueError, match="the draft model has recurrent layers: expected attention only"):
        bass.generate(pair, tiny.PROMPTS, max_new_tokens=4)
    with pytest.raises(ValueError, match="target has recurrent layers: expected attention only"):
        early_exit_drafter(target)


def test_invalid_sizes_are_refused(target):
    with pytest.raises(ValueError, match="num_value_heads=3: expected a multiple of num_key_heads=2"):
        dataclasses.replace(RECURRENCE, num_value_heads=3)
    with pytest.raises(ValueError, match="layers: expected a layer with attention"):
        dataclasses.replace(target.config, layers=target.config.layers[:1])
    with pytest.raises(ValueError, match="expected an AttentionConfig"):
        _ = target.config.layers[0].attention
