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


def measure_device(dtype: str = "float32", size: int = 1536, repeats: int = 5) -> Device:
    """Times a large product and a large copy on the first device; the best of `repeats`.

    Args:
        dtype: of the product.
        size: of its square matrices.
        repeats: runs of each.
    """
    matrix = jnp.ones((size, size), dtype)
    block = jnp.ones(64 * 2**20 // 4, jnp.float32)  # 64 MiB: past any cache of a CPU
    product = _best_seconds(jax.jit(lambda x: x @ x), matrix, repeats)
    copy = _best_seconds(jax.jit(lambda x: x + 1), block, repeats)
    name = jax.devices()[0].device_kind
    return Device(name, peak_flops=2 * size**3 / product, bandwidth=2 * block.nbytes / copy)


def _best_seconds(function, argument, repeats: int) -> float:
    jax.block_until_ready(function(argument))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(argument))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
