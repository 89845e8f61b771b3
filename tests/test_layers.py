"""A module imports only from its own or a lower layer, without circles, and the package needs few libraries."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

LAYERS = (
    "kernels_pallas",
    "bass_jax.typing",
    "bass_jax.runtime",
    "bass_jax.config",
    "bass_jax.models",
    "bass_jax.sampling",
    "bass_jax.acceptance",
    "bass_jax.drafters",
    "bass_jax.checkpoint",
    "bass_jax.cost_model",
    "bass_jax.policies",
    "bass_jax.decoding",
    "bass_jax.engine",
    "bass_jax.integrations",
    "bass_jax.analysis",
    "bass_jax.testing",
    "bass_jax",
    "bass_jax.training",
    "bass_jax.experiments",
    "bass_jax.serving",
    "bass_jax.cli",
    "bass_jax.__main__",
)
"""From the lowest to the highest; `bass_jax` is its ``__init__.py``, the public names."""


def layer_of(module: str) -> int:
    """Returns the layer of the package or root file that `module` is or lies in."""
    name = module if module == "bass_jax" else ".".join(module.split(".")[: 1 if module.startswith("kernels") else 2])
    assert name in LAYERS, f"{module} is in no layer: add it to LAYERS"
    return LAYERS.index(name)


def modules() -> dict[str, Path]:
    """Returns all modules of both packages by name."""
    paths = [*ROOT.glob("bass_jax/**/*.py"), *ROOT.glob("kernels_pallas/**/*.py")]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imports(path: Path, known: dict[str, Path]):
    """Yields the modules of ours that a file imports, also inside functions, but not those for annotations alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in full]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("bass_jax", "kernels_pallas"))


def test_imports_go_down():
    known = modules()
    wrong = [
        f"{module} imports {name}"
        for module, path in known.items()
        for name in imports(path, known)
        if layer_of(name) > layer_of(module)
    ]
    assert not wrong


def test_imports_form_no_circle():
    """A package counts as one module with the names that it exports. Its files import each other by name."""
    known = modules()
    graph = {module: {name for name in imports(path, known) if name != module} for module, path in known.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_the_root_holds_four_files():
    names = {"__init__.py", "__main__.py", "typing.py", "config.py"}
    assert {path.name for path in (ROOT / "bass_jax").glob("*.py")} == names


def test_the_graph_of_packages_is_small():
    """Families and tasks are counted separately."""
    known = modules()
    nodes = {".".join(module.split(".")[:2]) for module in known if module.startswith("bass_jax")}
    nodes |= {"bass_jax.models.families", "bass_jax.experiments.tasks", "bass_jax.experiments.traffic"}
    nodes |= {".".join(module.split(".")[:2]) for module, path in known.items() if path.name == "__init__.py"}
    assert len(nodes) <= 28


def test_every_package_has_a_docstring():
    for module, path in modules().items():
        if path.name == "__init__.py" and module != "bass_jax":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert len(text.splitlines()) >= 3, f"{module}: say what it holds, what may import it, where to start"


def test_importing_the_package_needs_four_libraries():
    """Apart from jax, flax, numpy, jaxtyping and what these import, libraries are imported when they are needed."""
    code = """
import sys, jax, flax.linen, jaxtyping, numpy
before = {name.split(".")[0] for name in sys.modules}
import bass_jax
for name in bass_jax.__all__:
    getattr(bass_jax, name)
print(*{name.split(".")[0] for name in sys.modules} - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(found.stdout.split()) == {"bass_jax", "kernels_pallas"}


def test_help_does_not_import_jax():
    """It takes a tenth of a second instead of two. Neither does an error of the command line."""
    code = """
import sys
from bass_jax.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*{"jax", "numpy", "rich", "yaml"} & set(sys.modules), file=sys.stderr)
"""
    for arguments, expected in ((["--help"], 0), (["generate", "--help"], 0), (["genrate"], 2)):
        command = [sys.executable, "-c", code, *arguments]
        found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert found.returncode == expected
        assert found.stderr.splitlines()[-1] == "", arguments
