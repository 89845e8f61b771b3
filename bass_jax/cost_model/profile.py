"""A profile: what was measured of a pair on a device, and what was fitted to it; one JSON file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bass_jax.cost_model.acceptance_curve import fit_power_distribution
from bass_jax.cost_model.pass_shape import PassShape
from bass_jax.cost_model.roofline import RooflineModel, fit_roofline
from bass_jax.cost_model.synergy import SynergyModel, fit_synergy
from bass_jax.cost_model.table import TableModel

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measurements of one pair.

    Attributes:
        about: device, date, pair, versions: for people.
        table: the measured times.
        rates: acceptance by position on real prompts, each given that the drafts before it were accepted.
        target_shape: of the target's passes.
        draft_shape: of the draft's passes; None for a drafter that is no model.
    """

    about: dict[str, Any]
    table: TableModel
    rates: tuple[float, ...]
    target_shape: PassShape
    draft_shape: PassShape | None

    def synergy(self, context: float | None = None) -> SynergyModel:
        """Fits the model of Su et al. at one context, by default the shortest that was measured."""
        table = self.table
        contexts = np.asarray(table.contexts)
        k = 0 if context is None else int(np.abs(contexts - context).argmin())
        draft = float(np.mean((np.asarray(table.first_draft) + np.asarray(table.next_draft))[:, k]) / 2)
        batches, widths = ([int(value) for value in np.asarray(grid)] for grid in (table.batches, table.widths))
        return fit_synergy(
            batches, widths, np.asarray(table.target)[:, :, k], draft, fit_power_distribution(self.rates)
        )

    def roofline(self) -> RooflineModel:
        """Fits FLOP rate, bandwidth and time per layer to all target passes and, of a model, the drafts."""
        shapes, rows, tokens, contexts, seconds = zip(*self._passes(), strict=True)
        flops, bandwidth, layer = fit_roofline(shapes, rows, tokens, contexts, seconds)
        draft = self.draft_shape or PassShape(0.0, 0.0, 0.0, 0.0, 0.0)
        return RooflineModel(self.target_shape, draft, flops, bandwidth, layer, overlap=0.0)

    def fit_errors(self) -> dict[str, float]:
        """Mean and largest relative error of both fits over the measured target passes."""
        synergy, roofline = self.synergy(), self.roofline()
        shortest = float(np.asarray(self.table.contexts)[0])
        errors: dict[str, list[float]] = {"synergy": [], "roofline": []}
        for shape, rows, tokens, context, seconds in self._passes():
            if shape is self.target_shape:
                errors["roofline"].append(abs(float(roofline.target_seconds(rows, tokens, context)) / seconds - 1))
                if context == shortest:
                    errors["synergy"].append(abs(float(synergy.target_seconds(rows, tokens, context)) / seconds - 1))
        return {
            f"{name}_{kind}": float(reduce(values))
            for name, values in errors.items()
            for kind, reduce in (("mean", np.mean), ("max", np.max))
        }

    def _passes(self) -> list[tuple[PassShape, float, float, float, float]]:
        table, found = self.table, []
        for i, rows in enumerate(np.asarray(table.batches)):
            for k, context in enumerate(np.asarray(table.contexts)):
                for j, width in enumerate(np.asarray(table.widths)):
                    seconds = float(np.asarray(table.target)[i, j, k])
                    found.append((self.target_shape, float(rows), float(width), float(context), seconds))
                if self.draft_shape is not None and (seconds := float(np.asarray(table.next_draft)[i, k])) > 0:
                    found.append((self.draft_shape, float(rows), 1.0, float(context), seconds))
        return found

    def write(self, path: str | Path) -> None:
        """Writes the file, at once or not at all."""
        record = {
            "version": VERSION,
            "about": self.about,
            "rates": list(self.rates),
            "table": {field.name: np.asarray(getattr(self.table, field.name)).tolist()
                      for field in dataclasses.fields(self.table)},
            "target_shape": self.target_shape._asdict(),
            "draft_shape": None if self.draft_shape is None else self.draft_shape._asdict(),
            "fitted": self._fitted(),
        }  # fmt: skip
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    def _fitted(self) -> dict[str, Any]:
        """The fits, for readers of the file; they are made anew from the table when it is read."""
        synergy, roofline = self.synergy(), self.roofline()
        return {
            "synergy": {"alphas": np.asarray(synergy.alphas).tolist(), "beta": synergy.beta, "draft": synergy.draft,
                        "c": synergy.c, "gamma": synergy.gamma},
            "roofline": {"flops_per_second": roofline.flops_per_second, "bytes_per_second": roofline.bytes_per_second,
                         "layer_seconds": roofline.layer_seconds},
            "errors": self.fit_errors(),
        }  # fmt: skip


def read_profile(path: str | Path) -> Profile:
    """Reads what `Profile.write` wrote.

    Raises:
        ValueError: if the file cannot be read, or is no profile.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"profile {path}: cannot be read: {error}; bass-jax profile writes one") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ValueError(f"profile {path}: expected version {VERSION} of a profile; bass-jax profile writes one")
    try:
        table = TableModel(**{name: jnp.asarray(value, jnp.float32) for name, value in record["table"].items()})
        draft_shape = None if record["draft_shape"] is None else PassShape(**record["draft_shape"])
        target_shape = PassShape(**record["target_shape"])
        return Profile(record["about"], table, tuple(record["rates"]), target_shape, draft_shape)
    except (KeyError, TypeError) as error:
        raise ValueError(f"profile {path}: not a profile: {error}") from None
