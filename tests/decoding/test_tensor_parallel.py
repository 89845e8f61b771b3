"""A pair spread over several devices: the same tokens, less memory on each; and over two real processes."""

import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import ModelDrafter
from bass_jax.models import place_model
from tests import tiny

VOCAB, PROMPTS, NUM_TOKENS = 12, ([7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [5, 6, 7, 5, 6, 7, 5, 6]), 20
CHANGES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "vocab_size": VOCAB, "num_layers": 1}


def models(**changes) -> tuple[bass.Model, bass.Model]:
    target = tiny.model(0, **CHANGES, **changes)
    return target, tiny.perturbed(target, 0.02)


def decode(target: bass.Model, draft: bass.Model | None, step: str = "speculate"):
    drafter = bass.drafters.NgramDrafter() if draft is None else ModelDrafter(draft, VOCAB)
    return bass.generate(bass.Pair(target, drafter), PROMPTS, bass.SpecConfig(3), max_new_tokens=NUM_TOKENS, step=step)


def bytes_of_a_device(model: bass.Model) -> int:
    leaves = jax.tree.leaves(model.params)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


@pytest.fixture(scope="module")
def expected():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    target, draft = models()
    return decode(target, draft, "decode").tokens


@pytest.mark.parametrize(("num_devices", "draft_rules"), [(2, {}), (4, None)])
def test_greedy_tokens_are_those_of_one_device(num_devices, draft_rules, expected):
    """With the draft spread like the target, and with the whole draft on every device."""
    target, draft = models()
    mesh = bass.tensor_parallel_mesh(num_devices)
    spread = place_model(target, mesh), place_model(draft, mesh, draft_rules)
    assert [model.config.tensor_axis for model in spread] == ["tp", None if draft_rules == {} else "tp"]
    run = decode(*spread)
    for found, tokens in zip(run.tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)
    assert run.summary.acceptance_rate > 0.3


@pytest.mark.slow
def test_regular_decoding_and_lookup_too(expected):
    target = place_model(models()[0], bass.tensor_parallel_mesh(4))
    for step in ("decode", "speculate"):
        for found, tokens in zip(decode(target, None, step).tokens, expected, strict=True):
            np.testing.assert_array_equal(found, tokens)


@pytest.mark.slow
def test_int8_weights_and_cache_too():
    target, draft = models()
    target = bass.quantize_model(target, cache_dtype="int8")
    expected = decode(target, draft, "decode").tokens
    mesh = bass.tensor_parallel_mesh(2)
    for found, tokens in zip(decode(place_model(target, mesh), place_model(draft, mesh)).tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)


def test_memory_of_a_device_falls(expected):
    """By all that is split: what is left whole are the norms."""
    target = models(width=64, mlp_width=256)[0]
    whole = bytes_of_a_device(target)
    for num_devices in (1, 2, 4):
        spread = place_model(target, bass.tensor_parallel_mesh(num_devices))
        assert bytes_of_a_device(spread) < 1.02 * whole / num_devices
        mesh_free = dataclasses.replace(spread.config, tensor_axis=None)
        assert mesh_free == target.config


def test_caches_are_split_by_heads(expected):
    target, draft = models()
    mesh = bass.tensor_parallel_mesh(4)
    pair = bass.Pair(place_model(target, mesh), ModelDrafter(place_model(draft, mesh, {}), VOCAB))
    state = bass.prefill(pair, PROMPTS, bass.SpecConfig(3), max_new_tokens=NUM_TOKENS)
    for _ in range(2):
        for layer in (*state.target_cache.keys, *state.target_cache.values):
            assert {shard.data.shape for shard in layer.addressable_shards} == {(4, 1, 64, 4)}
        for layer in state.drafter.cache.keys:
            assert layer.sharding.is_fully_replicated
        assert state.tokens.sharding.is_fully_replicated
        step = jax.jit(bass.speculate_step, donate_argnames="state")
        with jax.set_mesh(mesh):
            state, info = step(pair, state, bass.SpecConfig(3))
        assert info.num_emitted.sharding.is_fully_replicated


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"num_devices=99: expected 1 to \d+"):
        bass.tensor_parallel_mesh(99)
    with pytest.raises(ValueError, match="num_processes=None: expected all of"):
        bass.start_distributed("localhost:1")


PROGRAM = """
import json, sys
import jax
import bass_jax as bass
mesh = bass.start_distributed(sys.argv[1], 2, int(sys.argv[2]))
from bass_jax.models import place_model
from tests import test_tensor_parallel as shared
target, draft = shared.models()
run = shared.decode(place_model(target, mesh), place_model(draft, mesh, {}))
held = shared.bytes_of_a_device(place_model(target, mesh))
print(json.dumps({"devices": len(jax.devices()), "bytes": held, "tokens": [row.tolist() for row in run.tokens]}))
"""


def test_two_processes_decode_the_same_tokens(expected):
    """Each on a device of its own, over the loopback interface."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, coordinator, str(index)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    found = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(models()[0].params))
    for one in found:
        assert one["devices"] == 2 and one["bytes"] < 0.6 * whole
        assert one["tokens"] == [row.tolist() for row in expected]
