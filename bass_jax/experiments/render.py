"""Writes a report as a self-contained HTML page, and as Markdown with figures in a folder."""

import itertools
import re
from pathlib import Path

from bass_jax.experiments.report import Report

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.35rem; margin-top: 3rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1.1rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; } .facts td { text-align: left; white-space: normal; }
th { border-bottom: 2px solid #999; font-weight: 600; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: 0.5rem 0.7rem; font-size: 0.78rem; white-space: pre-wrap; word-break: break-word; }
</style>
</head>
<body>
<h1>{{ report.title }}</h1>
{% for sections in report.runs %}{% for section in sections %}
{% if loop.first %}<h2>{{ section.title }}</h2>{% else %}<h3>{{ section.title }}</h3>{% endif %}
{% if section.warning %}<p><strong>{{ section.warning }}</strong></p>{% endif %}
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.figure %}
<figure role="img" aria-label="{{ section.title }}">{{ section.figure | with_unique_ids | safe }}</figure>
{% endif %}
{% if section.rows %}<div class="wide"><table{% if not section.header | select | list %} class="facts"{% endif %}>
{% if section.header | select | list %}
<thead><tr>{% for cell in section.header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
{% endif %}<tbody>
{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if section.command %}<pre>{{ section.command }}</pre>{% endif %}
{% endfor %}{% endfor %}
</body>
</html>
"""


def write_report(report: Report, output: str | Path) -> list[Path]:
    """Writes ``OUTPUT.html`` and ``OUTPUT.md``, and the figures of the Markdown into ``OUTPUT_figures``.

    A suffix ``.html`` or ``.md`` of `output` is removed. The paths of both files are returned.

    Raises:
        ValueError: if they cannot be written.
    """
    output = Path(output)
    output = output.with_suffix("") if output.suffix in (".html", ".md") else output
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        page, text = output.with_name(output.name + ".html"), output.with_name(output.name + ".md")
        page.write_text(_to_html(report), encoding="utf-8")
        text.write_text(_to_markdown(report, output), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{output}: cannot be written: {error.strerror}") from None
    return [page, text]


def _to_html(report: Report) -> str:
    import jinja2

    numbers = itertools.count()

    def with_unique_ids(figure: str) -> str:
        """Renames the ids of a figure, because matplotlib gives equal shapes of all figures the same id."""
        return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{next(numbers)}-", figure)

    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.filters["with_unique_ids"] = with_unique_ids
    return environment.from_string(_PAGE).render(report=report)


def _to_markdown(report: Report, output: Path) -> str:
    folder = output.with_name(output.name + "_figures")
    lines = [f"# {report.title}", ""]
    for number, sections in enumerate(report.runs):
        for index, section in enumerate(sections):
            lines += [f"{'##' if index == 0 else '###'} {section.title}", ""]
            if section.warning:
                lines += [f"**{section.warning}**", ""]
            if section.text:
                lines += [section.text, ""]
            if section.figure:
                folder.mkdir(parents=True, exist_ok=True)
                name = f"{section.name}.svg" if len(report.runs) == 1 else f"{number}_{section.name}.svg"
                (folder / name).write_text(section.figure + "\n", encoding="utf-8")
                lines += [f"![{section.title}]({folder.name}/{name})", ""]
            if section.rows:
                rows = [section.header, ("---",) * len(section.header), *section.rows]
                lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + [""]
            if section.command:
                lines += ["```", section.command, "```", ""]
    return "\n".join(lines).rstrip() + "\n"
