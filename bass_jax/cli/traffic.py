"""``bass-jax traffic``: serves requests over time with static and continuous batching and every draft-length policy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bass_jax.cli.arguments import QUIET, add_all, argument
from bass_jax.cli.output import Output
from bass_jax.cli.prompt_arguments import collect_prompts

if TYPE_CHECKING:
    from rich.console import Console

    from bass_jax.experiments.traffic.backends import RealBackend
    from bass_jax.experiments.traffic.traffic_config import TrafficConfig

EXAMPLES = """examples:
  bass-jax traffic configs/traffic/h200_opt.yaml           # in simulated time: minutes
  bass-jax traffic configs/traffic/quickstart.yaml         # in real time, on this device
  bass-jax traffic configs/traffic/quickstart.yaml --agreement
  bass-jax traffic configs/traffic/quickstart.yaml --overhead 64
  bass-jax traffic configs/traffic/quickstart.yaml --soak 30"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("config", "YAML file", type=Path),
        argument("--plot", "image of latency against load (default: plot.png in the output directory)", type=Path),
        argument("--no-plot", "print only the tables", False),
        QUIET,
    )
    checks = parser.add_argument_group("checks in real time, each in place of the experiment")
    add_all(
        checks.add_mutually_exclusive_group(),
        argument("--agreement", "compare the first pattern in real and in simulated time", False),
        argument("--overhead", "measure the scheduler's share of a step of ROWS rows", type=int, metavar="ROWS"),
        argument("--soak", "serve for so long; check memory, compilations and slots", type=float, metavar="MINUTES"),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Runs an experiment or a check; returns the exit code."""
    from rich.console import Console

    from bass_jax.cli.traffic_display import EngineView, print_gains, print_results
    from bass_jax.experiments.traffic.backends import SimulatedBackend
    from bass_jax.experiments.traffic.traffic_config import load_traffic_config
    from bass_jax.experiments.traffic.traffic_experiment import RESULTS, run_traffic

    config = load_traffic_config(options.config)
    notes = Console(stderr=True)
    if options.agreement or options.overhead is not None or options.soak is not None:
        from bass_jax.cli.traffic_checks import run_check

        if config.real is None:
            raise ValueError(f"{options.config}: expected an experiment in real time, with a pair")
        return run_check(options, config, _real_backend(config, notes), notes, out)
    backend = SimulatedBackend(config) if config.real is None else _real_backend(config, notes)
    with EngineView(notes, is_shown=notes.is_terminal and not options.quiet) as view:
        results = run_traffic(
            config, backend, on_run=lambda *names: view.begin(f"{config.name}: {', '.join(names)}"), on_step=view
        )
    clock = "simulated time" if config.real is None else "real time"
    for pattern in config.traffic:
        print_results(out, results, pattern.name)
    print_gains(out, results)
    unit = f"; one unit of time is {backend.unit_seconds:.3f} s" if config.unit == "service" else ""
    out.note(f"{config.name}, in {clock}{unit}.")
    written = Path(config.output_dir) / RESULTS
    out.note(f"written: {written}")
    num_kept = sum(result.is_kept for result in results)
    if num_kept and config.real is not None:
        note = f"{num_kept} of {len(results)} runs were measured earlier; without {written} all are measured again."
        out.note(note)
    if not options.no_plot:
        from bass_jax.cli.plots import plot_traffic

        plot = options.plot or Path(config.output_dir) / "plot.png"
        out.note(plot_traffic(results, f"{config.name}, {clock}", plot))
    return 0


def _real_backend(config: "TrafficConfig", notes: "Console") -> "RealBackend":
    from bass_jax.experiments.traffic.backends import RealBackend
    from bass_jax.runtime.xla_flags import use_compilation_cache

    assert config.real is not None
    use_compilation_cache()  # `auto` compiles lengths while requests are served.
    texts = collect_prompts((), Path(config.real.prompts), config.real.field, "{prompt}")
    return RealBackend(config, texts, lambda note: notes.print(note, highlight=False))
