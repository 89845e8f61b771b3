"""The directive ``config-fields``, which lists the keys of a configuration file."""

import inspect

from config_keys import rows, sections
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from bass_jax.runtime.imports import import_attribute


class ConfigFields(SphinxDirective):
    """``config-fields:: module:Class`` makes a section and a table for the file and each of its sections."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the parsed tables."""
        kind = import_attribute(self.arguments[0], "config-fields")
        result: list[nodes.Node] = []
        for path, section in sections(kind):
            title = f"``{path}``" if path else "Top level"
            summary = inspect.getdoc(section).partition("Attributes:\n")[0].strip().splitlines()
            lines = [".. rubric:: " + title, "", *summary, "", ".. list-table::", "   :header-rows: 1"]
            lines += ["   :widths: 20 20 15 45", "", "   * - key", "     - type", "     - default", "     - meaning"]
            for name, kind_text, default, meaning in rows(section):
                lines += [f"   * - ``{name}``", f"     - {kind_text}", f"     - {default}", f"     - {meaning}"]
            result += self.parse_text(lines)
        return result

    def parse_text(self, lines: list[str]) -> list[nodes.Node]:
        """Parses reStructuredText, of whichever format the page is."""
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, container)
        return container.children


def setup(app) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("config-fields", ConfigFields)
    return {"parallel_read_safe": True}
