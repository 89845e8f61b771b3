"""Which device a function is being traced for: kernels choose their implementation and tiles by it."""

import warnings
from typing import NamedTuple

import jax

# Every kind of Hopper card that jax names; wgmma, on which the Mosaic GPU kernels stand, exists on sm_90
# alone.
_HOPPER_KINDS = ("H100", "H200", "H20", "H800", "GH200")
# Data-center Blackwell.
_BLACKWELL_KINDS = ("B100", "B200", "B300")
_DEFAULT_NUM_CORES = 108


class Target(NamedTuple):
    """The device that code is traced for."""

    platform: str
    """`"gpu"`, `"cpu"` or another of jax's platforms."""
    device_kind: str
    """The name jax gives the device, such as `"NVIDIA H200"`."""
    num_cores: int
    """Streaming multiprocessors of a GPU."""

    @property
    def is_hopper(self) -> bool:
        """Whether the device has Hopper's tensor-core and copy instructions."""
        return any(kind in self.device_kind for kind in _HOPPER_KINDS)

    @property
    def is_blackwell(self) -> bool:
        """Whether the device is of the generation after Hopper, which has no wgmma."""
        return any(kind in self.device_kind for kind in _BLACKWELL_KINDS)


def current_target() -> Target:
    """The device of the mesh that is set, else jax's default device.

    A mesh comes first because code may be traced for a device that this machine does not have (ahead-of-time
    compilation) and because under `shard_map` the mesh says where the code runs.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Target(abstract.platform or "", abstract.device_kind, abstract.num_cores or _DEFAULT_NUM_CORES)
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is None:
        device = jax.devices()[0]
    return Target(device.platform, device.device_kind, getattr(device, "core_count", None) or _DEFAULT_NUM_CORES)


def silence_triton_deprecation() -> None:
    """Hides jax's notice that the Triton dialect will go, which the modules that use it say themselves.

    jax warns when the surrounding function is lowered, long after a kernel is built, so the filter has to
    outlive this call.
    """
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
