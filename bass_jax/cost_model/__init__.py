"""Cost models: the time of a step and the number of tokens that it emits; measured, fitted, or from a data sheet.

Imports `bass_jax.drafters` and lower packages. Start with `protocol.py`, then `table.py` (measured times) and
`roofline.py` (computed times).
"""

from bass_jax.cost_model.acceptance_curve import (
    expected_emitted,
    fit_power_law,
    geometric_tokens_per_pass,
    power_law_rates,
)
from bass_jax.cost_model.devices import A100, DEVICES, H200, Device, measure_device
from bass_jax.cost_model.pass_shape import PassShape, draft_pass_shape, pass_shape
from bass_jax.cost_model.profile import Profile, read_profile
from bass_jax.cost_model.protocol import CostModel, step_seconds
from bass_jax.cost_model.roofline import RooflineModel, roofline
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
    "TableModel",
    "draft_pass_shape",
    "expected_emitted",
    "fit_power_law",
    "geometric_tokens_per_pass",
    "measure_device",
    "pass_shape",
    "power_law_rates",
    "read_profile",
    "roofline",
    "step_seconds",
]
