"""The directive ``family-table``, which lists the model families and what was checked of each."""

import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

HEADER = ("``model_type``", "layout", "random models", "speculation", "edited configurations", "GGUF")


def family_rows() -> list[tuple[str, ...]]:
    """Returns a row per family, in the order of the registry. Imports no Sphinx, so that tests need none."""
    from bass_jax.checkpoint.gguf_architectures import ARCHITECTURES
    from bass_jax.models.families import FAMILIES
    from tests.models import cases, test_config_edits, test_families_speculate

    rows = []
    for name, family in FAMILIES.items():
        own = {case for case, config in cases.CONFIGS.items() if config["model_type"] == name}
        summary = inspect.getdoc(inspect.getmodule(family.read_config)).splitlines()[0]
        speculated, edited = (
            own & set(checked) for checked in (test_families_speculate.NAMES, test_config_edits.CASES)
        )
        has_gguf = any(name in (one.family, *one.others) for one in ARCHITECTURES.values())
        rows.append(
            (f"``{name}``", summary, f"{len(own)}", f"{len(speculated)}", f"{len(edited)}", "yes" if has_gguf else "")
        )
    return rows


def setup(app) -> dict[str, bool]:
    """Registers the directive."""
    from config_fields import ConfigFields

    class FamilyTable(ConfigFields):
        """``family-table:: bass_jax.models.families`` makes the table of the registry."""

        def run(self):
            """Returns the parsed table."""
            lines = [".. list-table::", "   :header-rows: 1", ""]
            for row in (HEADER, *family_rows()):
                lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
            return self.parse_text(lines)

    app.add_directive("family-table", FamilyTable)
    return {"parallel_read_safe": True}
