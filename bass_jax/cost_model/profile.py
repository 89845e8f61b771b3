"""A profile: the measured times and acceptance rates of a pair on a device, and the models fitted to them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.cost_model.acceptance_curve import fit_power_law
from bass_jax.cost_model.pass_shape import PassShape
from bass_jax.cost_model.roofline import RooflineModel, fit_roofline
from bass_jax.cost_model.synergy import SynergyModel, fit_synergy
from bass_jax.cost_model.table import TableModel
from bass_jax.runtime.files import read_json, write_atomically

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Profile:
    """The measurements of one pair on one device.

    Attributes:
        about: device, date, pair and versions, for display.
        table: the measured times.
        rates: acceptance rate by position on real prompts, given that the drafts before it were accepted.
        target_shape: work of a target pass.
        draft_shape: work of a pass of the draft model; None for a drafter without a model.
    """

    about: dict[str, Any]
    table: TableModel
    rates: tuple[float, ...]
    target_shape: PassShape
    draft_shape: PassShape | None

    def synergy(self) -> SynergyModel:
        """Fits the model of Su et al. at the shortest measured context."""
        table = jax.device_get(self.table)
        draft = float(np.mean(table.first_draft[:, 0] + table.next_draft[:, 0]) / 2)
        batches, widths = ([int(value) for value in grid] for grid in (table.batches, table.widths))
        return fit_synergy(batches, widths, table.target[:, :, 0], draft, fit_power_law(self.rates))

    def roofline(self) -> RooflineModel:
        """Fits FLOP rate, bandwidth and time per layer to the target passes and the passes of a draft model."""
        flops, bandwidth, layer = fit_roofline(self._passes())
        return RooflineModel(self.target_shape, self.draft_shape or PassShape(), flops, bandwidth, layer, overlap=0.0)

    def fit_errors(self) -> dict[str, float]:
        """Returns the mean and the largest relative error of both fits over the measured target passes.

        The Synergy model is compared at the shortest context only, because it does not depend on the context.
        """
        passes = [one[1:] for one in self._passes() if one[0] is self.target_shape]
        shortest = [one for one in passes if one[2] == float(self.table.contexts[0])]
        errors = {}
        for name, model, compared in (("synergy", self.synergy(), shortest), ("roofline", self.roofline(), passes)):
            found = [abs(float(model.target_seconds(*where)) / seconds - 1) for *where, seconds in compared]
            errors |= {f"{name}_mean": float(np.mean(found)), f"{name}_max": max(found)}
        return errors

    def _passes(self) -> list[tuple[PassShape, float, float, float, float]]:
        """Returns shape, rows, tokens per row, context and seconds of the measured passes."""
        table, passes = jax.device_get(self.table), []
        for (i, j, k), seconds in np.ndenumerate(table.target):
            rows, width, context = float(table.batches[i]), float(table.widths[j]), float(table.contexts[k])
            passes.append((self.target_shape, rows, width, context, float(seconds)))
        if self.draft_shape is not None:
            for (i, k), seconds in np.ndenumerate(table.next_draft):
                if seconds > 0:
                    rows, context = float(table.batches[i]), float(table.contexts[k])
                    passes.append((self.draft_shape, rows, 1.0, context, float(seconds)))
        return passes

    def write(self, path: str | Path) -> None:
        """Writes the profile as JSON. A kill leaves the old file or the new one."""
        roofline = self.roofline()
        rates = ("flops_per_second", "bytes_per_second", "layer_seconds")
        record = {
            "version": VERSION,
            "about": self.about,
            "rates": list(self.rates),
            "table": _fields(self.table),
            "target_shape": self.target_shape._asdict(),
            "draft_shape": None if self.draft_shape is None else self.draft_shape._asdict(),
            # For readers of the file only: `read_profile` does not read the fits.
            "fitted": {
                "synergy": _fields(self.synergy()),
                "roofline": {name: getattr(roofline, name) for name in rates},
                "errors": self.fit_errors(),
            },
        }
        write_atomically(Path(path), json.dumps(record, indent=1) + "\n")


def _fields(model: TableModel | SynergyModel) -> dict[str, Any]:
    return {field.name: np.asarray(getattr(model, field.name)).tolist() for field in dataclasses.fields(model)}


def read_profile(path: str | Path) -> Profile:
    """Reads a file that `Profile.write` wrote.

    Raises:
        ValueError: if the file cannot be read or is not a profile.
    """
    try:
        record = read_json(Path(path))
    except ValueError as error:
        raise ValueError(f"profile {path}: cannot be read: {error}; bass-jax profile writes one") from None
    if record.get("version") != VERSION:
        raise ValueError(f"profile {path}: expected version {VERSION} of a profile; bass-jax profile writes one")
    try:
        table = TableModel(**{name: jnp.asarray(value, jnp.float32) for name, value in record["table"].items()})
        draft_shape = None if record["draft_shape"] is None else PassShape(**record["draft_shape"])
        target_shape = PassShape(**record["target_shape"])
        return Profile(record["about"], table, tuple(record["rates"]), target_shape, draft_shape)
    except (KeyError, TypeError) as error:
        raise ValueError(f"profile {path}: not a profile: {error}") from None
