"""Every drafter in every cache, on one device and on two: a request gets the tokens that it gets alone."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import bass_jax as bass
from bass_jax.drafters import EnsembleDrafter, ForcedTokensDrafter, NgramDrafter, SuffixDrafter, early_exit_drafter
from bass_jax.models import place_model, tensor_parallel_mesh
from tests import tiny

DRAFTERS = {
    "model": lambda target: tiny.model_drafter(tiny.perturbed(target, 0.07)),
    "early exit": lambda target: early_exit_drafter(target, 1),
    "eagle": tiny.eagle_drafter,
    "eagle3": tiny.eagle3_drafter,
    "p-eagle": lambda target: tiny.eagle3_drafter(target, mask=4),
    "mtp": tiny.mtp_drafter,
    "dflash": tiny.dflash_drafter,
    "ngram": lambda target: NgramDrafter(),
    "suffix": lambda target: SuffixDrafter(),
    "shared suffix": lambda target: tiny.shared_suffix(),
    "forced tokens": lambda target: ForcedTokensDrafter(),
    "retrieval": lambda target: tiny.retrieval_drafter(),
    "other vocabulary": lambda target: tiny.other_vocabulary(),
    "table": lambda target: tiny.table_drafter(),
    "ensemble": lambda target: tiny.ensemble_drafter(tiny.model_drafter(tiny.perturbed(target, 0.07))),
    "ensemble_eagle": lambda target: tiny.ensemble_drafter(tiny.eagle_drafter(target)),
    "ensemble with finished text": lambda target: EnsembleDrafter((NgramDrafter(), tiny.shared_suffix())),
    "ensemble_eagle3": lambda target: tiny.ensemble_drafter(tiny.eagle3_drafter(target)),
    "ensemble with other vocabulary": lambda target: EnsembleDrafter((NgramDrafter(), tiny.other_vocabulary())),
}
CACHES = ("dense", "pages", "INT8 pages")
CASES = [(drafter, cache, num) for drafter in DRAFTERS for cache in CACHES for num in (1, 2)]
RULES = (bass.SpecConfig(3, "greedy"), bass.SpecConfig(3, "shared_noise"))


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "cache", "num_devices"), CASES)
def test_requests_get_the_tokens_that_they_get_alone(drafter, cache, num_devices):
    """Requests come, are cancelled and leave between steps; then the rule with shared noise, with sampled rows."""
    cache_dtype = "int8" if cache == "INT8 pages" else None
    num_layers = 2 if drafter == "early exit" else 1
    target = tiny.model(1, num_kv_heads=2, num_layers=num_layers, cache_dtype=cache_dtype)
    plain = dataclasses.replace(target, config=dataclasses.replace(target.config, cache_dtype=None))
    pair = bass.Pair(target, DRAFTERS[drafter](plain))
    alone = pair
    if num_devices == 2:
        pair = place_pair(pair)
    config = bass.EngineConfig(3, 64, chunk=16, buckets=(4,), page_size=None if cache == "dense" else 16)
    random = np.random.default_rng(0)
    for spec in RULES:
        sampling = bass.SamplingParams(temperature=0.0 if spec.acceptance == "greedy" else 0.9)
        engine = bass.Engine(pair, spec, config=config, warm_up=False)
        requests, handles, cancelled = [], [], set()
        while len(handles) < 8 or not engine.loop.is_idle:
            if len(handles) < 8 and random.random() < 0.6:
                prompt = random.integers(0, 7, random.integers(1, 40)).tolist()
                requests.append({"max_new_tokens": int(random.integers(1, 24)), "sampling": sampling})
                handles.append(engine.submit(prompt, seed=len(handles), **requests[-1]))
                requests[-1]["prompt"] = prompt
            if handles and random.random() < 0.08:
                chosen = int(random.integers(len(handles)))
                if handles[chosen].finish_reason is None:
                    handles[chosen].cancel()
                    cancelled.add(chosen)
            engine.advance()
        for index, (handle, request) in enumerate(zip(handles, requests, strict=True)):
            prompt = request.pop("prompt")
            expected = bass.generate(alone, [prompt], spec, seeds=[index], stop_tokens=(), **request).tokens[0]
            found = handle.output().tokens
            assert index in cancelled or len(found) == len(expected)
            np.testing.assert_array_equal(found, expected[: len(found)])


def place_pair(pair: bass.Pair) -> bass.Pair:
    """Splits the target over two devices; the drafter is replicated."""
    mesh = tensor_parallel_mesh(2)
    target = place_model(pair.target, mesh, {"kv_heads": "tp", "mlp": "tp"})
    return bass.Pair(target, jax.device_put(pair.drafter, NamedSharding(mesh, PartitionSpec())))
