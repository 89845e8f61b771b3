"""``bass-jax quantization-error``: what INT8 does to a target's distributions and to its draft's acceptance, on real
prompts.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from bass_jax.cli.arguments import add_model_arguments, is_preset, load_models
from bass_jax.cli.prompt_arguments import add_prompt_arguments, prompts_of

EXAMPLES = r"""examples:
  bass-jax quantization-error checkpoints/quickstart --quantize int8
  bass-jax quantization-error checkpoints/quickstart --dtype bfloat16 --quantize int8 --cache-dtype int8 --prompts
  prompts.txt bass-jax quantization-error checkpoints/quickstart --quantize int8_activations --prompts
  HumanEval.jsonl.gz --limit 16 \
      --template 'Complete the following Python function:\n```python\n{prompt}```'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("pair", nargs="?", default="checkpoints/quickstart", help="(default: %(default)s)")
    parser.add_argument("--draft", help="model (the pair's own), ngram, or a path (default: the pair's)")
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=Path, default=Path("configs/demo_prompts.txt"), help="as generate's --file")
    add_prompt_arguments(parser, limit=16)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="limit per answer (default: %(default)s)")
    parser.add_argument("--draft-len", type=int, default=4, help="draft tokens per step (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON of the same")


def run(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    if is_preset(options.pair):
        raise ValueError(
            f"{options.pair} has random weights: expected a checkpoint, whose distributions mean something"
        )
    if options.quantize is None and options.cache_dtype is None and options.quantize_draft is None:
        raise ValueError("expected --quantize, --cache-dtype or --quantize-draft: nothing else differs from the pair")
    prompts = prompts_of(options, options.prompts)

    from rich.table import Table

    import bass_jax as bass
    from bass_jax.analysis.quantization_error import measure_quantization_error
    from bass_jax.cli.output import output_console

    other, tokenizer = load_models(options, options.pair, options.draft)
    whole = argparse.Namespace(**vars(options) | {"quantize": None, "cache_dtype": None, "quantize_draft": None})
    reference, _ = load_models(whole, options.pair, options.draft)
    assert tokenizer is not None  # a checkpoint's
    found = measure_quantization_error(
        reference, other, [tokenizer.encode_prompt(prompt) for prompt in prompts], bass.SpecConfig(options.draft_len),
        max_new_tokens=options.max_new_tokens, sampling=bass.SamplingParams(options.temperature),
    )  # fmt: skip
    kept = {name: getattr(options, name) for name in ("quantize", "cache_dtype", "quantize_draft")}
    table = Table(title=f"{options.pair}, {reference.target.config.dtype}: " + ", ".join(
        f"{name}={value}" for name, value in kept.items() if value is not None
    ))  # fmt: skip
    for column in ("", "as stored", "INT8"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("tokens per target pass", *(f"{one.block_efficiency:.3f}" for one in (found.reference, found.other)))
    table.add_row("acceptance rate", *(f"{one.acceptance_rate:.3f}" for one in (found.reference, found.other)))
    if found.overlaps is not None:
        table.add_row("acceptance at temperature 1, same positions", *(f"{rate:.4f}" for rate in found.overlaps))
    out = output_console()
    out.print(table)
    out.print(
        f"{found.num_tokens} positions of {len(prompts)} prompts: divergence {found.mean_kl:.2e} nats in the mean, "
        f"{found.quantile_kl:.2e} for 99 %, {found.max_kl:.2e} at most; same most probable token at {found.agreement:.1%}."
    )
    change = found.efficiency_change(options.draft_len)
    if change is not None:
        out.print(f"On the same positions {options.draft_len} drafts give {change:+.2%} tokens per target pass.")
    if options.output is not None:
        record = kept | {
            "pair": options.pair, "dtype": reference.target.config.dtype, "num_prompts": len(prompts),
            **{name: value for name, value in dataclasses.asdict(found).items() if isinstance(value, int | float)},
            "block_efficiency": [found.reference.block_efficiency, found.other.block_efficiency],
            "overlaps": found.overlaps, "efficiency_change": change,
            "acceptance_rate": [found.reference.acceptance_rate, found.other.acceptance_rate],
        }  # fmt: skip
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.output}")
    return 0
