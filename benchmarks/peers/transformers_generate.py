"""Times generation with `transformers`. It runs in the peers' environment and prints one JSON line.

Reads from standard input: ``{"model": directory, "batches": [[token ids, ...], ...], "num_tokens": n, "repeats": r,
"mode": m, "device": "cpu" or "cuda", "dtype": "float32" or "bfloat16", "assistant": directory or null}``. The rows of a
batch have the same length, so that nothing is padded. Modes: ``regular``, ``lookup`` (prompt lookup), ``assisted`` (by
the model in `assistant`), ``compiled`` (static cache and `torch.compile`). The modes ``lookup`` and ``assisted`` only
take batch 1.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    request = json.load(sys.stdin)
    device, dtype = request["device"], getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).eval().to(device)
    results = [measure(request, model, torch.tensor(rows, device=device)) for rows in request["batches"]]
    print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "results": results}))


def measure(request, model, tokens) -> dict:
    options = {
        "attention_mask": torch.ones_like(tokens),
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        **mode_options(request, model),
    }
    seconds = []
    for repeat in range(request["repeats"] + 1):
        times = []
        for num in (1, request["num_tokens"]):
            synchronize(tokens)
            start = time.perf_counter()
            with torch.inference_mode():
                output = model.generate(tokens, max_new_tokens=num, min_new_tokens=num, **options)
            synchronize(tokens)
            times.append(time.perf_counter() - start)
        if repeat:  # The first repeat is a warm-up. The time of one token is that of prefill.
            seconds.append((times[1] - times[0]) / (request["num_tokens"] - 1))
    return {"seconds_per_token": seconds, "tokens": output[:, tokens.shape[1] :].tolist()}


def mode_options(request, model) -> dict:
    """Returns the arguments of `generate` for the requested mode."""
    if request["mode"] == "lookup":
        return {"prompt_lookup_num_tokens": 4}
    if request["mode"] == "assisted":
        assistant = AutoModelForCausalLM.from_pretrained(request["assistant"], dtype=model.dtype).eval()
        return {"assistant_model": assistant.to(model.device)}
    if request["mode"] == "compiled":
        model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        return {"cache_implementation": "static"}
    return {}


def synchronize(tokens) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
