"""Tile sizes: the heuristic and the table."""

import itertools
import json
import pathlib

import pytest

import kernels_pallas
from kernels_pallas.targets import Target, current_target
from kernels_pallas.tuning import AcceptanceTiles, acceptance_tiles, attention_tiles, next_power_of_two

H200 = Target("gpu", "NVIDIA H200", 132)
A100 = Target("gpu", "NVIDIA A100-SXM4-80GB", 108)
SHAPE = {
    "batch": 8,
    "num_rows": 20,
    "num_kv_heads": 8,
    "head_dim": 128,
    "capacity": 8192,
    "dtype": "bfloat16",
    "cache_itemsize": 2,
}


def test_a_small_batch_is_split_over_the_cores():
    splits = [attention_tiles(H200, **SHAPE | {"batch": b}, implementation="triton").num_splits for b in (1, 8, 64)]
    assert splits == [32, 8, 1]
    short = attention_tiles(H200, **SHAPE | {"batch": 1, "capacity": 512}, implementation="triton")
    assert short.num_splits == 2


def test_many_query_rows_have_fewer_splits():
    """Partial results of 128 rows are as large as the keys and values of 256 positions."""
    few, many = (
        attention_tiles(H200, **SHAPE | {"batch": 1, "num_rows": n}, implementation="triton").num_splits
        for n in (20, 128)
    )
    assert few == 32 and many == 8


@pytest.mark.parametrize("target", [H200, A100])
def test_tiles_are_powers_of_two_that_the_dialects_support(target):
    grid = itertools.product((1, 20, 300), (64, 80, 256), ("float32", "bfloat16"), ("triton", "mosaic_gpu"))
    for num_rows, head_dim, dtype, implementation in grid:
        shape = SHAPE | {"num_rows": num_rows, "head_dim": head_dim, "dtype": dtype}
        tiles = attention_tiles(target, **shape, implementation=implementation)
        assert 16 <= tiles.block_m <= 64 and tiles.block_m == next_power_of_two(tiles.block_m)
        assert tiles.block_k in (32, 64) and tiles.num_warps in (4, 8)
        assert implementation != "mosaic_gpu" or tiles.block_m == 64


def test_table_overrides_the_heuristic():
    shape = SHAPE | {"num_rows": 64, "head_dim": 64}
    assert attention_tiles(H200, **shape, implementation="triton").num_warps == 4
    assert attention_tiles(A100, **shape, implementation="triton").num_warps == 8


def test_every_entry_of_the_table_names_existing_fields():
    table = json.loads((pathlib.Path(kernels_pallas.__file__).parent / "tiles.json").read_text())
    for device, ops in table["devices"].items():
        for entry in ops["ragged_attention"]:
            num_rows = entry["block_m"]
            shape = SHAPE | {"num_rows": num_rows, "head_dim": entry["head_dim"], "dtype": entry["dtype"]}
            tiles = attention_tiles(Target("gpu", device, 100), **shape, implementation=entry["implementation"])
            assert entry["tiles"].items() <= tiles._asdict().items()
            assert entry["why"]


def test_acceptance_tiles_fit_the_vocabulary():
    assert acceptance_tiles(H200, vocab_size=151936, implementation="triton") == AcceptanceTiles(4096, 2048, 8)
    assert acceptance_tiles(H200, vocab_size=37, implementation="triton").chunk == 64
    for vocab_size in (128, 200, 256, 151936):
        tiles = acceptance_tiles(H200, vocab_size=vocab_size, implementation="mosaic_gpu")
        assert 128 <= tiles.block <= tiles.chunk <= vocab_size


def test_current_target_is_the_default_device_of_jax():
    target = current_target()
    assert target.platform in ("cpu", "gpu") and target.num_cores > 0
    b200 = Target("gpu", "NVIDIA B200", 148)
    assert not b200.is_hopper and H200.is_hopper and not A100.is_hopper
    assert b200.is_blackwell and not H200.is_blackwell and not A100.is_blackwell
