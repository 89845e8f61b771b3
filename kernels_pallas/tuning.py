"""Tile sizes per device and shape: a small table of checked entries, and a heuristic behind it."""

import functools
import json
import pathlib
from typing import NamedTuple

from kernels_pallas.targets import Target

_TABLE = pathlib.Path(__file__).parent / "tiles.json"
_MAX_SPLITS = 32
_MIN_BLOCKS_PER_SPLIT = 4
# Merging writes and reads 8 bytes per query row and element of a split, the walk reads K and V once: merging is to
# move at most this share of the walk's bytes.
_MERGE_SHARE = 1 / 4
_PROGRAMS_PER_CORE = 2


class AttentionTiles(NamedTuple):
    """How one launch of ragged attention is cut."""

    block_m: int
    """Query rows of a program: (token, query head) pairs of one kv head."""
    block_k: int
    """Cache positions per step of the walk."""
    num_splits: int
    """Programs that share one row's walk."""
    num_warps: int
    """Warps of a program (Triton)."""
    num_stages: int
    """Blocks of K and V in flight."""


class AcceptanceTiles(NamedTuple):
    """How the launches of masked acceptance are cut."""

    chunk: int
    """Tokens of the vocabulary that a program holds at once (statistics and draw)."""
    block: int
    """Tokens per step of a program that walks a whole row (thresholds)."""
    num_warps: int
    """Warps of a program."""


def acceptance_tiles(target: Target, *, vocab_size: int, implementation: str) -> AcceptanceTiles:
    """Tiles of masked acceptance: the table's entry for this device, else the heuristic.

    Args:
        target: The device.
        vocab_size: V.
        implementation: `"triton"` or `"mosaic_gpu"`.

    Returns:
        The tiles. 4096 tokens over 8 warps are 16 registers' worth per thread, enough loads in flight to fill
        the memory pipe, and 38 partial results per row at V = 152k. A Mosaic GPU program has 4 warps, for 2048.
    """
    size = next_power_of_two(vocab_size)
    tiles = AcceptanceTiles(min(4096, size), min(2048, size), 8)
    if implementation == "mosaic_gpu":
        # It reads no further than the vocabulary.
        size = next_power_of_two(vocab_size + 1) // 2
        tiles = AcceptanceTiles(min(2048, size), min(1024, size), 4)
    for entry in _table().get(target.device_kind, {}).get("masked_acceptance", []):
        if entry["implementation"] == implementation:
            tiles = tiles._replace(**entry["tiles"])
    return tiles


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value` (positive)."""
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
    """Tiles of ragged attention: the table's entry for this device and shape, else the heuristic.

    Args:
        target: The device.
        batch: B, or 1 where every row is a launch of its own.
        num_rows: T * R query rows per kv head.
        num_kv_heads: K.
        head_dim: H.
        capacity: S.
        dtype: Name of the queries' dtype.
        cache_itemsize: Bytes of an element of the cache.
        implementation: `"triton"` or `"mosaic_gpu"`.

    Returns:
        The tiles. Splits are as many as give every core `_PROGRAMS_PER_CORE` programs, as long as a split of a full
        cache is worth its merging: at least `_MIN_BLOCKS_PER_SPLIT` blocks, and `_MERGE_SHARE`.
    """
    is_mosaic_gpu = implementation == "mosaic_gpu"
    is_wide = dtype == "float32"
    # Float32 products run without tensor cores, on registers: smaller tiles.
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
