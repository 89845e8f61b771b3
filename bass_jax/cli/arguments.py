"""The pair of a command line: from a checkpoint, or of random weights in a published shape."""

import argparse
from pathlib import Path

QUANTIZE = ("int8", "int8_activations")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how the models of a pair are kept."""
    models = parser.add_argument_group("models")
    models.add_argument("--dtype", choices=("float32", "bfloat16"), help="of both (default: as stored)")
    models.add_argument("--quantize", choices=QUANTIZE, help="the target's matrices in INT8, or its products")
    models.add_argument("--quantize-draft", choices=QUANTIZE, help="likewise the draft")
    models.add_argument("--cache-dtype", choices=("int8",), help="of the target's cache (default: as --dtype)")
    models.add_argument("--tp", type=int, metavar="N", help="spread both models over the first N devices")
    models.add_argument("--whole-draft", action="store_true", help="with --tp: the whole draft on every device")


def is_preset(pair: str) -> bool:
    """Whether `pair` names a preset, and no path."""
    from bass_jax.models import PRESETS

    return pair in PRESETS and not Path(pair).exists()


def load_models(options: argparse.Namespace, pair: str, draft: str | None):
    """Loads a checkpoint, or makes random weights where `pair` is a preset that is no path.

    Args:
        options: with the arguments of `add_model_arguments`.
        pair: path or preset.
        draft: see `bass_jax.load_pair`.

    Returns:
        ``(pair, tokenizer)``; random weights have no tokenizer.

    Raises:
        ValueError: as `bass_jax.load_pair` and `bass_jax.random_pair`.
    """
    import bass_jax as bass

    placement = {
        "quantize": options.quantize, "quantize_draft": options.quantize_draft, "cache_dtype": options.cache_dtype,
        "mesh": None if options.tp is None else bass.tensor_parallel_mesh(options.tp),
        "draft_rules": {} if options.whole_draft else None,
    }  # fmt: skip
    if not is_preset(pair):
        return bass.load_pair(pair, drafter=draft, dtype=options.dtype, **placement)
    named = None if draft == "ngram" else draft
    return bass.random_pair(pair, named, dtype=options.dtype or "bfloat16", **placement), None
