"""Draft heads of the `speculators` format compute the logits of the reference implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from bass_jax.checkpoint.speculators import is_speculator, load_speculator
from tests import tiny
from tests.marks import mostly_slow
from tests.models.conftest import load_arrays, run_reference

VOCAB, WIDTH, NUM_TOKENS = 50, 32, 11
TOLERANCE = 1e-5
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA, QWEN3 = SHAPE | {"model_type": "llama"}, SHAPE | {"model_type": "qwen3", "head_dim": 8}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = {"sliding_window": 4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
EAGLE3 = {
    "reduced vocabulary": (LLAMA, {"draft_vocab_size": 29}),
    "whole vocabulary": (LLAMA, {"norm_before_residual": True}),
    "one hidden state": (LLAMA, {"ids": [2], "norm_before_fc": True, "norm_output": True}),
    "four hidden states": (QWEN3, {"ids": [4, 1, 7, 0], "fc_norm": True, "draft_vocab_size": 17}),
    "null ids": (QWEN3, {"ids": None, "norm_output": True}),
    "biases": (LLAMA | {"attention_bias": True, "mlp_bias": True}, {"norm_before_residual": True}),
    "biases of qwen3": (QWEN3 | {"attention_bias": True}, {"norm_before_fc": True}),
    "head_dim": (LLAMA | {"head_dim": 12}, {"fc_norm": True, "norm_output": True}),
    "two layers": (LLAMA | {"num_hidden_layers": 2}, {"norm_before_residual": True, "draft_vocab_size": 31}),
    "three layers": (QWEN3 | {"num_hidden_layers": 3, "head_dim": 6}, {"norm_output": True}),
    "windows": (LLAMA | WINDOWS, {}),
    "windows of qwen3": (QWEN3 | WINDOWS | {"use_sliding_window": True}, {"norm_before_fc": True}),
    "scaled rope": (LLAMA | {"rope_parameters": LLAMA3_ROPE}, {"norm_before_fc": True, "norm_before_residual": True}),
    "more heads": (QWEN3 | {"num_key_value_heads": 4}, {"fc_norm": True, "norm_before_residual": True}),
}
QUICK = ("reduced vocabulary", "four hidden states", "three layers", "windows")


def case(name, kind, layer_config, config):
    config = {"draft_vocab_size": VOCAB} | config
    ids = config.pop("ids", [1, 4, 2])
    return {
        "name": f"{kind} {name}",
        "model": kind,
        "layer_config": layer_config,
        "config": config | {"eagle_aux_hidden_state_layer_ids": ids},
        "num_hidden": 3 if ids is None else len(ids),
        "num_tokens": NUM_TOKENS,
        "num_steps": 1 if "layer_types" in layer_config else 4,
        "seed": sum(map(ord, name)),
    }


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Returns the directory in which `speculators` wrote random heads and their logits."""
    todo = [case(name, "eagle3", *one) for name, one in EAGLE3.items()]
    return run_reference(tmp_path_factory.mktemp("speculators"), todo, "speculators_reference.py")


@functools.cache
def target(vocab_size=VOCAB, width=WIDTH):
    """Returns a target of 7 layers, of which only the configuration and the embedding matter here."""
    return tiny.model(1, vocab_size=vocab_size, width=width, num_layers=7)


@functools.partial(jax.jit, static_argnames="num_steps")
def run(model, tokens, hidden, num_steps):
    """Returns ``[steps, T, O]``: row r drafts after r + 1 slots, which are those of positions 1 to r + 1."""
    num = len(tokens) - 1
    rows, last = jnp.arange(num), jnp.arange(1, num + 1)
    slots = jnp.arange(num + 1)
    before = jnp.pad(model.project(hidden[None]), ((0, 0), (1, 0), (0, 0)))[:, :-1]
    positions = jnp.where(slots <= last[:, None], slots, 16)
    output = model.hidden_states(
        jnp.broadcast_to(tokens, positions.shape),
        positions,
        model.init_cache(num, 16),
        jnp.broadcast_to(before, (num, *before.shape[1:])),
    )
    hidden, cache = output.hidden[rows, last][:, None], output.cache
    logits = [model.logits(hidden)[:, 0]]
    for step in range(1, num_steps):
        token = tokens[jnp.minimum(last + step, num)]
        output = model.hidden_states(token[:, None], (last + step)[:, None], cache, model.next_hidden(hidden))
        hidden, cache = output.hidden, output.cache
        logits.append(model.logits(hidden)[:, 0])
    return jnp.stack(logits)


def check_logits(model, arrays, num_steps):
    found = run(model, jnp.asarray(arrays["tokens"], jnp.int32), jnp.asarray(arrays["hidden"]), num_steps)
    for step in range(num_steps):  # The reference pads the last tokens of a later step.
        num = NUM_TOKENS - step
        np.testing.assert_allclose(found[step, :num], arrays["logits"][step, :num], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", mostly_slow(EAGLE3, lambda name: name in QUICK))
def test_eagle3_computes_the_logits_of_the_reference(reference, name):
    directory, about = reference / f"eagle3 {name}", case(name, "eagle3", *EAGLE3[name])
    assert is_speculator(directory)
    model = load_speculator(directory, target())
    ids = about["config"]["eagle_aux_hidden_state_layer_ids"]
    assert model.head.hidden_layers == ((2, 3, 4) if ids is None else tuple(ids))
    if about["config"]["draft_vocab_size"] < VOCAB:
        np.testing.assert_array_equal(
            model.output_ids, np.flatnonzero(load_file(directory / "model.safetensors")["t2d"])
        )
    check_logits(model, load_arrays(reference / f"eagle3 {name}.npz"), about["num_steps"])
