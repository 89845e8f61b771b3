r"""Compares decoding with other implementations: same weights, prompts, dtype and device, in one run.

    make peers peers-ctranslate2 && python benchmarks/peers/run.py --peers transformers,ctranslate2 \
        --speculation lookup --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```'

The benchmark has two parts. **Regular** is greedy decoding without a stop token, in milliseconds per step without
prefill and compilation, over the batch sizes. **Speculation** (with `--speculation`, at batch 1, because `transformers`
supports no larger one) is tokens per second over the first `--num-tokens` tokens of greedy answers to the prompts of
`--file`; bass_jax uses the pair's draft, or `--draft`. The peers and bass_jax take turns, `--rounds` times, and ratios
are computed per round. Each peer runs in its own environment, so that threads and libraries are separate. llama.cpp
reads the file of `--gguf`, whose weights can have another number of bits. The last line is everything as JSON.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import bass_jax as bass
from bass_jax import checkpoint
from bass_jax.cli.prompt_arguments import collect_prompts

TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
PEERS = {
    "transformers": ("transformers_generate.py", ".venv-peers", {"mode": "regular"}),
    "transformers-compiled": ("transformers_generate.py", ".venv-peers", {"mode": "compiled"}),
    "ctranslate2": ("ctranslate2_generate.py", ".venv-peers-ctranslate2", {}),
    "llama.cpp": ("llama_cpp_generate.py", ".venv-peers-llama-cpp", {}),
    "lookup": ("transformers_generate.py", ".venv-peers", {"mode": "lookup"}),
    "assisted": ("transformers_generate.py", ".venv-peers", {"mode": "assisted"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--peers", default="transformers", help=f"for regular decoding: {', '.join(list(PEERS)[:4])}")
    parser.add_argument("--speculation", default="", help="for speculation: lookup, assisted")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="of the peers; bass_jax uses JAX's default"
    )
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--file", type=Path, help="prompts for the speculation")
    parser.add_argument("--field", default="prompt")
    parser.add_argument("--template", default="{prompt}")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument(
        "--draft", help="drafter of bass_jax, a name of load_pair or a path (default: the pair's draft)"
    )
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--assistant", help="a Hugging Face directory, for the mode assisted")
    parser.add_argument("--gguf", help="for llama.cpp")
    options = parser.parse_args()
    regular, speculative = ([name for name in text.split(",") if name] for text in (options.peers, options.speculation))
    for name in (*regular, *speculative):
        if name not in PEERS:
            parser.error(f"{name}: expected one of {', '.join(PEERS)}")

    pair = bass.load_pair(options.pair, drafter=options.draft, dtype=options.dtype)
    tokenizer: Any = pair.tokenizer
    text = tokenizer.encode(TEXT.read_text())
    sizes = [int(size) for size in options.batches.split(",")]
    batches = [[text[64 * row : 64 * row + options.prompt_tokens].tolist() for row in range(size)] for size in sizes]
    record = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "dtype": options.dtype,
        "device": jax.devices()[0].device_kind,
        "versions": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        checkpoint.save_hugging_face(model, pair.target, tokenizer=tokenizer)
        if regular:
            rounds = [compare(options, record, model, regular, batches, pair, "decode") for _ in range(options.rounds)]
            record["regular"] = report_regular(sizes, rounds)
        if speculative:
            prompts = collect_prompts((), options.file, options.field, options.template)
            rows = [[tokenizer.encode_chat(prompt).tolist()] for prompt in prompts[: options.num_prompts]]
            rounds = [
                compare(options, record, model, speculative, rows, pair, "speculate") for _ in range(options.rounds)
            ]
            record["speculation"] = report_speculation(rounds)
    print(json.dumps(record))


def compare(options, record, model: Path, names: list[str], batches, pair, step: str) -> dict:
    """Runs every peer and bass_jax once, and returns the seconds per token of a row and the tokens, per batch."""
    found = {}
    for name in names:
        script, environment, extra = PEERS[name]
        request = extra | {
            "model": str(model),
            "batches": batches,
            "num_tokens": options.num_tokens,
            "repeats": 2,
            "device": options.device,
            "dtype": options.dtype,
            "assistant": options.assistant,
            "gguf": options.gguf,
        }
        command = [f"{environment}/bin/python", str(Path(__file__).with_name(script))]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        record["versions"][name] = f"{answer['version']}, {answer['threads']} threads"
        found[name] = [
            None if one is None else (statistics.median(one["seconds_per_token"]), one["tokens"])
            for one in answer["results"]
        ]
    found["bass_jax"] = [decode(pair, rows, options, step) for rows in batches]
    return found


def decode(pair, rows, options, step: str) -> tuple[float, list]:
    """Decodes twice, and returns the seconds per token of a row and the tokens of the second run."""
    spec = bass.SpecConfig(options.draft_len)
    for _ in range(2):
        run = bass.generate(pair, rows, spec, step=step, max_new_tokens=options.num_tokens, stop_tokens=())
    seconds = statistics.median(run.timings.steps)
    if step == "speculate":
        seconds = run.timings.decode / options.num_tokens
    return seconds, [row.tolist() for row in run.tokens]


def report_regular(sizes, rounds) -> list[dict]:
    table = Table(title="regular greedy decoding, milliseconds per step")
    for name in ("batch", "peer", "peer ms", "bass_jax ms", "ratio", "same tokens"):
        table.add_column(name, justify="right")
    cells = []
    for index, size in enumerate(sizes):
        for name in (name for name in rounds[0] if name != "bass_jax" and rounds[0][name][index] is not None):
            ratios = [one[name][index][0] / one["bass_jax"][index][0] for one in rounds]
            theirs, ours = (statistics.median(one[who][index][0] for one in rounds) for who in (name, "bass_jax"))
            same = np.mean(np.array(rounds[-1][name][index][1]) == np.array(rounds[-1]["bass_jax"][index][1]))
            cell = {
                "batch": size,
                "peer": name,
                "peer_ms": round(1e3 * theirs, 2),
                "bass_jax_ms": round(1e3 * ours, 2),
                "ratio": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "same_tokens": round(float(same), 4),
            }
            cells.append(cell)
            ratio = f"{cell['ratio']:.2f}x ({cell['range'][0]:.2f}-{cell['range'][1]:.2f})"
            table.add_row(str(size), name, f"{cell['peer_ms']}", f"{cell['bass_jax_ms']}", ratio, f"{same:.1%}")
    Console(width=110).print(table)
    return cells


def report_speculation(rounds) -> list[dict]:
    table = Table(title="speculation at batch 1, tokens per second over all prompts")
    for name in ("peer", "peer tokens/s", "bass_jax tokens/s", "ratio", "same tokens"):
        table.add_column(name, justify="right")
    cells = []
    for name in (name for name in rounds[0] if name != "bass_jax"):
        rates = {
            who: [1 / statistics.mean(cell[0] for cell in one[who]) for one in rounds] for who in (name, "bass_jax")
        }
        ratios = [ours / theirs for ours, theirs in zip(rates["bass_jax"], rates[name], strict=True)]
        last = rounds[-1]
        same = np.mean([a[1] == b[1] for a, b in zip(last[name], last["bass_jax"], strict=True)])
        cell = {
            "peer": name,
            "peer_tokens_per_s": round(statistics.median(rates[name]), 1),
            "bass_jax_tokens_per_s": round(statistics.median(rates["bass_jax"]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "same_answers": round(float(same), 4),
        }
        cells.append(cell)
        ratio = f"{cell['ratio']:.2f}x ({cell['range'][0]:.2f}-{cell['range'][1]:.2f})"
        speeds = (f"{cell[f'{who}_tokens_per_s']}" for who in ("peer", "bass_jax"))
        table.add_row(name, *speeds, ratio, f"{same:.0%} of answers")
    Console(width=110).print(table)
    return cells


if __name__ == "__main__":
    main()
