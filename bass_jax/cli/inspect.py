"""``bass-jax inspect``: describes a checkpoint, and checks whether two can be a pair."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bass_jax.cli.arguments import add_all, argument, check_source
from bass_jax.cli.output import Cell, Output, cell

if TYPE_CHECKING:
    from bass_jax.checkpoint.inspect import Inspection
    from bass_jax.models import DenseMLP, ModelConfig, MoEConfig

EXAMPLES = """examples:
  bass-jax inspect checkpoints/quickstart
  bass-jax inspect ~/models/Llama-3.2-1B --draft checkpoints/my_draft
  bass-jax inspect model.Q4_1.gguf --shapes
  bass-jax inspect codegen-16b --draft codegen-350m
  bass-jax inspect presets"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("path", "checkpoint, pair directory, .gguf file, Hub id or preset; 'presets' lists the presets"),
        argument("--draft", "another checkpoint: check whether it can draft for the first"),
        argument("--shapes", "list the shape of every parameter", False),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Prints; returns the exit code, which is 1 if the draft cannot propose for the target."""
    from bass_jax.checkpoint import (
        checkpoints_of,
        inspect_checkpoint,
        inspect_preset,
        is_pair,
        load_tokenizer,
        match_vocabularies,
        why_not_a_pair,
    )
    from bass_jax.models import PRESETS
    from bass_jax.runtime.bundled import find_bundled

    def inspect(path: str) -> "Inspection":
        check_source(path)
        return inspect_preset(path) if path in PRESETS and not Path(path).exists() else inspect_checkpoint(path)

    if options.path == "presets":
        columns = ("preset", "family", "layers", "width", "parameters", "GB", "KV bytes per token")
        out.table(columns, [_preset_row(inspect_preset(name)) for name in PRESETS], num_left=2)
        return 0
    target, draft = options.path, options.draft
    if is_pair(find_bundled(target)):
        own_target, own_draft = checkpoints_of(find_bundled(target))
        target = str(own_target)
        draft = draft or (None if own_draft is None else str(own_draft))
    found = [inspect(path) for path in (target, draft) if path is not None]
    described = [_describe(one) for one in found]
    rows = [(label, *(one[label] for one in described)) for label in described[0]]
    out.table(("", *(str(one.path) for one in found)), rows, num_left=3)
    if options.shapes:
        out.value("shapes", found[0].shapes)
        for name, shape in found[0].shapes.items():
            out.show(f"{name}: {' x '.join(map(str, shape))}")
    if draft is None:
        return 0
    reason = why_not_a_pair(*found)
    out.value("is_pair", reason is None)
    if reason is not None:
        out.note(f"They cannot be a pair: {reason}.")
    elif found[1].tokenizer_fingerprint in (None, found[0].tokenizer_fingerprint):
        out.note("They can be a pair.")
    else:
        own, other = (load_tokenizer(one.path) for one in found)
        match = match_vocabularies(own, other, found[0].config.vocab_size)
        out.value("num_shared_tokens", len(match.output_ids))
        out.note(f"They can be a pair with two tokenizers: {match}.")
    return 0 if reason is None else 1


def _inputs(one: "Inspection") -> str:
    """Describes what the model reads."""
    if one.head is None:
        width = one.config.hidden_width
        return "tokens" if width is None else f"tokens and the final hidden state of {width} values"
    return f"tokens and the hidden states {one.head.layer_names} of {one.head.target_width} values ({one.head.kind})"


def _preset_row(one: "Inspection") -> tuple[str | Cell, ...]:
    config = one.config
    size = (cell(one.num_parameters, ","), cell(one.num_bytes / 1e9, ".2f"), cell(one.num_cache_bytes_per_token, ","))
    return (str(one.path), config.family, cell(config.num_layers), cell(config.width), *size)


def _describe_mlp(mlp: "DenseMLP | MoEConfig") -> str:
    from bass_jax.models import DenseMLP

    if isinstance(mlp, DenseMLP):
        return f"{mlp.width}"
    shared = "" if mlp.shared is None else f", and one of {mlp.shared.width}"
    return f"{mlp.num_experts} experts of {mlp.width}, {mlp.num_active} per token{shared}"


def _describe_recurrence(config: "ModelConfig") -> dict[str, str]:
    if not config.recurrences:
        return {}
    one, num = config.recurrences[0], len(config.recurrences)
    heads = f"{one.num_value_heads} value, {one.num_key_heads} key"
    return {"recurrent layers": f"{num} of {config.num_layers}, heads: {heads}, of {one.value_dim} and {one.key_dim}"}


def _describe(one: "Inspection") -> dict[str, str | Cell]:
    config = one.config
    attention, mlp = config.attentions[0], config.layers[0].mlp
    proposed = "" if config.output_vocab_size is None else f", proposes {config.output_vocab_size:,}"
    return {
        "family": config.family,
        "reads": _inputs(one),
        "layers x width": f"{config.num_layers} x {config.width}",
        "heads": f"{attention.num_heads} query, {attention.num_kv_heads} key-value, of {attention.head_dim}",
        **_describe_recurrence(config),
        "mlp": _describe_mlp(mlp),
        "parameters": Cell(one.num_parameters, f"{one.num_parameters:,} in {config.dtype}"),
        "bytes": Cell(one.num_bytes, f"{one.num_bytes:,} in memory, {one.num_stored_bytes:,} stored"),
        "context": cell(config.context, ",", " tokens"),
        "vocabulary": Cell(config.vocab_size, f"{config.vocab_size:,}{proposed}"),
        "cache": cell(one.num_cache_bytes_per_token, ",", " bytes per token"),
        "tokenizer": one.tokenizer_fingerprint or "–",
        "source": one.source or "–",
        "license": one.license or "–",
    }
