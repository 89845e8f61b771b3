"""Utilization, compared with sums by hand for the example of `tests/decoding/test_metrics.py`."""

import pytest

from bass_jax.analysis.utilization import measure_utilization
from bass_jax.cost_model import Device, PassShape
from tests.decoding.test_metrics import infos

TARGET = PassShape(weight_bytes=1000.0, cache_bytes=10.0, flops=100.0, attention_flops=1.0, num_layers=2.0)
DRAFT = PassShape(weight_bytes=50.0, cache_bytes=1.0, flops=5.0, attention_flops=0.0, num_layers=1.0)
DEVICE = Device("made up", peak_flops=1000.0, bandwidth=1.0)
PROMPTS = [4, 2, 8]


def test_sums_by_hand():
    """Lengths of the rows per step: 4 7 9; 2 3 -; 8 10 11; the padding row has 1. Widths: 3, 5, 2. Drafts: 2, 4, 1."""
    found = measure_utilization(infos(), 2.0, PROMPTS, DEVICE, TARGET, DRAFT)
    useful = (3 * 104 + 1 * 102 + 2 * 108) + (2 * 107 + 2 * 103 + 1 * 110) + (1 * 109 + 2 * 111)
    verified = (3 * 104 + 3 * 102 + 2 * 108) + (5 * 107 + 4 * 103 + 1 * 110) + (2 * 109 + 2 * 111)
    drafted = 5 * 14
    assert found.useful == pytest.approx(useful / 2000)
    assert found.verified == pytest.approx(verified / 2000)
    assert found.verified_and_draft == pytest.approx((verified + drafted) / 2000)
    target = 3 * (104 + 102 + 108 + 101) + 5 * (107 + 103 + 110 + 101) + 2 * (109 + 105 + 111 + 101)
    draft = (3 + 5 + 2) * 4 * 5
    assert found.flops_per_token == pytest.approx((target + draft) / 14)
    rows = [4 + 2 + 8 + 1, 7 + 3 + 10 + 1, 9 + 5 + 11 + 1]
    read = sum(1000 + 10 * held for held in rows)
    read += sum(num * (50 + held) for num, held in zip((2, 4, 1), rows, strict=True))
    assert found.bytes_per_token == pytest.approx(read / 14)


def test_without_a_draft_model():
    found = measure_utilization(infos(), 2.0, PROMPTS, DEVICE, TARGET)
    assert found.verified_and_draft == found.verified > found.useful > 0


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="seconds=0"):
        measure_utilization(infos(), 0.0, PROMPTS, DEVICE, TARGET)
    with pytest.raises(ValueError, match="prompt_lengths has 5 values"):
        measure_utilization(infos(), 1.0, [1] * 5, DEVICE, TARGET)
