"""Several engines behind Ray Serve, which routes every request to the replica with fewer requests.

    pip install 'bass-jax[serve,ray]'
    python examples/ray_serve.py checkpoints/quickstart --replicas 2 --gpus 1

Each replica is a process with a whole model, an engine and the routes of ``bass-jax serve``. Ray places the replicas on
the machines of the cluster, restarts one that has failed, and can scale them with the load; see
docs/how_to/http_server.md.
"""

import argparse
import signal
import sys
from pathlib import Path

from ray import serve
from starlette.applications import Starlette

import bass_jax as bass
from bass_jax.runtime.xla_flags import use_compilation_cache
from bass_jax.serving.app import Server
from bass_jax.serving.metrics import Metrics


@serve.deployment
@serve.ingress()
class Replica:
    """An engine, and the application that Ray Serve calls with the requests of its clients."""

    def __init__(self, path: str, slots: int, capacity: int):
        use_compilation_cache()
        metrics = Metrics()
        engine = bass.Engine(
            bass.load_pair(path),
            bass.SpecConfig(acceptance="shared_noise"),
            policy="auto",
            config=bass.EngineConfig(num_slots=slots, capacity=capacity),
            is_processed=True,
            warm_up=False,
            on_step=metrics.on_step,
        )
        self.server = Server(engine, metrics, Path(path).name)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Returns the application."""
        return self.server.app()

    def check_health(self) -> None:
        """Makes Ray Serve replace a replica whose engine has failed."""
        if self.server.engine.is_closed:
            raise RuntimeError("the engine is closed")


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", default="checkpoints/quickstart", help="directory of a pair")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="of each replica (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica (default: 0)")
    parser.add_argument("--slots", type=int, default=16, help="as in bass-jax serve (default: 16)")
    parser.add_argument("--capacity", type=int, default=1024, help="as in bass-jax serve (default: 1024)")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    deployment = Replica.options(
        num_replicas=options.replicas,
        # Beyond this number, requests wait at the router, which gives them to the replica that is free first.
        max_ongoing_requests=2 * options.slots,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    serve.start(http_options={"port": options.port})
    try:
        path = str(Path(options.pair).resolve())
        serve.run(deployment.bind(path, options.slots, options.capacity))
        print(f"{options.replicas} replicas of {Path(path).name} at http://127.0.0.1:{options.port}/v1", flush=True)
        signal.pause()
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
