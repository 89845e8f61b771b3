"""The example of GRPO with speculative rollouts runs, at its smallest size."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="needs google-tunix, the extra 'tunix'")
def test_grpo_runs_with_each_kind_of_rollouts(monkeypatch):
    """The policy of the first round is the frozen draft model, so nearly all of its drafts are accepted there."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("rl_rollouts")
    results = {method: example.run(method, 3, num_layers=1, limit=10, batch=2) for method in example.METHODS}
    for result in results.values():
        assert all(len(values) == 3 for values in result.values())
        assert all(0 <= reward <= 1 for reward in result["reward"])
    assert results["tunix"]["per_pass"] == [1, 1, 1]
    assert results["frozen"]["per_pass"][0] > 3
    sys.modules.pop("rl_rollouts")
