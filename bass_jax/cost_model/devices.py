"""Devices: the figures of data sheets, and a measurement of the device in use."""

import dataclasses
import timeit

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Device:
    """The figures of a device that the roofline model needs.

    Attributes:
        name: for display.
        peak_flops: dense FLOPs per second in the dtype of the weights.
        bandwidth: memory bandwidth in bytes per second.
        compute_efficiency: share of the peak that matrix products with few rows reach.
        bandwidth_efficiency: share of the bandwidth that reading weights reaches.
        layer_seconds: time per layer and pass for everything else, such as launches and norms.
        overlap: share of the shorter of compute and read time that is hidden by the longer; 1 is the ideal roofline.
    """

    name: str
    peak_flops: float
    bandwidth: float
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    layer_seconds: float = 0.0
    overlap: float = 1.0


# Peaks (dense bfloat16) and bandwidths are from NVIDIA's data sheets. The other figures are assumptions, not
# measurements: 85 % of the bandwidth, half of the peak, 20 microseconds of small kernels per layer, no overlap.
_ASSUMED = {"compute_efficiency": 0.5, "bandwidth_efficiency": 0.85, "layer_seconds": 20e-6, "overlap": 0.0}
H200 = Device("H200 SXM", peak_flops=989e12, bandwidth=4.8e12, **_ASSUMED)
A100 = Device("A100 SXM 80GB", peak_flops=312e12, bandwidth=2.039e12, **_ASSUMED)
DEVICES = {"h200": H200, "a100": A100}
"""The devices by their names on the command line."""


def measure_device(dtype: str = "float32", repeats: int = 5) -> Device:
    """Measures the peak and the bandwidth of the first device; the best of `repeats` runs counts.

    The peak is that of a large matrix product. The bandwidth is the larger one of a copy, which reads and writes, and
    of a product with one row, which only reads, as a step with one row reads the weights. Both use 64 MiB on a CPU, so
    that its caches do not help, and 1 GiB on a GPU. The matrices of the large product have 1,536 rows on a CPU and
    8,192 on a GPU, where the product of smaller ones would take less time than its dispatch.

    Args:
        dtype: of the products.
        repeats: number of runs.
    """
    num_bytes, size = (2**26, 1536) if jax.devices()[0].platform == "cpu" else (2**30, 8192)
    matrix = jnp.ones((size, size), dtype)
    copied = jnp.ones(num_bytes // 4, jnp.float32)
    block = jnp.ones((4096, num_bytes // (4096 * matrix.dtype.itemsize)), dtype)
    product = _best_seconds(jax.jit(lambda x: x @ x), repeats, matrix)
    copy = _best_seconds(jax.jit(lambda x: x + 1), repeats, copied)
    read = _best_seconds(jax.jit(lambda row, block: row @ block), repeats, jnp.ones((1, 4096), dtype), block)
    return Device(
        jax.devices()[0].device_kind,
        peak_flops=2 * size**3 / product,
        bandwidth=max(2 * copied.nbytes / copy, block.nbytes / read),
    )


def _best_seconds(function, repeats: int, *arguments) -> float:
    # On a GPU several calls are dispatched at once, because dispatching a single one takes part of its time.
    num_calls = 1 if jax.devices()[0].platform == "cpu" else 20

    def run():
        for _ in range(num_calls):
            result = function(*arguments)
        jax.block_until_ready(result)

    # The first run compiles, so it is never the best one.
    return min(timeit.repeat(run, number=1, repeat=repeats + 1)) / num_calls
