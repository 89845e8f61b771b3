"""Measures how fast a checkpoint loads from the page cache, and its peak host memory.

    python benchmarks/loading.py --gigabytes 2
    python benchmarks/loading.py --gigabytes 2 --stored bfloat16 --dtype float32

Writes a random Llama of this size in Hugging Face's format, so that it is in the page cache, and loads it in new
processes, twice in each. The second load uses memory that the first one freed. For the first load a virtual machine may
have to get memory from its host, which can take several times as long as loading; the difference of the two is a
property of the machine. Peak memory is the anonymous memory of the process, without mapped files, sampled every
millisecond. Its excess over the parameters is reported as a multiple of the largest tensor. The last line is JSON.
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
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--stored", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype to load as (default: as stored)")
    parser.add_argument("--converted", action="store_true", help="convert with bass-jax convert, and load the result")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.load, options.dtype)))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "hugging_face"
        write_checkpoint(path, options.gigabytes, options.stored)
        if options.converted:
            from bass_jax.checkpoint import convert

            convert(path, path := Path(directory) / "converted")
        runs = [measure(path, options.dtype) for _ in range(options.repeats)]
    table = Table(title=f"{runs[0]['file_bytes'] / 1e9:.2f} GB of {options.stored}, {options.repeats} processes")
    rates, first_rates = (
        [run["file_bytes"] / run[name] / 1e9 for run in runs] for name in ("seconds", "first_seconds")
    )
    kept, largest = (runs[0][name] / 1e9 for name in ("kept_bytes", "largest_bytes"))
    columns = {
        "GB/s (median)": f"{statistics.median(rates):.2f}",
        "GB/s (all)": " ".join(f"{rate:.2f}" for rate in rates),
        "first load": f"{statistics.median(first_rates):.2f}",
        "CPU s": f"{statistics.median(run['cpu_seconds'] for run in runs):.2f}",
        "parameters GB": f"{kept:.2f}",
        "largest tensor GB": f"{largest:.3f}",
        "excess / largest": f"{max(run['excess_bytes'] / run['largest_bytes'] for run in runs):.2f}",
    }
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*columns.values())
    Console(stderr=True).print(table)
    record = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "cpus": os.cpu_count()}
    print(json.dumps(record | {"stored": options.stored, "loaded": options.dtype or options.stored, "runs": runs}))


def write_checkpoint(directory: Path, gigabytes: float, stored: str) -> None:
    """Writes a random checkpoint, which puts it into the page cache."""
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
        prefix = f"model.layers.{i}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (width, mlp)
        shapes |= {f"{prefix}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    random = np.random.default_rng(0)
    dtype = np.float32 if stored == "float32" else ml_dtypes.bfloat16
    tensors = {name: random.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": width // 64,
        "intermediate_size": mlp,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))


def measure(directory: Path, dtype: str | None) -> dict[str, float]:
    """Runs `load` in a new process."""
    arguments = [] if dtype is None else ["--dtype", dtype]
    command = [sys.executable, __file__, "--load", str(directory), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def load(directory: Path, dtype: str | None) -> dict[str, float]:
    """Loads the checkpoint twice and returns times and memory."""
    import jax

    import bass_jax.checkpoint.huggingface  # noqa: F401 (so that imports are not timed)

    jax.block_until_ready(jax.numpy.zeros(8))  # Starts the device before the timing.
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
    """Loads the checkpoint and returns wall seconds, CPU seconds and the model."""
    import jax

    from bass_jax.checkpoint import load_model

    start, start_cpu = time.perf_counter(), time.process_time()
    model = jax.block_until_ready(load_model(directory, dtype=dtype))
    return time.perf_counter() - start, time.process_time() - start_cpu, model


def anonymous_bytes() -> int:
    """Returns the memory of this process that is not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no RssAnon: this needs Linux")


if __name__ == "__main__":
    main()
