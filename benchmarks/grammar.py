"""Measures what a grammar costs per step, and how many drafts are accepted under it.

    python benchmarks/grammar.py

Every method decodes the same prompts greedily, in turns:

* `free`: no grammar, and no arrays for one.
* `any text`: a grammar that allows every text. The tokens are those of `free`, so the difference of the two step times
  is the cost of the masks and of the callback.
* `schema`: JSON of a schema.
* `schema, forced`: the same, and the tokens that the grammar forces are drafted without the draft model.

The time of a step is its median over all steps and repeats; *parser* is the part of it that llguidance takes for the
masks of all rows, and *ask* the time of the whole callback. The last line is JSON.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time

import bass_jax as bass
from bass_jax.drafters import EnsembleDrafter, ForcedTokensDrafter
from bass_jax.sampling import grammar

JOBS = ("baker", "pilot", "teacher", "nurse", "painter", "farmer", "lawyer", "sailor")
PROMPT = "Introduce a {} as a JSON object with the keys name, age, city, is_retired and skills."
STRING = {"type": "string", "maxLength": 40}
PROPERTIES = {
    "name": STRING,
    "age": {"type": "integer", "minimum": 18, "maximum": 99},
    "city": STRING,
    "is_retired": {"type": "boolean"},
    "skills": {"type": "array", "items": STRING, "minItems": 2, "maxItems": 4},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


class Timer:
    """Adds up the time of a function."""

    def __init__(self, function):
        self.function, self.seconds = function, 0.0

    def __call__(self, *args, **options):
        """Calls the function."""
        start = time.perf_counter()
        try:
            return self.function(*args, **options)
        finally:
            self.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--draft-lens", default="0,4")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    pair = bass.load_pair(options.pair)
    forced = bass.Pair(pair.target, EnsembleDrafter((ForcedTokensDrafter(), pair.drafter)), pair.tokenizer)
    grammars = {
        "free": None,
        "any text": grammar.Grammar(pair.tokenizer, regex="(.|\n)*"),
        "schema": grammar.Grammar(pair.tokenizer, json_schema=SCHEMA),
    }
    # A traced step keeps the functions that it found, so they are replaced before the first one is traced.
    grammar._masks = asked = Timer(grammar._masks)
    parsed = Timer(grammar._RowMatcher.fill)
    grammar._RowMatcher.fill = lambda *args: parsed(*args)
    rows = []
    for batch in map(int, options.batches.split(",")):
        prompts = [PROMPT.format(job) for job in JOBS[:batch]]
        for draft_len in map(int, options.draft_lens.split(",")):
            methods = [*grammars, "schema, forced"] if draft_len else [*grammars]
            found = {name: {"steps": [], "asked": 0.0, "parsed": 0.0, "tokens_per_pass": 0.0} for name in methods}
            texts = {}
            for _ in range(options.repeats):
                for name, one in found.items():
                    before = asked.seconds, parsed.seconds
                    output = bass.generate(
                        forced if "forced" in name else pair,
                        prompts,
                        bass.SpecConfig(draft_len, "greedy"),
                        step="speculate" if draft_len else "decode",
                        sampling=bass.SamplingParams(grammar=grammars[name.partition(",")[0]]),
                        max_new_tokens=options.max_new_tokens,
                    )
                    one["steps"] += output.timings.steps
                    one["asked"] += asked.seconds - before[0]
                    one["parsed"] += parsed.seconds - before[1]
                    one["tokens_per_pass"] = output.metrics.tokens_per_pass
                    texts[name] = output.texts
            assert texts["free"] == texts["any text"], "a grammar that allows everything changes nothing"
            base = statistics.median(found["free"]["steps"])
            for name, one in found.items():
                step, num = statistics.median(one["steps"]), len(one["steps"])
                row = {
                    "batch": batch,
                    "draft_len": draft_len,
                    "method": name,
                    "step_ms": 1e3 * step,
                    "over_free_ms": 1e3 * (step - base),
                    "ask_ms": 1e3 * one["asked"] / num,
                    "parser_ms": 1e3 * one["parsed"] / num,
                    "tokens_per_pass": one["tokens_per_pass"],
                }
                rows.append(row)
                print(
                    f"batch {batch}, draft length {draft_len}, {name}: {row['step_ms']:.1f} ms a step "
                    f"({row['over_free_ms']:+.1f}), ask {row['ask_ms']:.2f} ms, parser {row['parser_ms']:.2f} ms, "
                    f"{one['tokens_per_pass']:.2f} tokens per pass",
                    flush=True,
                )
            if draft_len == 0:
                print(texts["schema"][0])
    about = {"date": str(datetime.date.today()), "machine": platform.processor(), "cpus": os.cpu_count()}
    print(json.dumps(about | {"rows": rows}))


if __name__ == "__main__":
    main()
