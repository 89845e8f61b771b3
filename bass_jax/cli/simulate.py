"""``bass-jax simulate``: what other policies, batches and devices would have made of a recorded run."""

import argparse
from pathlib import Path

from bass_jax.cli.profile import parse_numbers

EXAMPLES = """examples:
  bass-jax simulate trace.jsonl --profile profile.json
  bass-jax simulate trace.jsonl --profile profile.json --policy goodput --policy "bass_heuristic(limit=8)" --batch 4
  bass-jax simulate trace.jsonl --device h200 --pair checkpoints/quickstart --policy my_module:MyPolicy --random 1000
  bass-jax generate --file prompts.txt --trace trace.jsonl --exhaustive --draft-len 8      # records such a trace"""

DEFAULT_POLICIES = ("bass_heuristic", "batch_table", "goodput", "bandit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("trace", type=Path, help="of bass-jax generate --trace")
    parser.add_argument("--policy", action="append", help="name, 'name(key=value)' or 'module:name'; may be repeated")
    parser.add_argument("--fixed", default="0,1,2,4,8", help="fixed lengths to compare with (default: %(default)s)")
    parser.add_argument("--batch", default="1,2,4,8,16", help="rows per batch (default: %(default)s)")
    parser.add_argument("--random", type=int, help="so many batches of rows drawn at random, not each once")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    cost = parser.add_argument_group("what steps cost: a measured profile, or a device's public figures")
    cost.add_argument("--profile", type=Path, help="of bass-jax profile; goodput and batch_table start from it")
    cost.add_argument("--device", help="h200 or a100: roofline of the pair's shapes, a simulation")
    cost.add_argument("--pair", default="checkpoints/quickstart", help="for --device (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Replays and prints; returns the exit code."""
    import time

    from rich.table import Table

    from bass_jax.analysis.replay import make_replay
    from bass_jax.analysis.simulator import compose, regret
    from bass_jax.cli.output import output_console
    from bass_jax.decoding.traces import read_trace
    from bass_jax.policies import Policy, find_policy, fixed

    batches = parse_numbers(options.batch, "--batch")
    lengths = parse_numbers(options.fixed, "--fixed")
    if batches[0] < 1:
        raise ValueError(f"--batch {options.batch}: expected at least 1")
    replay = make_replay(read_trace(options.trace), options.seed)
    cost, rates = _cost_and_rates(options, replay)
    named: dict[str, Policy] = {f"fixed {length}": fixed(length) for length in lengths}
    # What the policies that ask for it are told of the simulated device; the bandit has no clock there.
    given = {"goodput": {"cost": cost, "rates": rates}, "bandit": {"cost": cost}}
    given["batch_table"] = given["goodput"]
    for name in options.policy or DEFAULT_POLICIES:
        named[name] = find_policy(name, **given.get(name.partition("(")[0], {}))
    out = output_console()
    start, num_batches = time.perf_counter(), 0
    for batch in batches:
        rows = compose(len(replay.num_tokens), batch, options.random, options.seed)
        found = regret(replay, named, cost, rows, range(lengths[-1] + 1))
        num_batches += len(found) * len(rows)
        fixed = [found[name][0] for name in named if name.startswith("fixed ")]
        none = found["fixed 0"][0].tokens_per_second if "fixed 0" in found else None
        best = max(one.tokens_per_second for one in fixed)
        table = Table(title=f"simulated: batch {batch}, {len(rows)} batches")
        for name in ("policy", "tokens per target pass", "tokens/s", "over no drafts", "over best fixed", "regret"):
            table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=name == "policy")
        for name, (one, share) in found.items():
            over = "–" if none is None else f"{one.tokens_per_second / none:.2f}x"
            table.add_row(
                name, f"{one.block_efficiency:.3f}", f"{one.tokens_per_second:.1f}", over,
                f"{one.tokens_per_second / best:.2f}x", f"{share:.1%}",
            )  # fmt: skip
        out.print(table)
    seconds = time.perf_counter() - start
    out.print(f"{num_batches} batches simulated in {seconds:.1f} s, compilation included.", highlight=False)
    if replay.share_unknown:
        out.print(f"{replay.share_unknown:.1%} of the positions were not seen and drawn; --exhaustive sees them all.")
    return 0


def _cost_and_rates(options, replay):
    """What prices the steps, and the acceptance by position that policies start from."""
    from bass_jax.analysis.replay import replay_acceptance
    from bass_jax.cost_model import DEVICES, PassShape, pass_shape, read_profile, roofline

    if options.device is None:
        if options.profile is None:
            raise ValueError("expected --profile FILE (bass-jax profile writes one) or --device NAME")
        profile = read_profile(options.profile)
        return profile.table, profile.rates
    if options.device not in DEVICES:
        raise ValueError(f"--device {options.device}: expected one of {sorted(DEVICES)}")
    import bass_jax as bass
    from bass_jax.drafters import EagleDrafter, ModelDrafter

    pair, _ = bass.load_pair(options.pair)
    draft = PassShape(0.0, 0.0, 0.0, 0.0, 0.0)
    if isinstance(pair.drafter, ModelDrafter | EagleDrafter):
        draft = pass_shape(pair.drafter.model.config)
    cost = roofline(pass_shape(pair.target.config), draft, DEVICES[options.device])
    return cost, replay_acceptance(replay)
