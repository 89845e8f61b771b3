"""``bass-jax traffic``: requests over time, batched statically and continuously, with every draft-length policy."""

import argparse
from pathlib import Path

from bass_jax.cli.prompt_arguments import read_prompts

EXAMPLES = """examples:
  bass-jax traffic configs/traffic/h200_opt.yaml           # in simulated time: seconds
  bass-jax traffic configs/traffic/quickstart.yaml         # in real time, on this device
  bass-jax traffic configs/traffic/quickstart.yaml --agreement
  bass-jax traffic configs/traffic/quickstart.yaml --overhead 64
  bass-jax traffic configs/traffic/quickstart.yaml --soak 30"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("config", type=Path, help="of the experiment, a YAML file")
    parser.add_argument("--plot", type=Path, help="image of latency over load (default: plot.png beside the results)")
    parser.add_argument("--no-plot", action="store_true", help="tables alone")
    parser.add_argument("--quiet", action="store_true", help="no live view")
    checks = parser.add_argument_group("checks in real time, each in place of the experiment")
    one = checks.add_mutually_exclusive_group()
    one.add_argument("--agreement", action="store_true", help="the first pattern in real and in simulated time")
    one.add_argument("--overhead", type=int, metavar="ROWS", help="the scheduler's share of a step of so many rows")
    one.add_argument("--soak", type=float, metavar="MINUTES", help="serve without end in sight; memory, compilations")


def run(options: argparse.Namespace) -> int:
    """Runs an experiment or a check; returns the exit code."""
    from rich.console import Console

    from bass_jax.cli.output import output_console
    from bass_jax.cli.traffic_display import EngineView, print_comparisons, results_tables
    from bass_jax.experiments.traffic.backends import SimulatedWorld
    from bass_jax.experiments.traffic.traffic_config import load_config
    from bass_jax.experiments.traffic.traffic_experiment import RESULTS, run_experiment

    config = load_config(options.config)
    notes, out = Console(stderr=True), output_console()
    if options.agreement or options.overhead is not None or options.soak is not None:
        from bass_jax.cli import traffic_checks

        if config.real is None:
            raise ValueError(f"{options.config}: expected an experiment in real time, with a pair")
        return traffic_checks.run(options, config, _real_world(config, notes), notes, out)
    world = SimulatedWorld(config) if config.real is None else _real_world(config, notes)
    with EngineView(notes, is_shown=notes.is_terminal and not options.quiet) as view:
        results = run_experiment(
            config, world, on_run=lambda *names: view.begin(f"{config.name}: {', '.join(names)}"), on_step=view
        )
    clock = "simulated time" if config.real is None else "real time"
    for traffic in config.traffic:
        out.print(*results_tables(results, traffic.name), sep="\n")
    print_comparisons(out, results)
    unit = f"; one unit of time is {world.unit_seconds:.3f} s" if config.unit == "service" else ""
    num = len({result.summary.num_requests for result in results})
    requests = f"{results[0].summary.num_requests} requests per run" if num == 1 else "the requests of its patterns"
    out.print(f"{config.name}: {requests}, in {clock}{unit}.", highlight=False)
    written = Path(config.output_dir) / RESULTS
    out.print(f"written: {written}", highlight=False, soft_wrap=True)
    num_kept = sum(result.is_kept for result in results)
    if num_kept and config.real is not None:
        note = f"{num_kept} of {len(results)} runs were there before, and the device may have had another day then"
        out.print(f"{note}; without {written} all run anew.", highlight=False, soft_wrap=True)
    if not options.no_plot:
        from bass_jax.experiments.traffic.latency_plots import plot_traffic

        path = options.plot or Path(config.output_dir) / "plot.png"
        plot_traffic(results, f"{config.name}, {clock}", path)
        out.print(f"drawn: {path}", highlight=False, soft_wrap=True)
    return 0


def _real_world(config, notes):
    from bass_jax.experiments.traffic.backends import RealWorld

    texts = read_prompts((), Path(config.real.prompts), config.real.field, "{prompt}")
    return RealWorld(config, texts, lambda note: notes.print(note, highlight=False))
