"""The simulated executor agrees with the decoder, and with results worked out by hand."""

import dataclasses

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.analysis.simulator import compose, simulate
from bass_jax.config import BATCH_BUCKETS
from bass_jax.cost_model import fit_power_law, power_law_rates
from bass_jax.decoding.traces import TraceWriter, read_trace
from bass_jax.engine import EngineConfig
from bass_jax.experiments.traffic.backends import simulate_traffic
from bass_jax.experiments.traffic.serving_costs import NUM_CONTEXTS, ServingCosts, size_changes
from bass_jax.experiments.traffic.simulated_executor import constant_plan
from bass_jax.experiments.traffic.workload import Workload, sample_acceptable
from tests import tiny
from tests.cost_model.profiles import made_up
from tests.marks import mostly_slow

TABLE = made_up(0.12).table
CONFIG = EngineConfig(num_slots=4, capacity=64, chunk=16, buckets=(4,))
FREE = ServingCosts(TABLE, np.zeros(NUM_CONTEXTS), 0.0, dict.fromkeys(size_changes(BATCH_BUCKETS), 0.0), 0.0)


def requests(num: int, num_tokens: int = 20, **times) -> Workload:
    """Requests with one prompt token whose drafts are all rejected."""
    ones = np.ones(num, int)
    at = np.zeros(num) if "times" not in times else np.asarray(times["times"], float)
    return Workload(at, ones, num_tokens * ones, num_tokens * ones, [np.zeros(num_tokens, int)] * num)


def test_one_request_takes_the_time_of_its_steps():
    outcome = simulate_traffic(requests(1), CONFIG, policies.fixed(2), FREE)
    (handle,) = outcome.handles
    step = float(TABLE.target_seconds(4, 3, 10) + TABLE.draft_seconds(4, 2, 10, 0))
    last = float(TABLE.target_seconds(4, 3, 10) + TABLE.draft_seconds(4, 1, 10, 0))
    none = float(TABLE.target_seconds(4, 3, 10))
    # The limit leaves room for two drafts, then for one, then for none.
    assert handle.times.finished == pytest.approx(18 * step + last + none, rel=1e-5)
    assert handle.times.first == pytest.approx(step, rel=1e-5)
    assert outcome.counts.num_steps == handle.num_tokens == 20


def test_chunks_inserts_size_changes_and_the_host_take_time():
    config = dataclasses.replace(CONFIG, buckets=(1, 4))
    moves = dict.fromkeys(size_changes((1, 4)), 0.3)
    costs = ServingCosts(TABLE, np.full(NUM_CONTEXTS, 0.5), 0.25, moves, 0.1)
    workload = requests(2, 5)._replace(prompt_tokens=np.array([18, 1]))
    outcome = simulate_traffic(workload, config, policies.fixed(0), costs)
    first, second = outcome.handles
    # 17 tokens are two chunks. The second request needs none, and the batch grows for it before the first step.
    step = float(TABLE.target_seconds(4, 1, 20))
    assert first.times.first == pytest.approx(2 * 0.5 + 0.3 + 2 * 0.25 + step + 0.1, rel=1e-4)
    assert second.times.finished == pytest.approx(first.times.first + 4 * (step + 0.1), rel=1e-4)
    assert outcome.counts.num_regroups == 2  # it grows once, and shrinks when the first request has ended


def test_a_static_batch_waits_for_its_longest_request():
    workload = requests(3)._replace(new_tokens=np.array([5, 20, 5]), limits=np.array([5, 20, 5]))
    workload = workload._replace(times=np.array([0.0, 0.0, 1e-4]))
    finished = {}
    for batching in ("static", "continuous"):
        config = dataclasses.replace(CONFIG, batching=batching)
        finished[batching] = [
            one.times.finished for one in simulate_traffic(workload, config, policies.fixed(0), FREE).handles
        ]
    step = float(TABLE.target_seconds(4, 1, 10))
    np.testing.assert_allclose(finished["static"], [5 * step, 20 * step, 25 * step], rtol=1e-4)
    np.testing.assert_allclose(finished["continuous"], [5 * step, 20 * step, 6 * step], rtol=1e-4)


POLICIES = (
    "fixed(draft_len=3)",
    "bass_heuristic(start=3, limit=4)",
    "batch_table",
    "bass_jax.policies.template:OneMore(max_len=4)",
)


@pytest.mark.parametrize("name", mostly_slow(POLICIES, lambda name: name == POLICIES[0]))
def test_requests_that_arrive_together_have_the_counts_of_a_replay(name, tmp_path):
    """`bass_jax.analysis.simulator.simulate` has the counts of the decoder."""
    target = tiny.model(1, num_layers=1)
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2)))
    with TraceWriter(tmp_path / "trace.jsonl") as trace:
        bass.generate(
            pair, tiny.PROMPTS, bass.SpecConfig(8), max_new_tokens=[40, 31, 35], step="exhaustive", trace=trace
        )
    replay = bass.analysis.make_replay(read_trace(tmp_path / "trace.jsonl"))
    given = {"cost": TABLE, "rates": (0.6, 0.5)} if name == "batch_table" else {}
    policy = policies.find_policy(name, **given)
    expected = simulate(replay, policy, TABLE, compose(3, 3))
    acceptable = [replay.acceptable[row, :num] for row, num in enumerate(replay.num_tokens)]
    workload = Workload(np.zeros(3), replay.prompt_lengths, replay.num_tokens, replay.limits, acceptable)
    # With static batching all three run from the first step on.
    config = dataclasses.replace(CONFIG, batching="static")
    counts = simulate_traffic(workload, config, policy, FREE).counts
    assert counts.num_emitted == expected.num_emitted
    assert (counts.num_steps, counts.num_row_steps) == (int(expected.num_steps[0]), expected.num_row_steps)
    assert (counts.num_drafted, counts.num_accepted) == (expected.num_drafted, expected.num_accepted)


def test_sampled_acceptance_follows_the_power_law():
    rates = power_law_rates(0.9, 0.548, 8)
    assert fit_power_law(rates) == pytest.approx((0.9, 0.548), rel=1e-6)
    acceptable = np.concatenate(sample_acceptable(rates, np.full(400, 100), seed=0))
    for num_drafts in (1, 2, 4, 8):
        mean = np.minimum(acceptable, num_drafts).mean()
        assert mean == pytest.approx(0.9 * num_drafts**0.548, rel=0.02)  # 40,000 draws
    with pytest.raises(ValueError, match=r"c=1\.5"):
        power_law_rates(1.5, 0.5, 4)


def test_constant_plans_are_recognized():
    """The plan of a policy that depends on the steps is not constant."""
    assert constant_plan(policies.fixed(3), 4) == 3
    table = policies.batch_table({1: 6, 8: 2})
    assert [constant_plan(table, size) for size in (1, 4, 8, 16)] == [6, 6, 2, 2]
    for policy in (
        policies.bass_heuristic(),
        policies.auto(cost=TABLE, rates=(0.5,)),
        policies.bandit(),
        policies.confidence(),
        policies.find_policy("bass_jax.policies.template:OneMore"),
        OnLengths(),
    ):
        assert constant_plan(policy, 4) is None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnLengths:
    """A policy without state whose plan depends on the rows' lengths."""

    lengths = (0, 1)

    def init(self, num_rows):
        return None

    def update(self, state, stats):
        return state, policies.Plan(stats.lengths % 2)


def test_policies_that_depend_on_confidence_are_refused():
    with pytest.raises(ValueError, match="not simulated"):
        simulate_traffic(requests(1), CONFIG, policies.confidence(), FREE)


def test_acceptance_does_not_depend_on_the_engine():
    """The counts of requests do not depend on the batch size."""
    lengths = np.full(30, 25)
    acceptable = sample_acceptable((0.8, 0.7), lengths, seed=2)
    workload = Workload(np.linspace(0, 0.05, 30), lengths, lengths, lengths, acceptable)
    configs = [dataclasses.replace(CONFIG, num_slots=num, buckets=None) for num in (1, 4, 16)]
    counts = [simulate_traffic(workload, config, policies.fixed(3), FREE).counts for config in configs]
    assert len({(one.num_row_steps, one.num_drafted, one.num_accepted, one.num_emitted) for one in counts}) == 1
