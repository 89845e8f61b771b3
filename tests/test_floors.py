"""A file imports only from its own floor or lower ones, and the package needs few libraries."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = (
    ("kernels_pallas",),
    (
        "bass_jax.typing",
        "bass_jax.config",
        "bass_jax.executables",
        "bass_jax.references",
        "bass_jax.settings",
        "bass_jax.startup",
    ),
    ("bass_jax.cache",),
    ("bass_jax.models",),
    ("bass_jax.checkpoint",),
    ("bass_jax.sampling",),
    ("bass_jax.drafters",),
    (
        "bass_jax.chains",
        "bass_jax.judge",
        "bass_jax.lockstep",
        "bass_jax.pair",
        "bass_jax.prefill",
        "bass_jax.records",
        "bass_jax.state",
        "bass_jax.step",
        "bass_jax.survey",
        "bass_jax.window",
    ),
    ("bass_jax.costmodel", "bass_jax.policies"),
    (
        "bass_jax.metrics",
        "bass_jax.replay",
        "bass_jax.simulator",
        "bass_jax.stops",
        "bass_jax.traces",
        "bass_jax.utilisation",
    ),
    (
        "bass_jax.bench",
        "bass_jax.compiled_steps",
        "bass_jax.enumeration",
        "bass_jax.fidelity",
        "bass_jax.generate",
        "bass_jax.profiler",
        "bass_jax.serving",
        "bass_jax.verify",
        "bass_jax.warmup",
    ),
    ("bass_jax",),
    ("bass_jax.training", "bass_jax.experiments", "bass_jax.traffic"),
    ("bass_jax.cli", "bass_jax.commands", "bass_jax.__main__"),
)


def floor_of(module: str) -> int:
    """The floor of the longest listed name that `module` is or lies in; `bass_jax` itself is the public surface."""
    found = [(len(name), i) for i, names in enumerate(FLOORS) for name in names
             if module == name or (module.startswith(name + ".") and name != "bass_jax")]  # fmt: skip
    assert found, f"{module} is on no floor: add it to FLOORS"
    return max(found)[1]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path):
    """Modules of ours that a file imports, also inside functions; imports for annotations alone do not count."""
    tree = ast.parse(path.read_text())
    typing_only = {id(child) for node in ast.walk(tree) if isinstance(node, ast.If)
                   and "TYPE_CHECKING" in ast.unparse(node.test) for child in ast.walk(node)}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if is_module(full) else node.module


def test_imports_go_down():
    wrong = []
    for path in [*ROOT.glob("bass_jax/**/*.py"), *ROOT.glob("kernels_pallas/**/*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in imports(path):
            if name.split(".")[0] in ("bass_jax", "kernels_pallas") and floor_of(name) > floor_of(module):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_importing_the_package_needs_four_libraries():
    """What jax, flax, numpy and jaxtyping import themselves, and ours: heavier libraries wait until they are needed."""
    code = """
import sys, jax, flax.linen, jaxtyping, numpy
before = {name.split(".")[0] for name in sys.modules}
import bass_jax
print(*{name.split(".")[0] for name in sys.modules} - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(found.stdout.split()) == {"bass_jax", "kernels_pallas"}
