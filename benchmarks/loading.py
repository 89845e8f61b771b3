"""How fast a checkpoint loads from the page cache, and how much host memory it takes beside what is kept.

    python benchmarks/loading.py --gigabytes 2
    python benchmarks/loading.py --gigabytes 2 --stored bfloat16 --dtype float32

Writes a random Llama of that size in Hugging Face's format, so that it lies in the page cache, and loads it in new
processes, twice in each: the second time into memory that the first gave back. The first time a virtual machine may
have to get its memory from its host, which can cost several times what loading does; the difference is the machine's.
Peak memory is the process's anonymous memory (mapped files are the cache's), sampled every
millisecond; its excess is what was taken beside the parameters, as a share of the largest tensor. The last line is
JSON.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint")
    parser.add_argument("--stored", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="to load as (default: as stored)")
    parser.add_argument("--ours", action="store_true", help="convert to a checkpoint of ours, and load that")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.load, options.dtype)))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "theirs"
        write_checkpoint(path, options.gigabytes, options.stored)
        if options.ours:
            from bass_jax.checkpoint import convert

            convert(path, path := Path(directory) / "ours")
        runs = [measure(path, options.dtype) for _ in range(options.repeats)]
    table = Table(title=f"{runs[0]['file_bytes'] / 1e9:.2f} GB of {options.stored}, {options.repeats} processes")
    for name in (
        "GB/s (median)",
        "GB/s (all)",
        "first time",
        "CPU s",
        "kept GB",
        "largest tensor GB",
        "excess / largest",
    ):
        table.add_column(name, justify="right")
    rates, first_rates = (
        [run["file_bytes"] / run[name] / 1e9 for run in runs] for name in ("seconds", "first_seconds")
    )
    cpu_seconds = statistics.median(run["cpu_seconds"] for run in runs)
    excess = max(run["excess_bytes"] / run["largest_bytes"] for run in runs)
    kept, largest = (runs[0][name] / 1e9 for name in ("kept_bytes", "largest_bytes"))
    all_rates = " ".join(f"{rate:.2f}" for rate in rates)
    numbers = (
        f"{statistics.median(first_rates):.2f}",
        f"{cpu_seconds:.2f}",
        f"{kept:.2f}",
        f"{largest:.3f}",
        f"{excess:.2f}",
    )
    table.add_row(f"{statistics.median(rates):.2f}", all_rates, *numbers)
    Console(stderr=True).print(table)
    record = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "cpus": os.cpu_count()}
    print(json.dumps(record | {"stored": options.stored, "loaded": options.dtype or options.stored, "runs": runs}))


def write_checkpoint(directory: Path, gigabytes: float, stored: str) -> None:
    """Writes the checkpoint, and so puts it into the page cache."""
    import ml_dtypes
    from safetensors.numpy import save_file

    directory.mkdir()
    size = 4 if stored == "float32" else 2
    width, mlp, vocab = (2048, 5504, 32000) if gigabytes > 1 else (768, 2048, 16000)
    layer = 4 * width * width + 3 * width * mlp
    num_layers = max(1, round((gigabytes * 1e9 / size - 2 * vocab * width) / layer))
    shapes = {"model.embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    shapes["model.norm.weight"] = (width,)
    for i in range(num_layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (width, mlp)
        shapes |= {f"{at}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    draw = np.random.default_rng(0)
    kind = np.float32 if stored == "float32" else ml_dtypes.bfloat16
    save_file(
        {name: draw.standard_normal(shape, np.float32).astype(kind) for name, shape in shapes.items()},
        directory / "model.safetensors",
    )
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": num_layers,
        "num_attention_heads": width // 64, "intermediate_size": mlp, "tie_word_embeddings": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def measure(directory: Path, dtype: str | None) -> dict[str, float]:
    """Loads in a new process."""
    arguments = [] if dtype is None else ["--dtype", dtype]
    command = [sys.executable, __file__, "--load", str(directory), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def load(directory: Path, dtype: str | None) -> dict[str, float]:
    """Loads and says how long it took and what it took."""
    import jax

    import bass_jax.checkpoint.huggingface  # noqa: F401 (what importing takes is not what loading takes)

    jax.block_until_ready(jax.numpy.zeros(8))  # The device is there before the clock starts.
    before, peak, is_done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(1e-3):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    first_seconds, _, model = timed(directory, dtype)
    is_done.set()
    thread.join()
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(model.params)]
    excess = max(peak[0], anonymous_bytes()) - before - sum(sizes)
    del model
    seconds, cpu_seconds, _ = timed(directory, dtype)
    return {
        "seconds": seconds,
        "first_seconds": first_seconds,
        "cpu_seconds": cpu_seconds,
        "file_bytes": sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        "kept_bytes": sum(sizes),
        "largest_bytes": max(sizes),
        "excess_bytes": excess,
    }


def timed(directory: Path, dtype: str | None) -> tuple[float, float, object]:
    """Loads; returns seconds, seconds of processors, and the model."""
    import jax

    from bass_jax.checkpoint import load_model

    start, start_cpu = time.perf_counter(), time.process_time()
    model = jax.block_until_ready(load_model(directory, dtype=dtype))
    return time.perf_counter() - start, time.process_time() - start_cpu, model


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no RssAnon: this needs Linux")


if __name__ == "__main__":
    main()
