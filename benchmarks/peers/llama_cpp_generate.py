"""Greedy decoding by llama.cpp, timed; runs in an environment of its own and prints one JSON line.

Reads what `transformers_generate.py` reads, with ``"gguf"``, a file of the same model, in place of ``"model"``. One row
at a time, which is what its Python package's interface decodes; larger batches are left out.
"""

import json
import sys
import time

import llama_cpp
import numpy as np


def main() -> None:
    request = json.load(sys.stdin)
    threads = request.get("threads", 2)
    longest = max(len(row) for rows in request["batches"] for row in rows) + request["num_tokens"]
    model = llama_cpp.Llama(
        request["gguf"], n_ctx=longest + 8, n_threads=threads, n_threads_batch=threads, verbose=False,
        n_gpu_layers=-1 if request["device"] == "cuda" else 0,
    )  # fmt: skip
    results = [measure(request, model, rows[0]) if len(rows) == 1 else None for rows in request["batches"]]
    print(json.dumps({"version": llama_cpp.__version__, "threads": threads, "results": results}))


def measure(request, model, row) -> dict:
    seconds = []
    for repeat in range(request["repeats"] + 1):
        model.reset()
        model.eval(row)
        tokens = [best(model)]
        start = time.perf_counter()
        for _ in range(request["num_tokens"] - 1):
            model.eval(tokens[-1:])
            tokens.append(best(model))
        if repeat:
            seconds.append((time.perf_counter() - start) / (request["num_tokens"] - 1))
    return {"seconds_per_token": seconds, "tokens": [tokens]}


def best(model) -> int:
    logits = llama_cpp.llama_get_logits(model.ctx)
    return int(np.argmax(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),))))


if __name__ == "__main__":
    main()
