"""Signatures with docstrings from installed Python code, as prompts to complete."""

import ast
import functools
import importlib.util
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

_SECTION = re.compile(
    r"^\s*(:\w+|@\w+|\.\. |(Args|Arguments|Parameters|Params|Returns?|Raises|Yields|Notes?|References|Examples?|"
    r"See Also|Attributes|Usage|Warnings?)\s*:?\s*$)",
    re.IGNORECASE,
)
_TYPING = ("List", "Dict", "Tuple", "Optional", "Any", "Union", "Sequence", "Iterable", "Callable")
_MIN_WORDS = 5
_MAX_EXAMPLE_LINES = 6


def python_functions(packages: Sequence[str], max_chars: int) -> list[str]:
    """Collects documented functions and methods without importing the packages.

    Args:
        packages: import names, or ``"stdlib"``; packages that are not installed are skipped.
        max_chars: of signature and docstring together.

    Returns:
        Distinct prompts in the order of the files. Each ends with a line break after the docstring.
    """
    prompts: dict[str, str] = {}
    for package in packages:
        for prompt in _functions_of_package(package):
            if len(prompt) <= max_chars:
                # A function with the same docstring under another name is the same task.
                prompts.setdefault(prompt.split('"""', 1)[1], prompt)
    return list(prompts.values())


@functools.cache
def _functions_of_package(package: str) -> list[str]:
    return [prompt for path in _files(package) for prompt in _functions_of(path)]


def _files(package: str) -> Iterator[Path]:
    if package == "stdlib":
        roots = [Path(sysconfig.get_path("stdlib"))]
    else:
        spec = importlib.util.find_spec(package)
        roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if not any("test" in part or part in ("site-packages", "_vendor", "idlelib") for part in parts):
                yield path


def _functions_of(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            docstring = ast.get_docstring(node)
            if docstring and (text := _summarize_docstring(docstring)):
                yield documented_signature(node, text)


def documented_signature(node: ast.FunctionDef, docstring: str) -> str:
    """Writes a function's header and `docstring` in the style of coding benchmarks, without ``self`` or ``cls``."""
    arguments = node.args
    positional = arguments.posonlyargs + arguments.args
    if positional and positional[0].arg in ("self", "cls"):
        arguments = ast.arguments(
            posonlyargs=[],
            args=positional[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults[: len(positional) - 1],
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    header = f"def {node.name}({ast.unparse(arguments)}){returns}:"
    used = [name for name in _TYPING if re.search(rf"\b{name}\[", header)]
    imports = f"from typing import {', '.join(used)}\n\n\n" if used else ""
    body = "\n".join(f"    {line}".rstrip() for line in docstring.splitlines())
    return f'{imports}{header}\n    """{body.strip()}\n    """\n'


def _summarize_docstring(docstring: str) -> str | None:
    """Returns a docstring's description and its first doctests; None if the description is short."""
    lines = inspect.cleandoc(docstring).replace('"""', "'''").splitlines()
    description: list[str] = []
    for line in lines:
        if _SECTION.match(line) or line.lstrip().startswith((">>>", "---", "===")):
            break
        description.append(line)
    if description and lines[len(description) : len(description) + 1] and set(lines[len(description)]) <= set("-="):
        description.pop()  # An underlined title.
    while description and not description[-1].strip():
        description.pop()
    if len(" ".join(description).split()) < _MIN_WORDS:
        return None
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines))
    examples: list[str] = []
    for line in lines[start : start + _MAX_EXAMPLE_LINES]:
        if not line.strip():
            break
        examples.append(line.strip())
    return "\n".join(description + examples)
