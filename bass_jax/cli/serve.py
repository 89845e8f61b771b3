"""``bass-jax serve``: an HTTP server with OpenAI's API."""

import argparse
import signal
import sys
from pathlib import Path

from bass_jax.cli import arguments as args
from bass_jax.cli.output import Output

EXAMPLES = """examples:
  bass-jax serve
  bass-jax serve --slots 32 --capacity 4096 --port 8080
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "quickstart", "messages": [{"role": "user", "content": "Name three rivers."}]}'
  bass-jax serve checkpoints/quickstart --distributed --tp 16      # on every host of a job; the first one answers"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    args.add_all(parser, args.PAIR, args.DRAFT)
    args.add_model_arguments(parser)
    args.add_all(
        parser.add_argument_group("speculation"),
        args.argument("--policy", "chooses the draft length, as in generate", "auto"),
        args.argument("--acceptance", "acceptance rule; with this one a seed gives one text", "shared_noise"),
    )
    args.add_all(
        parser.add_argument_group("engine"),
        args.argument("--slots", "requests that are decoded together", 16),
        args.argument("--capacity", "tokens of prompt and output", 1024),
        args.argument("--max-waiting", "requests in the queue; others are answered with 429", 256),
        args.argument("--page-size", "slots per page of paged caches (default: dense caches)", type=int),
        args.argument("--logprobs", "the most alternatives that a request can ask for at each token", type=int),
    )
    args.add_all(
        parser.add_argument_group("HTTP"),
        args.argument("--host", "address", "127.0.0.1"),
        args.argument("--port", "port; 0 takes a free one", 8000),
        args.argument("--name", "of the model in requests (default: the name of the pair's directory)"),
        args.argument("--api-key-file", "text file with the key that clients have to send", type=Path),
        args.argument("--timeout", "seconds after which a request is cancelled", 600.0),
        args.argument("--live", "show the engine in the terminal", False),
    )
    args.add_process_arguments(parser, "spread the models over the devices of all processes (--tp)")


def run(options: argparse.Namespace, out: Output) -> int:
    """Serves until it is interrupted; returns the exit code."""
    try:
        import uvicorn

        from bass_jax.serving.app import Server
        from bass_jax.serving.metrics import Metrics
    except ImportError as error:
        raise ValueError(f"serve needs {error.name}: install bass-jax[serve]") from None
    import jax
    from rich.console import Console

    from bass_jax.cli.traffic_display import EngineView
    from bass_jax.config import SpecConfig
    from bass_jax.engine import Engine, EngineConfig, Loop
    from bass_jax.models.mesh import start_distributed
    from bass_jax.models.protocol import context_of
    from bass_jax.runtime.xla_flags import use_compilation_cache

    api_key = None if options.api_key_file is None else options.api_key_file.read_text().strip()
    if api_key == "":
        raise ValueError(f"--api-key-file {options.api_key_file}: the file is empty")
    if options.distributed:
        if options.tp is None:
            raise ValueError("--distributed: expected --tp with the number of devices of all processes")
        start_distributed(options.coordinator, options.num_processes, options.process)
    use_compilation_cache()
    pair = args.load_models(options)
    if pair.tokenizer is None:
        raise ValueError(f"{options.pair}: random weights have no texts to serve")
    metrics, view = Metrics(), EngineView(Console(stderr=True), is_shown=options.live)

    def on_step(loop: Loop) -> None:
        metrics.on_step(loop)
        view(loop)

    engine = Engine(
        pair,
        SpecConfig(None, options.acceptance, num_logprobs=options.logprobs),
        policy=options.policy,
        config=EngineConfig(
            num_slots=options.slots,
            capacity=min(options.capacity, context_of(pair.target) or options.capacity),
            max_waiting=options.max_waiting,
            page_size=options.page_size,
        ),
        is_processed=True,
        warm_up=False,
        on_step=on_step,
    )
    engine.executor.compile_shortest_step()
    if options.distributed and jax.process_index() > 0:
        engine.follow()
        return 0
    name = options.name or Path(options.pair).name
    server = Server(engine, metrics, name, api_key=api_key, max_seconds=options.timeout)
    config = uvicorn.Config(
        server.app(),
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=10,
    )
    sockets = [config.bind_socket()]
    sockets[0].listen(config.backlog)  # Clients that connect from now on wait for the server.
    port = sockets[0].getsockname()[1]
    out.note(f"serving {name} at http://{options.host}:{port}/v1; figures at http://{options.host}:{port}/")
    # Uvicorn raises the signal again when it has stopped. The process then ends as usual, and the others of a job too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with view:
        view.begin(name)
        uvicorn.Server(config).run(sockets)
    return 0
