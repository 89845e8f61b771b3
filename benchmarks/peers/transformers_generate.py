"""Greedy generation by `transformers`, timed; runs in the peers' environment and prints one JSON line.

Reads from standard input: ``{"model": directory, "batches": [[token ids, ...], ...], "num_tokens": n,
"repeats": r}``. Rows of a batch have one length, so that nothing is padded.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    results = []
    for rows in request["batches"]:
        tokens = torch.tensor(rows)
        options = {
            "attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
        }  # fmt: skip
        seconds = []
        for repeat in range(request["repeats"] + 1):
            times = []
            for num in (1, request["num_tokens"]):
                start = time.perf_counter()
                with torch.inference_mode():
                    output = model.generate(tokens, max_new_tokens=num, min_new_tokens=num, **options)
                times.append(time.perf_counter() - start)
            if repeat:  # The first is the warm-up. One token's time is prefill's.
                seconds.append((times[1] - times[0]) / (request["num_tokens"] - 1))
        results.append({"seconds_per_step": seconds, "tokens": output[:, tokens.shape[1] :].tolist()})
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
