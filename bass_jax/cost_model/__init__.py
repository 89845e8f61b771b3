"""What a step costs and how many tokens it emits: measured, fitted, or computed from a device's data sheet.

Imports `bass_jax.config` and lower packages. Start with `protocol.py`, then `table.py` (measured costs) and
`roofline.py` (computed costs).
"""

from bass_jax.cost_model.acceptance_curve import (
    expected_emitted,
    fit_power_distribution,
    geometric_block_efficiency,
    power_law_rates,
    synchronized_block_efficiency,
)
from bass_jax.cost_model.devices import A100, DEVICES, H200, Device, measure_device
from bass_jax.cost_model.pass_shape import PassShape, pass_shape
from bass_jax.cost_model.profile import Profile, read_profile
from bass_jax.cost_model.protocol import CostModel, step_seconds
from bass_jax.cost_model.roofline import RooflineModel, fit_roofline, roofline
from bass_jax.cost_model.synergy import SynergyModel, fit_synergy, synergy_optimum
from bass_jax.cost_model.table import TableModel

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
    "fit_power_distribution",
    "fit_roofline",
    "fit_synergy",
    "geometric_block_efficiency",
    "measure_device",
    "pass_shape",
    "power_law_rates",
    "read_profile",
    "roofline",
    "step_seconds",
    "synchronized_block_efficiency",
    "synergy_optimum",
]
