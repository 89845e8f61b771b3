"""Times generation with CTranslate2. It runs in its own environment and prints one JSON line.

The input is that of `transformers_generate.py`. The model is first converted into a second directory next to it.
``dtype`` can also be ``int8``.
"""

import json
import sys
import time
from pathlib import Path

import ctranslate2
from tokenizers import Tokenizer


def main() -> None:
    request = json.load(sys.stdin)
    source = Path(request["model"])
    converted = source.with_name(f"{source.name}-ctranslate2")
    if not converted.exists():
        ctranslate2.converters.TransformersConverter(str(source)).convert(str(converted))
    threads = request.get("threads", 2)
    generator = ctranslate2.Generator(
        str(converted), device=request["device"], compute_type=request["dtype"], inter_threads=1, intra_threads=threads
    )
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    results = [measure(request, generator, tokenizer, rows) for rows in request["batches"]]
    print(json.dumps({"version": ctranslate2.__version__, "threads": threads, "results": results}))


def measure(request, generator, tokenizer, rows) -> dict:
    chunks = [[tokenizer.id_to_token(token) for token in row] for row in rows]
    seconds = []
    for repeat in range(request["repeats"] + 1):
        times = []
        for num in (1, request["num_tokens"]):
            start = time.perf_counter()
            found = generator.generate_batch(
                chunks,
                max_length=num,
                min_length=num,
                sampling_topk=1,
                include_prompt_in_result=False,
                max_batch_size=len(rows),
            )
            times.append(time.perf_counter() - start)
        if repeat:  # The first repeat is a warm-up. The time of one token is that of prefill.
            seconds.append((times[1] - times[0]) / (request["num_tokens"] - 1))
    return {"seconds_per_token": seconds, "tokens": [row.sequences_ids[0] for row in found]}


if __name__ == "__main__":
    main()
