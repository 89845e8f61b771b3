"""The benchmark on tiny shapes, without regard to the times."""

import json

import numpy as np
import pytest

from benchmarks.kernels_cudnn import cudnn_baseline
from kernels_pallas import benchmark, reference
from kernels_pallas.arg_specs import ATTENTION_SPECS, SPREADS, AttentionSpec, attention_arguments, spread_lengths


@pytest.mark.slow
def test_smoke_run_prints_a_table_and_one_json_line(capsys, monkeypatch):
    """With cuDNN's baseline, which a smoke run computes with XLA."""
    monkeypatch.setitem(benchmark.BASELINES, "cudnn", cudnn_baseline)
    monkeypatch.setattr(benchmark, "LONGEST_RATIOS", (1, 2))
    benchmark.main(["--smoke"])
    *table, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert result["is_smoke"] and len(table) == 1 + len(result["records"])
    names = {record["name"] for record in result["records"]}
    assert names == {"xla", "cudnn", "triton ragged", "triton pad", "triton split", "triton"}
    for record in result["records"]:
        assert record["median_us"] > 0 and record["speedup_over_xla"] > 0
        assert record["op"] != "ragged_attention" or record["name"] == "xla" or record["speedup_over_cudnn"] > 0
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


def test_every_spec_is_timed(monkeypatch):
    """On a GPU the named specs follow the sweep."""
    specs = [spec.reduced() for spec in ATTENTION_SPECS if spec.name in ("smollm2_135m_f32", "mistral_7b")]
    monkeypatch.setattr(benchmark, "ATTENTION_SPECS", specs)
    monkeypatch.setattr(benchmark, "time_attention", fake_timing)
    records = list(benchmark.sweep_specs(1.0, is_smoke=False))
    assert [record["spec"] for record in records] == [spec.name for spec in specs]


def fake_timing(spec, lengths, bandwidth, is_smoke):
    assert lengths.max() <= spec.capacity - spec.num_tokens
    yield {"spec": spec.name}


def test_spreads_have_the_same_mean():
    for spread in SPREADS:
        lengths = spread_lengths(spread, 16, 1000, 100_000)
        assert lengths.dtype == np.int32 and lengths.shape == (16,)
        assert abs(lengths.mean() - 1000) < 10
    assert lengths.max() == 8 * np.median(lengths)
    with pytest.raises(ValueError, match="'zipf'"):
        spread_lengths("zipf", 1, 1, 1)


def test_cudnn_baseline_equals_ragged_attention():
    """With XLA in cuDNN's place, which needs a GPU."""
    spec = AttentionSpec("baseline", 3, 4, 6, 2, 32, 40, "float32")
    arguments = attention_arguments(spec, lengths=np.array([1, 17, 36], np.int32))
    del arguments["num_queries"]
    expected = reference.ragged_attention(**arguments)
    function, operands = cudnn_baseline(spec, arguments, is_smoke=True)
    np.testing.assert_allclose(function(*operands), expected, atol=2e-6)


@pytest.mark.parametrize("name", ["mistral_7b", "llama3_8b_int8", "gemma2_2b", "llama3_8b_paged"])
def test_cudnn_baseline_refuses_what_it_does_not_support(name):
    spec = next(spec for spec in ATTENTION_SPECS if spec.name == name)
    with pytest.raises(NotImplementedError, match="without a window"):
        cudnn_baseline(spec, {}, is_smoke=True)


def test_crossover_is_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("triton pad", "triton ragged")
    records = [
        {"name": name, "lengths": "crossover", "longest_over_mean": ratio, "median_us": 10.0 * ratio}
        for name in names
        for ratio in (1, 2)
    ]
    benchmark.plot_crossover(records, str(tmp_path / "crossover.png"))
    assert (tmp_path / "crossover.png").stat().st_size > 1000
