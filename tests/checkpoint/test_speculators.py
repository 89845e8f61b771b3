"""Draft heads of the `speculators` format compute the logits of the reference implementation."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bass_jax as bass
from bass_jax.checkpoint import (
    inspect_checkpoint,
    is_speculator,
    load_speculator,
    save_hugging_face,
    save_model,
    save_speculator,
    why_not_a_pair,
)
from bass_jax.checkpoint.speculators import head_param_shapes, read_speculator_config, tensor_rules
from bass_jax.cli.main import main
from bass_jax.drafters import DFlashDrafter, DraftContext, Eagle3Drafter, PEagleDrafter
from bass_jax.models import quantize_model
from bass_jax.sampling import LogitsProcessors
from tests import tiny
from tests.checkpoint.small import random_model, small_config
from tests.marks import mostly_slow
from tests.models.conftest import load_arrays, run_reference, slow_tests_read

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
PEAGLE = {
    "plain": (LLAMA, {"mask_token_id": 3, "draft_vocab_size": 29}),
    "normalized": (QWEN3 | {"num_hidden_layers": 2}, {"mask_token_id": 49, "fc_norm": True, "norm_output": True}),
    "residual": (LLAMA, {"mask_token_id": 0, "norm_before_fc": True, "norm_before_residual": True}),
    "windows": (LLAMA | WINDOWS | {"sliding_window": 6}, {"mask_token_id": 7}),
}
DFLASH = {
    "plain": (QWEN3, {"mask_token_id": 3, "block_size": 4, "draft_vocab_size": 29}),
    "whole vocabulary": (QWEN3 | {"num_hidden_layers": 2, "head_dim": 6}, {"mask_token_id": 49, "block_size": 6}),
    "from the anchor": (
        QWEN3 | {"num_hidden_layers": 3, "head_dim": 12},
        {"mask_token_id": 0, "block_size": 3, "sample_from_anchor": True, "ids": [4, 1, 7, 0]},
    ),
    "windows": (QWEN3 | WINDOWS | {"use_sliding_window": True}, {"mask_token_id": 7, "block_size": 5}),
    "windows both ways": (
        QWEN3 | WINDOWS | {"use_sliding_window": True, "sliding_window": 2},
        {"mask_token_id": 7, "block_size": 5, "sliding_window_non_causal": True, "draft_vocab_size": 17},
    ),
    "biases": (QWEN3 | {"attention_bias": True, "num_key_value_heads": 4}, {"mask_token_id": 9, "block_size": 8}),
    "llama": (LLAMA | {"head_dim": 12, "mlp_bias": True}, {"mask_token_id": 1, "block_size": 2, "ids": [2]}),
    "scaled rope": (QWEN3 | {"rope_parameters": LLAMA3_ROPE}, {"mask_token_id": 5, "block_size": 7}),
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 3 + ["linear_attention"],
    "num_hidden_layers": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "head_dim": 16,
}
MTP = {
    "plain": QWEN3 | {"num_hidden_layers": 7},
    "head_dim": QWEN3 | {"head_dim": 12, "attention_bias": True, "num_hidden_layers": 7},
    "more heads": QWEN3 | {"head_dim": 6, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "scaled rope": QWEN3 | {"rope_parameters": LLAMA3_ROPE},
    "qwen3_next": QWEN3 | HYBRID | {"model_type": "qwen3_next"},
    "qwen3_5_text": QWEN3 | HYBRID | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": QWEN3 | HYBRID | {"model_type": "qwen3_5_moe_text", "num_experts_per_tok": 1},
}
QUICK = ("reduced vocabulary", "windows")
QUICK_HEADS = {*(f"eagle3 {name}" for name in QUICK), "peagle plain", "mtp head_dim"}
QUICK_HEADS |= {"dflash windows", "dflash whole vocabulary"}
"""Heads that quick tests read."""


def case(name, kind, layer_config, config):
    config = {"draft_vocab_size": VOCAB} | config
    ids = config.pop("ids", [1, 4, 2])
    key = "aux_hidden_state_layer_ids" if kind == "dflash" else "eagle_aux_hidden_state_layer_ids"
    if kind == "mtp":
        ids = [7]
    return {
        "name": f"{kind} {name}",
        "model": kind,
        "layer_config": layer_config,
        "config": {} if kind == "mtp" else config | {key: ids},
        "num_hidden": 3 if ids is None else len(ids),
        "num_tokens": NUM_TOKENS,
        # In later steps the reference of EAGLE-3 counts windows from the first draft.
        "num_steps": 1 if kind == "eagle3" and "layer_types" in layer_config else 4,
        "seed": sum(map(ord, name)),
    }


@pytest.fixture(scope="session")
def reference(request, tmp_path_factory):
    """Returns the directory in which `speculators` wrote random heads and their logits.

    If no slow test of the session reads it, it has the heads in `QUICK_HEADS`.
    """
    todo = [case(name, "eagle3", *one) for name, one in EAGLE3.items()]
    todo += [case(name, "peagle", *one) for name, one in PEAGLE.items()]
    todo += [case(name, "dflash", *one) for name, one in DFLASH.items()]
    todo += [case(name, "mtp", one, {}) for name, one in MTP.items()]
    if not slow_tests_read("reference", request):
        todo = [one for one in todo if one["name"] in QUICK_HEADS]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduced vocabulary", "four hidden states"])
def test_speculators_reads_what_is_written(reference, tmp_path, name):
    """Its logits are those of the head, whose parameters are rounded to bfloat16."""
    about = case(name, "eagle3", *EAGLE3[name])
    model = load_speculator(reference / f"eagle3 {name}", target())
    # `speculators` takes the embedding of the target.
    save_hugging_face(tmp_path / "target", target())
    model = dataclasses.replace(model, params=model.params | {"embedding": target().params["embedding"]})
    save_speculator(tmp_path / "head", model, target(), target_name=str(tmp_path / "target"), draft_len=5)
    written = load_speculator(tmp_path / "head", target())
    assert (written.config, written.head) == (model.config, model.head)
    for one, other in zip(jax.tree.leaves(written), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-8)
    save_speculator(tmp_path / "head", model, target(), target_name=str(tmp_path / "target"))  # Replaces it.
    again = run_reference(tmp_path, [about | {"checkpoint": str(tmp_path / "head")}], "speculators_reference.py")
    check_logits(written, load_arrays(again / f"{about['name']}.npz"), about["num_steps"])


def test_a_p_eagle_head_is_written_as_it_was_read(reference, tmp_path):
    model = load_speculator(reference / "peagle plain", target())
    with pytest.raises(ValueError, match="exists and is not a checkpoint; not overwritten"):  # It is not of ours.
        save_speculator(reference / "peagle plain", model, target(), target_name="target")
    save_speculator(tmp_path / "head", model, target(), target_name="target")
    found = load_speculator(tmp_path / "head", target())
    assert (found.config, found.head) == (model.config, model.head)
    written, there = (load_file(one / "model.safetensors") for one in (tmp_path / "head", reference / "peagle plain"))
    assert written.keys() == there.keys()
    for name, tensor in there.items():
        np.testing.assert_allclose(written[name].astype(np.float32), tensor.astype(np.float32), rtol=2**-8)
    written, there = (
        json.loads((one / "config.json").read_text()) for one in (tmp_path / "head", reference / "peagle plain")
    )
    about_programs = {"auto_map", "embed_requires_grad", "speculators_version", "transformers_version"}
    assert there.keys() - written.keys() <= about_programs


@functools.partial(jax.jit, static_argnames="num_drafts")
def propose(drafter, tokens, hidden, num_drafts):
    """Returns the distributions ``[T, G, V]`` of the drafts after the first r + 2 tokens, for row r."""
    num, capacity = len(tokens) - 1, 32
    lengths = jnp.arange(2, num + 2)
    rows = jnp.broadcast_to(jnp.pad(tokens, (0, capacity - len(tokens))), (num, capacity))
    hidden = jnp.pad(hidden, ((0, capacity - len(tokens)), (0, 0)))
    state = drafter.init(rows, lengths, jnp.broadcast_to(hidden, (num, *hidden.shape)))
    context = DraftContext(
        tokens=rows,
        lengths=lengths,
        num_wanted=jnp.full(num, num_drafts),
        sampling_arrays=bass.SamplingParams(temperature=1.0).sampling_arrays(num, VOCAB),
        keys=jnp.broadcast_to(jax.random.key(0), (num, num_drafts)),
        processors=LogitsProcessors(None, lengths, jnp.full((num, 1), -1)),
    )
    return drafter.propose(state, context, num_drafts, is_sampled=True)[0].probs


@pytest.mark.parametrize("name", mostly_slow(PEAGLE, lambda name: name == "plain"))
def test_p_eagle_drafts_from_the_distributions_of_the_reference(reference, name):
    """The logits within 1e-5, and the distributions that the drafter samples from."""
    about, arrays = case(name, "peagle", *PEAGLE[name]), load_arrays(reference / f"peagle {name}.npz")
    model = load_speculator(reference / about["name"], target())
    tokens, hidden = jnp.asarray(arrays["tokens"], jnp.int32), jnp.asarray(arrays["hidden"])
    is_slot = arrays["anchors"] >= 0  # The reference also samples masks after no token.
    anchors, depths, logits = arrays["anchors"][is_slot], arrays["depths"][is_slot], arrays["logits"][0][is_slot]
    assert set(depths) == set(range(about["num_steps"]))
    found = propose(PEagleDrafter(model, VOCAB), tokens, hidden, about["num_steps"])
    found = found if model.output_ids is None else found[..., model.output_ids]
    expected = jax.nn.softmax(logits, axis=-1)
    np.testing.assert_allclose(found[anchors, depths], expected, atol=TOLERANCE, rtol=TOLERANCE)
    log_ratio = jnp.log(found[anchors, depths]) - jax.nn.log_softmax(logits, axis=-1)
    np.testing.assert_allclose(log_ratio, 0, atol=3 * TOLERANCE)


def target_of(arrays):
    """Returns the target whose embedding and head the reference had."""
    shared = {name: jnp.asarray(arrays[name]) for name in ("embedding", "head") if name in arrays}
    return dataclasses.replace(target(), params=target().params | shared)


@jax.jit
def run_blocks(model, tokens, hidden):
    """Returns ``[A, W, O]``, the logits of the blocks after each of the first A tokens."""
    num, capacity = len(tokens) - model.head.block_size, 16
    anchors, slots = jnp.arange(num), jnp.arange(len(tokens))
    positions = jnp.where(slots < anchors[:, None], slots, capacity)
    every = jnp.broadcast_to(hidden, (num, *hidden.shape))
    cache = model.store(every, positions, model.init_cache(num, capacity))
    return model.logits(model.hidden_states(tokens[:num], anchors, cache, anchors))


@pytest.mark.parametrize("name", mostly_slow(DFLASH, lambda name: name == "windows"))
def test_dflash_computes_the_logits_of_the_reference(reference, name):
    """Blocks after every token, and the drafts that the drafter samples from them."""
    about, arrays = case(name, "dflash", *DFLASH[name]), load_arrays(reference / f"dflash {name}.npz")
    model = load_speculator(reference / about["name"], own := target_of(arrays))
    assert model.params["embedding"] is own.params["embedding"]
    assert (model.params["head"] is own.params["head"]) == (model.output_ids is None)
    assert model.head.hidden_layers == tuple(about["config"]["aux_hidden_state_layer_ids"])
    tokens, hidden = jnp.asarray(arrays["tokens"], jnp.int32), jnp.asarray(arrays["hidden"])
    found, width = run_blocks(model, tokens, hidden), model.head.block_size
    expected = arrays["logits"][0].reshape(-1, width, found.shape[-1])
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    first = 0 if model.head.sample_from_anchor else 1
    drafted = propose(DFlashDrafter(model, VOCAB), tokens, hidden, width - first)
    drafted = drafted if model.output_ids is None else drafted[..., model.output_ids]
    num = len(expected) - 1  # The first row has two tokens.
    probs = jax.nn.softmax(expected[1:, first:], axis=-1)
    np.testing.assert_allclose(drafted[:num], probs, atol=TOLERANCE, rtol=TOLERANCE)


@jax.jit
def run_mtp(model, tokens, before):
    """Returns the logits and the states of the next step. Column p + 1 reads the state of column p."""
    states = jnp.pad(before, ((0, 0), (1, 0), (0, 0)))
    output = model.hidden_states(tokens, jnp.arange(tokens.shape[1])[None], None, states).hidden[:, 1:]
    return model.logits(output)[0], model.next_hidden(output)


@pytest.mark.parametrize("name", mostly_slow(MTP, lambda name: name == "head_dim"))
def test_mtp_computes_the_logits_of_the_reference(reference, name):
    """The head reads the target's last hidden state before the final norm, and its own output after its final norm.

    In a later step of the reference, all positions read outputs of the step before.
    """
    arrays = load_arrays(reference / f"mtp {name}.npz")
    model = load_speculator(reference / f"mtp {name}", own := target_of(arrays))
    assert [model.params[name] is own.params[name] for name in ("embedding", "head")] == [True, True]
    assert model.head.hidden_layers == (7,)  # Id L, which `Model.forward` returns before the final norm.
    tokens, hidden = jnp.asarray(arrays["tokens"], jnp.int32), jnp.asarray(arrays["hidden"])
    num_steps, num_slots, _ = arrays["logits"].shape
    before = model.project(hidden[None, :num_slots])
    for step in range(num_steps):
        found, before = run_mtp(model, tokens[None, step : step + num_slots + 1], before)
        np.testing.assert_allclose(found, arrays["logits"][step], atol=TOLERANCE, rtol=TOLERANCE)
    drafted = propose(Eagle3Drafter(model, VOCAB), tokens, hidden, 1)[:num_slots, 0]
    expected = jax.nn.softmax(arrays["logits"][0], axis=-1)
    np.testing.assert_allclose(drafted, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["speculators", "z-lab"])
def test_other_configurations_of_a_dflash_head(reference, tmp_path, kind):
    """Null layer ids, and the layout of the authors, whose layer ids are those of layer outputs, one less than ours."""
    shutil.copytree(reference / "dflash whole vocabulary", tmp_path / "head")
    content = json.loads((tmp_path / "head" / "config.json").read_text())
    if kind == "speculators":
        content["aux_hidden_state_layer_ids"] = None
    else:
        about = {"target_layer_ids": [1, 2, 3], "mask_token_id": 49}
        content = content["transformer_layer_config"] | {"block_size": 6, "dflash_config": about}
        content["num_target_layers"] = 7
    (tmp_path / "head" / "config.json").write_text(json.dumps(content))
    assert is_speculator(tmp_path / "head")
    found, same = (
        load_speculator(path, target()) for path in (tmp_path / "head", reference / "dflash whole vocabulary")
    )
    assert found.head == dataclasses.replace(same.head, hidden_layers=(2, 3, 4))
    assert found.config == same.config and jax.tree.all(jax.tree.map(np.array_equal, found.params, same.params))


def write_head(path, layer_config=LLAMA, *, tensors=None, without=(), **config):
    """Writes a random head of the `speculators` format that reads three hidden states."""
    path.mkdir()
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": VOCAB,
        "transformer_layer_config": layer_config,
    } | config
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in without}))
    stored = {}
    if tensors is None:
        tensors = random_tensors(read_speculator_config(path))
    stored = {name: tensor for name, tensor in tensors.items() if name not in without}
    save_file(stored, path / "model.safetensors")
    return path


def random_tensors(found):
    """Returns stored tensors by name; a reduced vocabulary holds the first tokens."""
    random, stored = np.random.default_rng(0), {}
    rules = tensor_rules(found.config, found.head())
    for name, leaf in head_param_shapes(found.config, found.head()).items():
        parts = rules[name].split(random.normal(size=leaf.shape).astype(np.float32))
        stored |= {source: np.ascontiguousarray(part) for source, part in zip(rules[name].sources, parts, strict=True)}
    if (size := found.config.output_vocab_size) is not None:
        stored |= {"d2t": np.zeros(size, np.int64), "t2d": np.arange(found.config.vocab_size) < size}
    return stored


def test_the_older_layout_is_the_same_head(tmp_path):
    """Its layer ids are those of layer outputs, one less than ours."""
    new = write_head(tmp_path / "new", eagle_aux_hidden_state_layer_ids=[2, 4, 5], draft_vocab_size=20)
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(new / "model.safetensors").items()
    }
    old = tmp_path / "old"
    old.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20} | LLAMA
    save_file(tensors, old / "model.safetensors")
    for own, expected in (({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (2, 4, 5)), ({}, (2, 3, 4))):
        (old / "config.json").write_text(json.dumps(config | {"eagle_config": own}))
        assert is_speculator(old)
        found, same = load_speculator(old, target()), load_speculator(new, target())
        assert found.head.hidden_layers == expected
        assert jax.tree.all(
            jax.tree.map(np.array_equal, (found.params, found.output_ids), (same.params, same.output_ids))
        )


def test_a_head_without_an_embedding_uses_the_targets(tmp_path):
    path = write_head(tmp_path / "head", without=("embed_tokens.weight",))
    assert load_speculator(path, target()).params["embedding"] is target().params["embedding"]
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight is missing: expected .* to be \[50, 32\], it is \[60, 32\]"
    ):
        load_speculator(path, target(60), vocab_size=40)


def test_a_head_may_be_narrower_than_the_target(tmp_path):
    path = write_head(tmp_path / "head", LLAMA | {"hidden_size": 16}, target_hidden_size=WIDTH)
    model = load_speculator(path, target())
    assert model.params["fc"].shape == (16, 3 * WIDTH)
    assert model.project(jnp.ones((1, 2, 3 * WIDTH))).shape == (1, 2, 16)


LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target_hidden_size": 24}, "target_hidden_size=24: the target's hidden size is 32"),
        (
            {"transformer_layer_config": LLAMA | {"vocab_size": 40}, "draft_vocab_size": 40},
            "vocab_size=40: .* 50 tokens",
        ),
        ({LAYERS: [1, 9, 2]}, r"eagle_aux_hidden_state_layer_ids=\[1, 9, 2\]: the target has 7 layers"),
        ({LAYERS: [1, 1, 2]}, "eagle_aux_hidden_state_layer_ids=.*: expected distinct"),
        ({LAYERS: "all"}, "eagle_aux_hidden_state_layer_ids='all'"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm=true: expected false with norm_before_fc"),
        ({"norm_output": 1}, "norm_output=1: expected true or false"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size='many': expected an integer"),
        ({"speculators_model_type": "xpress"}, "speculators_model_type='xpress': expected one of"),
        ({"speculators_model_type": "peagle"}, "missing key 'mask_token_id'"),
        ({"speculators_model_type": "peagle", "mask_token_id": 50}, "mask_token_id=50: expected a token of the 50"),
        ({"transformer_layer_config": 3}, "transformer_layer_config=3: expected a dictionary"),
        ({"transformer_layer_config": LLAMA | {"model_type": "gemma3"}}, "model_type='gemma3': expected one of"),
        ({"transformer_layer_config": LLAMA | {"hidden_act": "tan"}}, "hidden_act='tan'"),
        ({"transformer_layer_config": LLAMA | {"head_dim": 7}}, "head_dim=7"),
        ({"transformer_layer_config": LLAMA | {"layer_types": ["other"]}}, "layer_types: 'other'"),
        ({"norm_before_fc": True}, "missing tensor 'input_norm.weight'"),
        ({"draft_vocab_size": 20}, "missing tensor 'd2t'"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, changes, message):
    tensors = random_tensors(read_speculator_config(write_head(tmp_path / "good")))
    path = write_head(tmp_path / "head", tensors=tensors, **changes)
    with pytest.raises(ValueError, match=message):
        load_speculator(path, target())


BLOCKS = {"speculators_model_type": "dflash", "transformer_layer_config": QWEN3, "mask_token_id": 3}
Z_LAB = QWEN3 | {"block_size": 8, "num_target_layers": 7}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"]}
LAST = {"speculators_model_type": "mtp", "transformer_layer_config": QWEN3}


@pytest.mark.parametrize(
    "config, without, message",
    [
        (BLOCKS, "mask_token_id", "missing key 'mask_token_id'"),
        (BLOCKS | {"mask_token_id": None}, None, "mask_token_id=None: expected an integer"),
        (BLOCKS | {"mask_token_id": 50}, None, "mask_token_id=50: expected a token of the 50"),
        (BLOCKS | {"block_size": 1}, None, "block_size=1: expected a block with at least one draft"),
        (BLOCKS | {"block_size": 4.0}, None, "block_size=4.0: expected an integer"),
        (BLOCKS | {"target_hidden_size": 24}, None, "target_hidden_size=24: expected hidden_size=32"),
        (BLOCKS | {"aux_hidden_state_layer_ids": [8]}, None, r"aux_hidden_state_layer_ids=\[8\]: the target has 7"),
        (BLOCKS | {"aux_hidden_state_layer_ids": [2, 2]}, None, "aux_hidden_state_layer_ids=.*: expected distinct"),
        (BLOCKS | {"sample_from_anchor": 1}, None, "sample_from_anchor=1: expected true or false"),
        (BLOCKS | {"sliding_window_non_causal": "no"}, None, "sliding_window_non_causal='no': expected true or false"),
        (BLOCKS | {"transformer_layer_config": QWEN3 | {"model_type": "gemma3"}}, None, "model_type='gemma3'"),
        (BLOCKS | {"transformer_layer_config": QWEN3 | {"hidden_size": 24}}, None, "target_hidden_size=24: the target"),
        (BLOCKS | {"draft_vocab_size": 20}, "d2t", "missing tensor 'd2t'"),
        (BLOCKS, "hidden_norm.weight", "missing tensor 'hidden_norm.weight'"),
        (Z_LAB | {"dflash_config": 3}, None, "dflash_config=3: expected a dictionary"),
        (Z_LAB | {"dflash_config": {"mask_token_id": 3}}, None, "target_layer_ids=null: expected distinct layer ids"),
        (Z_LAB | {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 6]}}, None, "none of the last layer"),
        (Z_LAB | SLIDING | {"dflash_config": {"target_layer_ids": [1]}}, None, "layer_types: 'sliding_attention'"),
        (LAST | {"transformer_layer_config": SHAPE}, None, "model_type='qwen2': expected one of 'qwen3', 'qwen3_next'"),
        (LAST | {"num_nextn_predict_layers": 2}, None, "num_nextn_predict_layers=2: expected 1"),
        (LAST | {"transformer_layer_config": QWEN3 | SLIDING}, None, "layer_types: 'sliding_attention'"),
        (LAST | {"transformer_layer_config": QWEN3 | {"hidden_size": 24}}, None, "target_hidden_size=24: the target"),
        (LAST, "mtp_layers.0.input_proj.weight", "missing tensor 'mtp_layers.0.input_proj.weight'"),
        (LAST | {"transformer_layer_config": QWEN3 | {"vocab_size": 40}}, None, "vocab_size=40: .* 50 tokens"),
    ],
)
def test_a_block_or_mtp_head_that_does_not_fit_is_refused(tmp_path, config, without, message):
    good = BLOCKS if "dflash" in str(config) else LAST
    size = config.get("draft_vocab_size", VOCAB)
    tensors = random_tensors(read_speculator_config(write_config(tmp_path / "good", good | {"draft_vocab_size": size})))
    path = write_config(tmp_path / "head", {"draft_vocab_size": VOCAB} | config, without)
    save_file({name: tensor for name, tensor in tensors.items() if name != without}, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_speculator(path, target())


def write_config(path, config, without=None):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != without}))
    return path


def test_heads_of_other_targets_and_kinds_are_refused(tmp_path):
    path = write_head(tmp_path / "head", QWEN3, speculators_model_type="mtp")
    with pytest.raises(ValueError, match=r"expected the target's embedding to be \[50, 32\], it is \[60, 32\]"):
        load_speculator(path, target(60), vocab_size=40)
    head = load_speculator(path, target())
    for model in (head, load_speculator(write_head(tmp_path / "dflash", **BLOCKS), target())):
        with pytest.raises(ValueError, match="Config: expected an EAGLE-3 or a P-EAGLE head"):
            save_speculator(tmp_path / "new", model, target(), target_name="target")
    tied = tiny.model(1, vocab_size=VOCAB, width=WIDTH, num_layers=7, is_tied=True)
    assert load_speculator(path, tied).params["head"] is tied.params["embedding"]
    quantized = load_speculator(path, quantize_model(target()))
    assert quantized.params["head"].dtype == jnp.int8
    states = jax.random.normal(jax.random.key(0), (1, 3, WIDTH))
    np.testing.assert_allclose(quantized.logits(states), head.logits(states), atol=0.05)


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("fc.weight", np.zeros((32, 64), np.float32), "misshapen tensor 'fc.weight'"),
        ("extra.weight", np.zeros(3, np.float32), "unexpected tensor 'extra.weight'"),
        ("midlayer.hidden_norm.weight", np.zeros(32, np.float32), "are one"),
        ("d2t", np.zeros(19, np.int64), "tensor 'd2t' has the shape"),
        ("d2t", np.zeros(20, np.float32), "tensor 'd2t' has the dtype F32"),
        ("d2t", np.arange(20, dtype=np.int64) * -1, "tensor 'd2t': expected offsets of distinct tokens"),
        ("d2t", np.full(20, 31, np.int64), "tensor 'd2t': expected offsets of distinct tokens below 50"),
        ("t2d", np.arange(50) < 21, "tensor 't2d': expected true at the tokens of 'd2t'"),
    ],
)
def test_a_damaged_head_is_refused(tmp_path, name, tensor, message):
    good = write_head(tmp_path / "good", draft_vocab_size=20)
    tensors = load_file(good / "model.safetensors") | {name: tensor}
    path = write_head(tmp_path / "head", tensors=tensors, draft_vocab_size=20)
    with pytest.raises(ValueError, match=message):
        load_speculator(path, target())


def test_lossy_settings_are_reported(tmp_path):
    method = {"proposal_type": "greedy", "verifier_accept_k": 5, "accept_tolerance": 0.0}
    with pytest.warns(UserWarning, match="verifier_accept_k=5 is ignored"):
        write_head(tmp_path / "head", speculators_config={"proposal_methods": [method]})


def test_a_missing_key_means_the_default_of_transformers(tmp_path):
    path = tmp_path / "head"
    path.mkdir()
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": {"num_hidden_layers": 1}}
    (path / "config.json").write_text(json.dumps(config))
    found = read_speculator_config(path)
    attention = found.config.layers[0].attention
    assert (found.config.family, found.config.vocab_size, found.config.output_vocab_size) == ("qwen3", 151936, 32000)
    assert (found.config.width, attention.num_heads, attention.head_dim) == (4096, 32, 128)
    assert found.hidden_layers is None and found.head(28).hidden_layers == (2, 14, 25)
    with pytest.raises(ValueError, match="needs three different layers, the target has 5"):
        found.head(5)


HEADS = [
    ("eagle3", Eagle3Drafter, "2, L/2, L-3"),
    ("dflash", DFlashDrafter, "2, L/2, L-3"),
    ("mtp", Eagle3Drafter, "L"),
]


def write_pair(path, tokenizer, kind):
    """Writes a target and a head for it; returns the head's directory."""
    pair_target = random_model(small_config(num_layers=7))
    save_model(path / "target", pair_target, tokenizer=tokenizer)
    layer_config = QWEN3 | {"vocab_size": pair_target.config.vocab_size, "hidden_size": 16}
    changes = {"speculators_model_type": kind, "draft_vocab_size": 40, "mask_token_id": 3}
    return write_head(path / "head", layer_config, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, *_ in HEADS])
def test_speculation_with_a_head_loaded_by_its_path_is_greedy_decoding(tmp_path, tokenizer, kind):
    pair = bass.load_pair(tmp_path / "target", drafter=write_pair(tmp_path, tokenizer, kind))
    expected = bass.generate(pair, [[3, 5, 8]], step="decode", max_new_tokens=6).tokens[0]
    np.testing.assert_array_equal(
        bass.generate(pair, [[3, 5, 8]], bass.SpecConfig(2), max_new_tokens=6).tokens[0], expected
    )


@pytest.mark.parametrize("kind, drafter, layers", HEADS)
def test_a_head_is_loaded_by_its_path_and_described(tmp_path, tokenizer, capsys, kind, drafter, layers):
    head = write_pair(tmp_path, tokenizer, kind)
    pair = bass.load_pair(tmp_path / "target", drafter=head)
    assert isinstance(pair.drafter, drafter)
    assert pair.drafter.hidden_layers == ((7,) if kind == "mtp" else (2, 3, 4))
    with pytest.raises(ValueError, match="quantize_draft='int8': expected None for the draft head"):
        bass.load_pair(tmp_path / "target", drafter=head, quantize_draft="int8")
    found = inspect_checkpoint(head)
    params = pair.drafter.model.params
    shared = {"eagle3": (), "dflash": ("embedding",), "mtp": ("embedding", "head")}[kind]
    own = {name: leaf for name, leaf in params.items() if name not in shared}
    assert found.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(own))
    assert why_not_a_pair(inspect_checkpoint(tmp_path / "target"), found) is None
    assert main(["inspect", str(tmp_path / "target"), "--draft", str(head), "--json"]) == 0
    assert f"tokens and the hidden states {layers} of 16 values ({kind})" in capsys.readouterr().out
    if kind == "eagle3":
        layer_config = QWEN3 | {"vocab_size": found.config.vocab_size, "hidden_size": 16}
        other = write_head(tmp_path / "other", layer_config, draft_vocab_size=40, target_hidden_size=24)
        reason = "target_hidden_size=24: the target's hidden size is 16"
        assert why_not_a_pair(inspect_checkpoint(tmp_path / "target"), inspect_checkpoint(other)) == reason
