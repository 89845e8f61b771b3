"""Times greedy decoding with llama.cpp. It runs in its own environment and prints one JSON line.

The input is that of `transformers_generate.py`, with ``"gguf"``, a file of the same model, instead of ``"model"``. The
Python package decodes one row at a time, so larger batches are skipped.
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
        request["gguf"],
        n_ctx=longest + 8,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        n_gpu_layers=-1 if request["device"] == "cuda" else 0,
    )
    results = [measure(request, model, rows[0]) if len(rows) == 1 else None for rows in request["batches"]]
    print(json.dumps({"version": llama_cpp.__version__, "threads": threads, "results": results}))


def measure(request, model, row) -> dict:
    seconds = []
    for repeat in range(request["repeats"] + 1):
        model.reset()
        model.eval(row)
        tokens = [argmax(model)]
        start = time.perf_counter()
        for _ in range(request["num_tokens"] - 1):
            model.eval(tokens[-1:])
            tokens.append(argmax(model))
        if repeat:
            seconds.append((time.perf_counter() - start) / (request["num_tokens"] - 1))
    return {"seconds_per_token": seconds, "tokens": [tokens]}


def argmax(model) -> int:
    logits = llama_cpp.llama_get_logits(model.ctx)
    return int(np.argmax(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),))))


if __name__ == "__main__":
    main()
