"""What a step costs and what it yields: measured, fitted, or from public figures."""

from bass_jax.costmodel.acceptance import (
    expected_emitted,
    fit_power_law,
    geometric_block_efficiency,
    lockstep_block_efficiency,
    power_law_rates,
)
from bass_jax.costmodel.base import CostModel, step_seconds
from bass_jax.costmodel.devices import A100, DEVICES, H200, Device, measure_device
from bass_jax.costmodel.profile import Profile, read_profile
from bass_jax.costmodel.roofline import RooflineModel, fit_roofline, roofline
from bass_jax.costmodel.shapes import PassShape, pass_shape
from bass_jax.costmodel.synergy import SynergyModel, fit_synergy, synergy_optimum
from bass_jax.costmodel.table import TableModel

__all__ = [
    "A100",
    "DEVICES",
    "H200",
    "CostModel",
    "Device",
    "PassShape",
    "Profile",
    "RooflineModel",
    "SynergyModel",
    "TableModel",
    "expected_emitted",
    "fit_power_law",
    "fit_roofline",
    "fit_synergy",
    "geometric_block_efficiency",
    "lockstep_block_efficiency",
    "measure_device",
    "pass_shape",
    "power_law_rates",
    "read_profile",
    "roofline",
    "step_seconds",
    "synergy_optimum",
]
