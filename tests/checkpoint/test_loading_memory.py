"""Loading needs little memory in addition to the parameters. The benchmark measures it on a small checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ("float32 float32", "float32 bfloat16", "bfloat16 float32", "bfloat16 bfloat16 --converted")
"""Stored dtype, dtype to load as, and options of the benchmark."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_additional_memory_is_that_of_one_tensor(case):
    """This fails if a whole file is read, a copy outlives its tensor, or a whole checkpoint is cast at once."""
    stored, dtype, *ours = case.split()
    options = ["--gigabytes", "0.15" if ours else "0.3", "--stored", stored, "--dtype", dtype, "--repeats", "1", *ours]
    command = [sys.executable, str(ROOT / "benchmarks" / "loading.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    [run] = json.loads(result.stdout.splitlines()[-1])["runs"]
    assert run["kept_bytes"] > 5 * run["largest_bytes"]
    assert run["excess_bytes"] < 1.3 * run["largest_bytes"]
