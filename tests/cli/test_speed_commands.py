"""Bench, warm-up and quantization-error from the command line, and the start of a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bass_jax.analysis import profiler
from bass_jax.cli.main import main
from bass_jax.runtime.jit_cache import JIT_CACHE
from tests.cli.test_commands import fails, pair  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benched(pair, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "SECONDS_PER_CELL", 0.0)
        command = [
            "bench",
            pair,
            "--acceptance",
            "0.9,0.5",
            "--batches",
            "1",
            "--draft-lens",
            "0,2",
            "--contexts",
            "20",
        ]
        command += ["--contexts", "20", "--output", str(folder / "bench.json"), "--plot", str(folder / "bench.png")]
        code = main([*command, "--profile", str(folder / "traces")])
    assert code == 0
    return folder, json.loads((folder / "bench.json").read_text())


def test_bench_writes_every_cell(benched):
    folder, record = benched
    assert [(cell["batch"], cell["draft_len"], cell["context"]) for cell in record["cells"]] == [(1, 0, 20), (1, 2, 20)]
    assert record["is_acceptance_synthetic"] and not record["are_weights_random"]
    regular, speculative = record["cells"]
    # 1 + 0.9 + 0.9 * 0.5 tokens follow from the rates.
    assert (regular["tokens"], speculative["tokens"]) == (1.0, pytest.approx(2.35))
    for cell in record["cells"]:
        assert cell["seconds"] > cell["roofline_seconds"] > 0
        assert cell["bandwidth_share"] == pytest.approx(
            cell["num_bytes"] / cell["seconds"] / record["measured_bandwidth"]
        )
        assert cell["planned_bytes"] > cell["num_bytes"] / 3
        assert cell["num_launches"] is None  # Counted on a GPU only.
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (folder / "traces").iterdir()} == {
        "batch1_drafts0_context20",
        "batch1_drafts2_context20",
    }
    assert list((folder / "traces").rglob("*.xplane.pb"))


def test_a_step_reads_weights_once_per_pass_and_the_rows_caches(benched):
    """Counted by hand for the models of the fixture: float32, width 16, 4 heads of 4, MLP 32, tied embeddings."""
    _, record = benched
    layer, head, cache = 4 * 16 * 16 + 3 * 16 * 32, 16 * 264, 2 * 16
    target, draft = 4 * (2 * layer + head), 4 * (layer + head)
    regular, speculative = record["cells"]
    assert regular["num_bytes"] == target + 20 * 4 * 2 * cache
    assert speculative["num_bytes"] == regular["num_bytes"] + 2 * (draft + 20 * 4 * cache)


def test_bench_names_missing_arguments(capsys):
    error = fails(capsys, "bench", "gpt2", "--draft", "ngram", "--prompts", "configs/demo_prompts.txt")
    assert "gpt2 has random weights; expected --acceptance" in error
    assert "expected --acceptance or --prompts" in fails(capsys, "bench", "gpt2")
    assert "expected probabilities" in fails(capsys, "bench", "gpt2", "--draft", "ngram", "--acceptance", "1.5")


@pytest.mark.slow
def test_quantization_error_of_int8(pair, tmp_path, capsys):  # noqa: F811
    prompts, output = tmp_path / "prompts.txt", tmp_path / "error.json"
    prompts.write_text("one\nthe other\n")
    options = ["--prompts", str(prompts), "--max-new-tokens", "8", "--draft-len", "2", "--output", str(output)]
    assert main(["quantization-error", pair, "--quantize", "int8", *options]) == 0
    record = json.loads(output.read_text())
    assert record["num_tokens"] > 16 and 0 < record["mean_kl"] < record["quantile_kl"] <= record["max_kl"]
    assert 0.5 < record["agreement"] <= 1
    assert all(1 <= value <= 3 for value in record["tokens_per_pass"])
    assert 0 < abs(record["overlaps"][0] - record["overlaps"][1]) < 0.05 < min(record["overlaps"])
    assert 0 < abs(record["efficiency_change"]) < 0.1
    assert "nats on average" in capsys.readouterr().out
    assert "nothing else differs" in fails(capsys, "quantization-error", pair, *options)


SHAPE = ("--draft-len", "2", "--draft", "ngram")


def test_warm_up_compiles_what_generate_needs(pair, capsys):  # noqa: F811
    assert main(["warm-up", pair, "--batches", "1", "--capacities", "64", *SHAPE]) == 0
    assert "batch 1, capacity 64" in capsys.readouterr().out
    before = JIT_CACHE.num_compiled
    assert main(["generate", "one", "--pair", pair, "--max-new-tokens", "8", "--quiet", *SHAPE]) == 0
    assert JIT_CACHE.num_compiled == before


@pytest.mark.slow
def test_a_second_start_compiles_nothing(pair, tmp_path):  # noqa: F811
    """`warm-up` fills the cache; another process then finds every executable in it, and adds none."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true", "XLA_FLAGS": "", "JAX_LOG_COMPILES": "0"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "bass_jax.cli.main", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def entries() -> set[str]:
        return {path.name for path in (tmp_path / "bass_jax").rglob("*-cache")}

    printed = run("warm-up", pair, "--batches", "1", "--capacities", "64", *SHAPE)
    assert f"cache: {tmp_path}/bass_jax/xla-" in printed
    warmed = entries()
    assert warmed
    run("generate", "one", "--pair", pair, "--max-new-tokens", "8", "--quiet", *SHAPE)
    assert entries() == warmed, entries() - warmed


CONFIGURE = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_gpu_graph_min_graph_size=7"
import bass_jax as bass
done = bass.runtime.configure_gpu(memory_fraction=0.9, cache=sys.argv[1])
assert "--xla_gpu_graph_min_graph_size=7" in os.environ["XLA_FLAGS"].split()  # The user's value is kept.
assert os.environ["XLA_FLAGS"].count("xla_gpu_enable_command_buffer=") == 1
assert done["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9" and "xla_gpu_graph_min_graph_size" not in done
assert done["jax_compilation_cache_dir"].startswith(sys.argv[1])
import jax
jax.numpy.zeros(1)
try:
    bass.runtime.configure_gpu()
except ValueError as error:
    print(error)
"""


def test_configure_gpu_sets_flags_before_a_device_is_used(tmp_path):
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    command = [sys.executable, "-c", CONFIGURE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a device is in use already" in done.stdout
