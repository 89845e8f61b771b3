"""The benchmark's machinery, on tiny shapes; its figures mean something on a GPU only."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import benchmark, reference
from kernels_pallas.arg_specs import ATTENTION_SPECS, SPREADS, AttentionSpec, LengthSpread, attention_arguments
from kernels_pallas.attention.cudnn import prefix_and_merge
from kernels_pallas.benchmark_plot import plot_crossover


def test_smoke_run_prints_a_table_and_one_json_line(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "LONGEST_RATIOS", (1, 2))
    benchmark.main(["--smoke"])
    *table, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert result["is_smoke"] and len(table) == 1 + len(result["records"])
    names = {record["name"] for record in result["records"]}
    assert names == {"xla", "cudnn", "triton ragged", "triton pad", "triton split", "triton"}
    for record in result["records"]:
        assert record["median_us"] > 0 and record["speedup_over_xla"] > 0
        assert record["op"] == "masked_acceptance" or record["name"] == "xla" or record["speedup_over_cudnn"] > 0
        assert record.get("error", 0.0) < 1e-5
        assert record.get("same_tokens", True)
    assert {record["lengths"] for record in result["records"] if "lengths" in record} == {
        "equal",
        "uniform",
        "one_long",
        "crossover",
    }


def test_needs_a_gpu_or_smoke(capsys):
    with pytest.raises(SystemExit):
        benchmark.main([])
    assert "--smoke" in capsys.readouterr().err


def test_every_spec_is_timed_with_what_can(monkeypatch):
    """CuDNN leaves out a window; on a GPU the named specs follow the sweep."""
    specs = [spec.reduced() for spec in ATTENTION_SPECS if spec.name in ("smollm2_135m_f32", "mistral_7b")]
    monkeypatch.setattr(benchmark, "ATTENTION_SPECS", specs)
    monkeypatch.setattr(benchmark, "time_attention", fake_timing)
    records = list(benchmark.sweep_specs(1.0, is_smoke=False))
    assert [record["spec"] for record in records] == [spec.name for spec in specs]
    runners = benchmark.attention_runners(specs[1], is_smoke=True)
    with pytest.raises(NotImplementedError, match="without a window"):
        runners["cudnn"](attention_arguments(specs[1]), None, None)


def fake_timing(spec, lengths, bandwidth, is_smoke):
    assert lengths.max() <= spec.capacity - spec.num_tokens
    yield {"spec": spec.name}


def test_spreads_have_one_mean():
    for spread in SPREADS:
        lengths = spread.lengths(16, 1000, 100_000)
        assert lengths.dtype == np.int32 and lengths.shape == (16,)
        assert abs(lengths.mean() - 1000) < 10
    assert lengths.max() == 8 * np.median(lengths)
    with pytest.raises(ValueError, match="'zipf'"):
        LengthSpread("zipf").lengths(1, 1, 1)


def test_cudnn_baseline_is_ragged_attention():
    """The merge, with XLA in cuDNN's place."""
    spec = AttentionSpec("baseline", 3, 4, 6, 2, 32, 40, "float32")
    arguments = attention_arguments(spec, lengths=np.array([1, 17, 36], np.int32))
    del arguments["num_queries"]
    expected = reference.ragged_attention(**arguments)
    k_cache, v_cache = (jnp.swapaxes(arguments[name], 1, 2) for name in ("k_cache", "v_cache"))
    out = prefix_and_merge(arguments["q"], k_cache, v_cache, arguments["lengths"], implementation="xla")
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_crossover_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("triton pad", "triton ragged")
    records = [
        {"name": name, "lengths": "crossover", "longest_over_mean": ratio, "median_us": 10.0 * ratio}
        for name in names
        for ratio in (1, 2)
    ]
    plot_crossover(records, str(tmp_path / "crossover.png"))
    assert (tmp_path / "crossover.png").stat().st_size > 1000
