"""``bass-jax simulate``: replays other policies, batches and devices on a recorded run."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import add_all, argument, numbers
from bass_jax.cli.output import Output, cell
from bass_jax.runtime.names import expected_one_of

EXAMPLES = """examples:
  bass-jax simulate trace.jsonl --profile profile.json
  bass-jax simulate trace.jsonl --profile profile.json --policy auto --policy "bass_heuristic(limit=8)" --batch 4
  bass-jax simulate trace.jsonl --device h200 --pair checkpoints/quickstart --policy my_module:MyPolicy --random 1000
  bass-jax generate --file prompts.txt --trace trace.jsonl --exhaustive --draft-len 8      # records such a trace"""

DEFAULT_POLICIES = ("bass_heuristic", "batch_table", "auto", "bandit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("trace", "written by bass-jax generate --trace", type=Path),
        argument("--policy", "name, 'name(key=value)' or 'module:name'", []),
        argument("--fixed", "fixed lengths to compare with", "0,1,2,4,8", type=numbers),
        argument("--batch", "rows per batch", "1,2,4,8,16", type=numbers),
        argument("--random", "number of batches of random rows, instead of each row once", type=int),
        argument("--seed", "of the random rows", 0),
    )
    add_all(
        parser.add_argument_group("costs of steps: a measured profile, or a device's public figures"),
        argument("--profile", "written by bass-jax profile; auto and batch_table start from it", type=Path),
        argument("--device", "h200 or a100: the roofline of the pair's shapes"),
        argument("--pair", "for --device", "checkpoints/quickstart"),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Replays and prints; returns the exit code."""
    import time

    from bass_jax.analysis.replay import make_replay
    from bass_jax.analysis.simulator import compose, regret
    from bass_jax.cost_model import DEVICES
    from bass_jax.decoding.traces import read_trace
    from bass_jax.experiments.traffic.backends import make_policy
    from bass_jax.policies import Policy, fixed

    if options.batch[0] < 1:
        raise ValueError("--batch: expected at least 1")
    if options.device is None and options.profile is None:
        raise ValueError("expected --profile FILE (bass-jax profile writes one) or --device NAME")
    if options.device is not None and options.device not in DEVICES:
        raise ValueError(f"--device {options.device}: {expected_one_of(options.device, sorted(DEVICES))}")
    replay = make_replay(read_trace(options.trace), options.seed)
    cost, rates = _cost_and_rates(options, replay)
    policies: dict[str, Policy] = {f"fixed {length}": fixed(length) for length in options.fixed}
    names_of_fixed = list(policies)
    policies |= {name: make_policy(name, cost, rates, has_clock=False) for name in options.policy or DEFAULT_POLICIES}
    start, num_batches = time.perf_counter(), 0
    for batch in options.batch:
        rows = compose(len(replay.num_tokens), batch, options.random, options.seed)
        found = regret(replay, policies, cost, rows, range(options.fixed[-1] + 1))
        num_batches += len(found) * len(rows)
        rate = {name: one.tokens_per_second for name, (one, _) in found.items()}
        best = max(rate[name] for name in names_of_fixed)
        cells = [
            (
                name,
                cell(one.tokens_per_pass, ".3f"),
                cell(rate[name], ".1f"),
                cell(rate[name] / rate["fixed 0"] if "fixed 0" in rate else None, ".2f", "x"),
                cell(rate[name] / best, ".2f", "x"),
                cell(share, ".1%"),
            )
            for name, (one, share) in found.items()
        ]
        columns = ("policy", "tokens per target pass", "tokens/s", "over no drafts", "over best fixed", "regret")
        out.table(columns, cells, f"simulated: batch {batch}, {len(rows)} batches")
    out.note("oracle: in hindsight, for each batch the fastest of all policies and of one that knows what is accepted.")
    seconds = time.perf_counter() - start
    out.note(f"{num_batches} batches simulated in {seconds:.1f} s, compilation included.")
    if replay.share_unknown:
        out.note(
            f"At {replay.share_unknown:.1%} of the positions acceptance was not recorded and is sampled; --exhaustive "
            "records all."
        )
    return 0


def _cost_and_rates(options: argparse.Namespace, replay):
    """Returns the cost model of steps, and the acceptance by position that policies start from."""
    from bass_jax.analysis.replay import replay_acceptance
    from bass_jax.cost_model import DEVICES, PassShape, draft_pass_shape, pass_shape, read_profile, roofline
    from bass_jax.decoding.load_pair import load_pair
    from bass_jax.models import require_model

    if options.device is None:
        profile = read_profile(options.profile)
        return profile.table, profile.rates
    pair = load_pair(options.pair)
    draft = draft_pass_shape(pair.drafter) or PassShape()
    cost = roofline(pass_shape(require_model(pair.target, "a cost model").config), draft, DEVICES[options.device])
    return cost, replay_acceptance(replay)
