"""Devices by their public figures, and the one at hand by measurement."""

import dataclasses
import time

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Device:
    """What the roofline needs of a device.

    Attributes:
        name: for people.
        peak_flops: dense, in the type of the weights, per second.
        bandwidth: bytes per second from memory.
        compute_efficiency: share of the peak that matrix products of few rows reach.
        bandwidth_efficiency: share of the bandwidth that reading weights reaches.
        layer_seconds: time per layer and pass that is neither: launches, norms, gaps.
        overlap: share of the shorter of computing and reading that hides behind the longer; 1 is the ideal roofline.
    """

    name: str
    peak_flops: float
    bandwidth: float
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    layer_seconds: float = 0.0
    overlap: float = 1.0


# Dense bfloat16 peaks and memory bandwidths of NVIDIA's data sheets. The shares are assumptions, not measurements:
# 85 % of the bandwidth, half of the peak, 20 microseconds of launches and small kernels per layer, no overlap.
_ASSUMED = {
    "compute_efficiency": 0.5, "bandwidth_efficiency": 0.85, "layer_seconds": 20e-6, "overlap": 0.0
}  # fmt: skip
H200 = Device("H200 SXM", peak_flops=989e12, bandwidth=4.8e12, **_ASSUMED)
A100 = Device("A100 SXM 80GB", peak_flops=312e12, bandwidth=2.039e12, **_ASSUMED)
DEVICES = {"h200": H200, "a100": A100}
"""By the name that the command line takes."""


def measure_device(
    dtype: str = "float32", size: int = 1536, repeats: int = 5, block_bytes: int | None = None
) -> Device:
    """Times a large product, and the reading of a large block, on the first device; the best of `repeats`.

    The bandwidth is the better of two: a copy, which reads and writes, and a product with one row, which reads alone,
    as a step of one row reads its weights.

    Args:
        dtype: of the products.
        size: of the square matrices of the large one.
        repeats: runs of each.
        block_bytes: of the block; default 64 MiB, past the caches of a CPU, and on a GPU 1 GiB.
    """
    if block_bytes is None:
        block_bytes = 2**26 if jax.devices()[0].platform == "cpu" else 2**30
    matrix = jnp.ones((size, size), dtype)
    copied = jnp.ones(block_bytes // 4, jnp.float32)
    rows = 4096 if block_bytes >= 2**26 else 64
    block = jnp.ones((rows, max(1, block_bytes // (rows * matrix.dtype.itemsize))), dtype)
    product = _best_seconds(jax.jit(lambda x: x @ x), repeats, matrix)
    copy = _best_seconds(jax.jit(lambda x: x + 1), repeats, copied)
    read = _best_seconds(jax.jit(lambda row, block: row @ block), repeats, jnp.ones((1, rows), dtype), block)
    name = jax.devices()[0].device_kind
    bandwidth = max(2 * copied.nbytes / copy, block.nbytes / read)
    return Device(name, peak_flops=2 * size**3 / product, bandwidth=bandwidth)


def _best_seconds(function, repeats: int, *arguments) -> float:
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
