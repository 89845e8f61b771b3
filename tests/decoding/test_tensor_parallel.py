"""A pair sharded over several devices, or over two processes, emits the same tokens with less memory per device."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import ModelDrafter
from bass_jax.models import place_model
from tests import tiny
from tests.marks import mostly_slow
from tests.two_processes import run_in_two_processes

VOCAB, NUM_TOKENS = 12, 20
SPEC = bass.SpecConfig(4)
CHANGES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "vocab_size": VOCAB}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "mtp", "dflash"])
def test_a_draft_head_runs_on_a_mesh(expected, kind):
    """The head is on every device, and the target is sharded."""
    target, _ = models()
    mesh = bass.models.tensor_parallel_mesh(2)
    drafter = {
        "eagle3": tiny.eagle3_drafter(target, VOCAB),
        "p-eagle": tiny.eagle3_drafter(target, VOCAB, mask=4),
        "mtp": tiny.mtp_drafter(target, VOCAB),
        "dflash": tiny.dflash_drafter(target, VOCAB),
    }[kind]
    drafter = jax.device_put(drafter, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    run = bass.generate(bass.Pair(place_model(target, mesh), drafter), tiny.PROMPTS, SPEC, max_new_tokens=NUM_TOKENS)
    for found, tokens in zip(run.tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)


def models(**changes) -> tuple[bass.models.Model, bass.models.Model]:
    target = tiny.model(0, **CHANGES, **changes)
    return target, tiny.perturbed(target, 0.02)


def decode(target: bass.models.Model, draft: bass.models.Model | None, step: str = "speculate", spec=SPEC):
    drafter = bass.drafters.NgramDrafter() if draft is None else ModelDrafter(draft, VOCAB)
    return bass.generate(bass.Pair(target, drafter), tiny.PROMPTS, spec, max_new_tokens=NUM_TOKENS, step=step)


def bytes_per_device(model: bass.models.Model) -> int:
    leaves = jax.tree.leaves(model.params)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


@pytest.fixture(scope="module")
def expected():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    target, draft = models()
    return decode(target, draft, "decode").tokens


@pytest.mark.parametrize(("num_devices", "draft_rules"), mostly_slow([(2, {}), (4, None)], lambda case: case[0] == 4))
def test_greedy_tokens_equal_those_of_one_device(num_devices, draft_rules, expected):
    """With a draft model that is sharded like the target, and with one that is replicated."""
    target, draft = models()
    mesh = bass.models.tensor_parallel_mesh(num_devices)
    sharded = place_model(target, mesh), place_model(draft, mesh, draft_rules)
    assert [model.config.tensor_axis for model in sharded] == ["tp", None if draft_rules == {} else "tp"]
    run = decode(*sharded)
    for found, tokens in zip(run.tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)
    assert run.metrics.acceptance_rate > 0.3


@pytest.mark.slow
def test_regular_decoding_and_prompt_lookup_on_four_devices(expected):
    target = place_model(models()[0], bass.models.tensor_parallel_mesh(4))
    for step in ("decode", "speculate"):
        for found, tokens in zip(decode(target, None, step).tokens, expected, strict=True):
            np.testing.assert_array_equal(found, tokens)


@pytest.mark.slow
def test_int8_weights_and_an_int8_cache_on_two_devices():
    target, draft = models()
    target = bass.models.quantize_model(target, cache_dtype="int8")
    expected = decode(target, draft, "decode").tokens
    mesh = bass.models.tensor_parallel_mesh(2)
    for found, tokens in zip(decode(place_model(target, mesh), place_model(draft, mesh)).tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)


def test_memory_per_device_is_divided_by_the_number_of_devices(expected):
    """Only the norms are replicated."""
    target = models(width=64, mlp_width=256)[0]
    total = bytes_per_device(target)
    for num_devices in (1, 2, 4):
        sharded = place_model(target, bass.models.tensor_parallel_mesh(num_devices))
        assert bytes_per_device(sharded) < 1.02 * total / num_devices
        assert dataclasses.replace(sharded.config, tensor_axis=None, expert_axes=(None, None)) == target.config


@pytest.mark.slow
def test_caches_are_sharded_by_heads(expected):
    target, draft = models()
    mesh = bass.models.tensor_parallel_mesh(4)
    pair = bass.Pair(place_model(target, mesh), ModelDrafter(place_model(draft, mesh, {}), VOCAB))
    state = bass.prefill(pair, tiny.PROMPTS, SPEC, max_new_tokens=NUM_TOKENS)
    step = jax.jit(bass.speculate_step, donate_argnames="state")
    for _ in range(2):
        for layer in (*state.target_cache.keys, *state.target_cache.values):
            assert {shard.data.shape for shard in layer.addressable_shards} == {(4, 1, 64, 4)}
        for layer in state.drafter_state.cache.keys:
            assert layer.sharding.is_fully_replicated
        assert state.tokens.sharding.is_fully_replicated
        with jax.set_mesh(mesh):
            state, info = step(pair, state, SPEC)
        assert info.num_emitted.sharding.is_fully_replicated


def test_a_mesh_with_too_many_devices_is_refused():
    with pytest.raises(ValueError, match=r"num_devices=99: expected 1 to \d+"):
        bass.models.tensor_parallel_mesh(99)
    with pytest.raises(ValueError, match="num_processes=None: expected all of"):
        bass.models.start_distributed("localhost:1")


PROGRAM = """
from bass_jax.models import place_model
from tests.decoding import test_tensor_parallel as shared
target, draft = shared.models()
run = shared.decode(place_model(target, mesh), place_model(draft, mesh, {}))
num_bytes = shared.bytes_per_device(place_model(target, mesh))
# The policy auto. Process 0 measures, and it alone would compile another length at once.
from bass_jax.runtime.jit_cache import JIT_CACHE
JIT_CACHE.run_seconds = 1e9 if sys.argv[2] == "0" else 0.0
adaptive = shared.decode(place_model(target, mesh), place_model(draft, mesh, {}), spec=bass.SpecConfig())
print(json.dumps({
    "devices": len(jax.devices()), "bytes": num_bytes, "tokens": [row.tolist() for row in run.tokens],
    "adaptive": [row.tolist() for row in adaptive.tokens],
    "lengths": [info.num_drafted.tolist() for info in adaptive.infos],
}))
"""


@pytest.mark.slow
def test_two_processes_decode_the_same_tokens(expected):
    """Each process has one device."""
    found = run_in_two_processes(PROGRAM)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(models()[0].params))
    for one in found:
        assert one["devices"] == 2 and one["bytes"] < 0.6 * total
        assert one["tokens"] == one["adaptive"] == [row.tolist() for row in expected]
    assert found[0]["lengths"] == found[1]["lengths"]
