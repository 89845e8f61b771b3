"""``bass-jax generate``: a batch of prompts, with speculation, and with regular decoding beside it."""

import argparse
import contextlib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bass_jax.cli.arguments import add_model_arguments, load_models
from bass_jax.cli.prompt_arguments import add_prompt_arguments, prompts_of

if TYPE_CHECKING:
    from rich.console import Console

    from bass_jax.decoding.outputs import Generation, RowResult

EXAMPLES = r"""examples:
  bass-jax generate "Write a haiku about rain." "What is 17 + 25?"
  bass-jax generate --file configs/demo_prompts.txt --baseline
  bass-jax generate --file HumanEval.jsonl.gz --limit 16 --batch 8 --output samples.jsonl \
      --template 'Complete the following Python function:\n```python\n{prompt}```'
  bass-jax generate "Tell me a joke." --samples 8 --temperature 0.8 --top-p 0.95 --seed 7
  bass-jax generate "def fibonacci(n):" --raw --draft ngram --draft-len 6
  bass-jax generate --file prompts.txt --policy goodput --profile profile.json --baseline
  bass-jax generate --file prompts.txt --draft-len 8 --exhaustive --trace trace.jsonl
  bass-jax generate --file prompts.txt --draft-len 8 --synthetic-acceptance 0.8 --no-text --baseline
  echo "Name three rivers." | bass-jax generate --draft-len 2 --quiet"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("prompts", nargs="*", help="prompts; '-' reads standard input, one per line")
    parser.add_argument("--pair", default="checkpoints/quickstart", help="target and draft (default: %(default)s)")
    add_model_arguments(parser)
    source = parser.add_argument_group("prompts")
    source.add_argument("--file", type=Path, help="text with one prompt per line, or a .jsonl(.gz) data set")
    add_prompt_arguments(source)
    source.add_argument("--raw", action="store_true", help="continue the text itself: no chat template")
    batch = parser.add_argument_group("batch")
    batch.add_argument("--batch", type=int, help="prompts decoded together (default: all, at most 64 rows)")
    batch.add_argument("--samples", type=int, default=1, help="answers per prompt (default: %(default)s)")
    batch.add_argument("--max-new-tokens", type=int, default=128, help="limit per answer (default: %(default)s)")
    spec = parser.add_argument_group("speculation")
    drafts = (
        "'model' or 'hidden' (the pair's own), 'ngram', 'store', 'combined' or 'combined_hidden' (either of them with "
        "lookup and store), or a path (default: the pair's draft)"
    )
    spec.add_argument("--draft", help=drafts)
    spec.add_argument("--draft-len", type=int, default=4, help="draft tokens per step (default: %(default)s)")
    spec.add_argument("--acceptance", default="token", help="acceptance rule (default: %(default)s)")
    spec.add_argument(
        "--candidates", type=int, default=1, help="alternative drafts per row, with --acceptance multi_draft"
    )
    spec.add_argument("--policy", help="draft lengths step by step: goodput, 'bass_heuristic(limit=8)', module:name …")
    spec.add_argument("--profile", type=Path, help="of bass-jax profile, for policies that need one")
    forced = "force acceptance, 0.8 or by position 0.9,0.8: for speed studies, the texts mean nothing"
    spec.add_argument("--synthetic-acceptance", metavar="RATES", help=forced)
    spec.add_argument("--baseline", action="store_true", help="also decode regularly, compare, print the speed-up")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off (default: %(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="1 is off (default: %(default)s)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="0 is off (default: %(default)s)")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="of prompt and output; 1 is off")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, help="per occurrence in the output; 0 is off")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, help="of tokens in the output; 0 is off")
    sampling.add_argument("--min-new-tokens", type=int, default=0, help="no stop token comes before")
    sampling.add_argument("--ban", type=int, action="append", default=[], metavar="ID", help="token id never emitted")
    sampling.add_argument("--logits-processor", action="append", default=[], metavar="MODULE:NAME",
                          help="function (logits, tokens, position) -> logits; may be repeated")  # fmt: skip
    sampling.add_argument("--seed", type=int, default=0, help="row i of the run draws from seed + i")
    sampling.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, help="JSONL: a line per answer, written as soon as it is finished")
    output.add_argument(
        "--logprobs", type=int, metavar="N", help="write every token's N most probable alternatives too"
    )
    output.add_argument("--trace", type=Path, help="JSONL: what decided over each draft; a killed recording goes on")
    output.add_argument("--exhaustive", action="store_true", help="draft at every position: slow, for an exact --trace")
    output.add_argument("--quiet", action="store_true", help="no progress, no live text, no table: the texts alone")
    output.add_argument("--no-text", action="store_true", help="the table alone")


def run(options: argparse.Namespace) -> int:
    """Decodes and prints; returns the exit code."""
    _check(options)
    prompts = prompts_of(options, options.file, options.prompts)

    from rich.console import Console

    import bass_jax as bass
    from bass_jax.acceptance import find_rule
    from bass_jax.cli.output import output_console
    from bass_jax.policies import find_policy
    from bass_jax.runtime.xla_flags import use_compilation_cache

    if options.synthetic_acceptance is not None:
        options.acceptance = f"synthetic({options.synthetic_acceptance})"
    spec = bass.SpecConfig(
        draft_len=options.draft_len, acceptance=options.acceptance, num_candidates=options.candidates,
        logits_processors=options.logits_processor, num_logprobs=options.logprobs,
        record_drafts=options.trace is not None,
    )  # fmt: skip
    rule = find_rule(spec.acceptance)
    policy = None
    if options.policy is not None:
        policy = find_policy(options.policy, **({} if options.profile is None else {"profile": options.profile}))
    sampling = bass.SamplingParams(
        options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty,
        options.frequency_penalty, options.presence_penalty, banned_tokens=options.ban or None,
        min_new_tokens=options.min_new_tokens,
    )  # fmt: skip
    use_compilation_cache()
    first = "exhaustive" if options.exhaustive else "speculate"
    pair, tokenizer = load_models(options, options.pair, options.draft)
    if tokenizer is None:
        raise ValueError(f"--pair {options.pair}: random weights have no texts; see bass-jax bench")
    encoded = _encode(options, tokenizer, prompts)

    notes = Console(stderr=True)
    with _opened(options.output) as sink:
        names = (first, "decode") if options.baseline else (first,)
        decode = functools.partial(_decode_all, options, pair, prompts, encoded, spec, sampling)
        runs = [(name, decode(name, sink, notes, policy if name == "speculate" else None)) for name in names]
    if not runs[0][1]:
        notes.print(f"{options.trace} holds all batches already: nothing was decoded.")
        return 0
    _report(options, output_console(), prompts, runs, is_lossless=rule.lossless, is_greedy=sampling.is_greedy)
    return 0


def _encode(options, tokenizer, prompts: Sequence[str]) -> list:
    encode = tokenizer.encode if options.raw else tokenizer.encode_prompt
    return [encode(prompt) for prompt in prompts]


def _batch_size(options, num_prompts: int) -> int:
    """Prompts that are decoded together."""
    from bass_jax.config import BATCH_BUCKETS

    return options.batch or max(1, min(num_prompts, BATCH_BUCKETS[-1] // options.samples))


def _run_settings(options, sampling, policy, step: str, first_row: int, num_rows: int) -> dict[str, Any]:
    """What a batch is decoded with, and compiled for."""
    return {
        "sampling": sampling, "max_new_tokens": options.max_new_tokens, "num_samples": options.samples,
        "seeds": range(options.seed + first_row, options.seed + first_row + num_rows), "step": step, "policy": policy,
    }  # fmt: skip


def _decode_all(options, pair, prompts, encoded, spec, sampling, step, sink, notes, policy) -> "list[Generation]":
    """Decodes batch by batch, showing rows as they grow and writing each as soon as it is finished."""
    from bass_jax.cli.generate_display import Display
    from bass_jax.decoding.traces import TraceWriter
    from bass_jax.engine.generate import Run, begin_trace

    trace = None if options.trace is None or step == "decode" else TraceWriter(options.trace)
    size = _batch_size(options, len(encoded))
    batches, total = [], len(encoded) * options.samples
    with Display(notes, step, total, is_shown=notes.is_terminal and not options.quiet) as display:
        starts = range(0, len(encoded), size)[0 if trace is None else trace.num_complete :]
        for start in starts:
            first_row = start * options.samples
            batch = encoded[start : start + size]
            num_rows = len(batch) * options.samples
            settings = _run_settings(options, sampling, policy, step, first_row, num_rows)
            decoding = Run(pair, batch, spec, stop_strings=options.stop, **settings)
            display.begin(num_rows)
            if trace is not None:
                begin_trace(trace, decoding, first_row=first_row, pair=str(options.pair))
            for info in decoding:
                if trace is not None:
                    trace.step(info, decoding.step_seconds[-1], num_rows)
                display.count(decoding.infos[-1], decoding.step_seconds[-1])
                for event in decoding.events:
                    display.push(event)
                    if event.finish_reason is not None and sink is not None:
                        _write(sink, step, options, prompts, first_row, event.row, decoding)
            batches.append(decoding.result())
            if trace is not None:
                trace.end()
    if trace is not None:
        trace.close()
    return batches


def _write(sink: IO[str], step: str, options, prompts: Sequence[str], first_row: int, row: int, decoding) -> None:
    """Writes one finished row; flushed, so that a killed run leaves whole lines."""
    index = (first_row + row) // options.samples
    answer = decoding.row(row)
    record: dict[str, Any] = {
        "prompt_index": index,
        "sample": (first_row + row) % options.samples,
        "step": step,
        "seed": options.seed + first_row + row,
        "prompt": prompts[index],
        "text": answer.text,
        "tokens": answer.tokens.tolist(),
        "finish_reason": answer.finish_reason,
        "logprobs": None if answer.token_logprobs is None else _logprobs(answer),
        "mean_logprob": float(answer.logprobs.mean()) if len(answer.logprobs) else None,
        "seconds": round(sum(decoding.step_seconds), 4),
    }
    sink.write(json.dumps(record, ensure_ascii=False) + "\n")
    sink.flush()


def _logprobs(answer: "RowResult") -> dict[str, list]:
    """Per token: its log-probability under the raw and the warped distribution, and the most probable tokens of both."""
    distributions = answer.token_logprobs
    assert distributions is not None
    # JSON has no infinity; a token of probability 0 has no log-probability.
    fields = {"raw": answer.logprobs, "warped": distributions.warped_logprobs} | distributions._asdict()
    del fields["warped_logprobs"]
    return {name: _finite(values.tolist()) for name, values in fields.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


def _report(options, out: "Console", prompts, runs, *, is_lossless: bool, is_greedy: bool) -> None:
    """Prints texts, table and whether greedy outputs agree."""
    from bass_jax.cli.generate_display import print_texts, results_table

    if not options.no_text:
        texts = [text for batch in runs[0][1] for text in batch.texts]
        print_texts(out, prompts, texts, options.samples, is_plain=options.quiet)
    if options.quiet:
        return
    out.print(results_table(runs))
    if options.synthetic_acceptance is not None:
        out.print(f"acceptance={options.acceptance!r} is synthetic: forced, for speed studies; the texts mean nothing.")
    elif not is_lossless:
        out.print(f"acceptance={options.acceptance!r} is lossy: the texts do not follow the target's distribution.")
    reasons = [reason for _, batches in runs for batch in batches for reason in batch.finish_reasons]
    if num_broken := reasons.count("not_finite"):
        out.print(f"{num_broken} rows ended early: the target's logits held NaN or infinity.")
    if len(runs) == 2 and is_greedy and is_lossless:
        pairs = list(zip(*([row.tolist() for batch in batches for row in batch.tokens] for _, batches in runs)))
        num_equal = sum(speculated == decoded for speculated, decoded in pairs)
        verdict = "identical" if num_equal == len(pairs) else "NOT identical"
        out.print(f"Greedy outputs with and without speculation: {num_equal} of {len(pairs)} rows compared {verdict}.")


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    try:
        sink = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written: {error.strerror}") from None
    with sink:
        yield sink


def _check(options: argparse.Namespace) -> None:
    for name in ("batch", "samples", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if options.exhaustive and (options.trace is None or options.policy is not None):
        raise ValueError("--exhaustive: expected --trace, and no --policy")
    if options.synthetic_acceptance is not None and options.acceptance != "token":
        raise ValueError(f"--synthetic-acceptance: expected no --acceptance beside it, not {options.acceptance!r}")
    if options.seed < 0:
        raise ValueError(f"--seed {options.seed}: expected at least 0")
