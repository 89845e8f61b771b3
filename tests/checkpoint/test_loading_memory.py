"""Loading takes little memory beside what it keeps: the benchmark's own measure, on a small checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has")
@pytest.mark.parametrize(
    "case", ["float32 float32", "float32 bfloat16", "bfloat16 float32", "bfloat16 bfloat16 --converted"]
)
def test_memory_beside_the_parameters_is_one_tensors(case):
    """Broken by reading a whole file, by a copy that outlives its tensor, by casting a whole checkpoint.

    Of ours, also by storing a tensor in one piece, or by reading several at a time.
    """
    stored, dtype, *ours = case.split()
    options = ["--gigabytes", "0.15" if ours else "0.3", "--stored", stored, "--dtype", dtype, "--repeats", "1", *ours]
    command = [sys.executable, str(ROOT / "benchmarks" / "loading.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    [run] = json.loads(result.stdout.splitlines()[-1])["runs"]
    assert run["kept_bytes"] > 5 * run["largest_bytes"]
    assert run["excess_bytes"] < 1.3 * run["largest_bytes"]
