"""Tile sizes per device and shape, from a heuristic and a table of measured exceptions."""

import functools
import json
import math
import pathlib
from typing import NamedTuple

from kernels_pallas.targets import Target

_TABLE = pathlib.Path(__file__).parent / "tiles.json"
_MAX_SPLITS = 32
_MIN_BLOCKS_PER_SPLIT = 4
# Merging writes and reads 8 bytes per query row and element of a split; the walk reads K and V once. Merging may move
# at most this share of the walk's bytes.
_MERGE_SHARE = 1 / 4
_PROGRAMS_PER_CORE = 2


class AttentionTiles(NamedTuple):
    """Tile sizes of one launch of ragged attention."""

    block_m: int
    """Query rows per program: (token, query head) pairs of one kv head."""
    block_k: int
    """Cache positions per step of the walk."""
    num_splits: int
    """Number of programs that share one row's walk."""
    num_warps: int
    """Warps per program (Triton)."""
    num_stages: int
    """Blocks of K and V that are copied ahead."""


class AcceptanceTiles(NamedTuple):
    """Tile sizes of the launches of masked acceptance."""

    chunk: int
    """Tokens of the vocabulary per program that reads one block (`row_statistics`, `sample_block`)."""
    block: int
    """Tokens per step of a program that walks over a row (`row_threshold`)."""
    num_warps: int
    """Warps per program."""


class GroupedTiles(NamedTuple):
    """Tile sizes of a grouped product."""

    block_m: int
    """Rows per program."""
    block_c: int
    """Columns of the result per program."""
    block_d: int
    """Summed elements per step."""
    num_warps: int
    """Warps per program."""
    num_stages: int
    """Steps whose operands are copied ahead."""


def grouped_tiles(num_rows: int, weights: tuple[int, int, int], dtype: str) -> GroupedTiles:
    """Returns the tiles of a grouped product.

    Args:
        num_rows: Number of results.
        weights: G, C and D.
        dtype: Name of the rows' dtype.
    """
    num_groups, num_columns, depth = weights
    is_wide = dtype == "float32"
    # With blocks of 1.5 times the mean size of a group, most matrices are read once.
    block_m = min(16 if is_wide else 64, max(16, next_power_of_two(-(-3 * num_rows // (2 * num_groups)))))
    # Sides that divide the matrices, so that their loads need no masks.
    block_c = math.gcd(num_columns, 32 if is_wide else 128)
    block_d = math.gcd(depth, 32 if is_wide else 64)
    return GroupedTiles(block_m, block_c, block_d, num_warps=4, num_stages=2 if is_wide else 4)


def acceptance_tiles(target: Target, *, vocab_size: int, implementation: str) -> AcceptanceTiles:
    """Returns the tiles of masked acceptance for a device and a vocabulary of `vocab_size`.

    4096 tokens in 8 warps take 16 registers per thread, which keeps enough loads in flight to saturate the memory, and
    give 38 partial results per row at V = 152k. A Mosaic GPU program has 4 warps and reads 2048 tokens.
    """
    size = next_power_of_two(vocab_size)
    tiles = AcceptanceTiles(min(4096, size), min(2048, size), 8)
    if implementation == "mosaic_gpu":
        # Its blocks may not exceed the vocabulary.
        size = next_power_of_two(vocab_size + 1) // 2
        tiles = AcceptanceTiles(min(2048, size), min(1024, size), 4)
    for entry in _table().get(target.device_kind, {}).get("masked_acceptance", []):
        if entry["implementation"] == implementation:
            tiles = tiles._replace(**entry["tiles"])
    return tiles


def next_power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least `value`, a positive integer."""
    return 1 << max(0, (value - 1).bit_length())


def attention_tiles(
    target: Target,
    *,
    batch: int,
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: str,
    cache_itemsize: int,
    implementation: str,
) -> AttentionTiles:
    """Returns the tiles of ragged attention for a device and shape.

    The number of splits gives every core `_PROGRAMS_PER_CORE` programs, but each split of a full cache has at least
    `_MIN_BLOCKS_PER_SPLIT` blocks and costs at most `_MERGE_SHARE` of its bytes for merging.

    Args:
        target: The device.
        batch: B; 1 if every row is a launch of its own.
        num_rows: T * R query rows per kv head.
        num_kv_heads: K.
        head_dim: H.
        capacity: S.
        dtype: Name of the queries' dtype.
        cache_itemsize: Bytes of an element of the cache.
        implementation: `"triton"` or `"mosaic_gpu"`.
    """
    is_mosaic_gpu = implementation == "mosaic_gpu"
    is_wide = dtype == "float32"
    # Float32 products run without tensor cores and need more registers, so their tiles are smaller.
    largest = 64 if not is_wide else 32 if head_dim <= 64 else 16
    # 16 is the smallest side of a tensor-core product.
    block_m = min(largest, max(16, next_power_of_two(num_rows)))
    if is_mosaic_gpu:
        block_m = 64  # The height of a wgmma.
    block_k = 32 if is_wide else 64
    num_warps = 4 if block_m * head_dim <= 64 * 128 and not is_wide else 8
    tiles = AttentionTiles(block_m, block_k, 1, num_warps, num_stages=2)

    for entry in _table().get(target.device_kind, {}).get("ragged_attention", []):
        shape = (entry["implementation"], entry["dtype"], entry["head_dim"], entry["block_m"])
        if shape == (implementation, dtype, head_dim, block_m):
            tiles = tiles._replace(**entry["tiles"])
    programs = batch * num_kv_heads * -(-num_rows // tiles.block_m)
    wanted = next_power_of_two(-(-_PROGRAMS_PER_CORE * target.num_cores // programs))
    positions = max(tiles.block_k * _MIN_BLOCKS_PER_SPLIT, round(8 * num_rows / (2 * cache_itemsize * _MERGE_SHARE)))
    possible = max(1, capacity // positions)
    return tiles._replace(num_splits=min(wanted, possible, _MAX_SPLITS))


@functools.cache
def _table() -> dict:
    return json.loads(_TABLE.read_text())["devices"]
