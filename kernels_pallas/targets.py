"""The device that a function is traced for; it determines the implementation and the tiles of kernels."""

import warnings
from typing import NamedTuple

import jax

# Hopper cards by the names that jax gives them. The Mosaic GPU kernels use wgmma, which only sm_90 has.
_HOPPER_KINDS = ("H100", "H200", "H20", "H800", "GH200")
# Data-center Blackwell cards.
_BLACKWELL_KINDS = ("B100", "B200", "B300")
_DEFAULT_NUM_CORES = 108


class Target(NamedTuple):
    """The device that code is traced for."""

    platform: str
    """`"gpu"`, `"cpu"` or another platform of jax."""
    device_kind: str
    """jax's name of the device, such as `"NVIDIA H200"`."""
    num_cores: int
    """Number of streaming multiprocessors of a GPU."""

    @property
    def is_hopper(self) -> bool:
        """Whether the device has Hopper's tensor-core and copy instructions."""
        return any(kind in self.device_kind for kind in _HOPPER_KINDS)

    @property
    def is_blackwell(self) -> bool:
        """Whether the device is of the generation after Hopper, without wgmma."""
        return any(kind in self.device_kind for kind in _BLACKWELL_KINDS)


def current_target() -> Target:
    """Returns the device of the mesh that is set, or else jax's default device.

    The mesh takes precedence, because code can be compiled ahead of time for a device that this machine does not have,
    and because code inside `shard_map` runs on the mesh.
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
    """Hides jax's deprecation warning for the Triton dialect; the modules that use it document the deprecation.

    The filter stays installed, because jax warns when the surrounding function is lowered, after this call.
    """
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
