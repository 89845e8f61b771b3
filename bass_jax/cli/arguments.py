"""The arguments that commands share: their declaration, configuration overrides and pairs.

The modules of commands are imported at every start. They import jax and other large libraries inside functions.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bass_jax.runtime.names import nearest

if TYPE_CHECKING:
    from bass_jax.decoding.pair import Pair


class Argument(NamedTuple):
    """An argument of a command; see `argument`."""

    name: str
    options: dict[str, Any]


def argument(name: str, help: str, default: Any = None, **options: Any) -> Argument:
    """Declares an argument.

    Args:
        name: ``"--option"``, or a positional argument.
        help: what it means. The default value is added.
        default: it determines the type. False declares a flag, a list an option that may be repeated.
        options: of `argparse.ArgumentParser.add_argument`.
    """
    if default is False:
        options["action"] = "store_true"
    elif isinstance(default, list):
        options |= {"action": "append", "default": default}
        help += "; may be repeated"
    elif default is not None:
        options = {"type": type(default), "default": default} | options
        help += "" if default == "" else " (default: %(default)s)"
    return Argument(name, options | {"help": help})


def add_all(parser: argparse._ActionsContainer, *arguments: Argument) -> None:
    """Adds arguments to a parser or a group."""
    for name, options in arguments:
        parser.add_argument(name, **options)


def numbers(text: str) -> list[int]:
    """Reads ``"1,2,4"``; the type of an argument.

    Raises:
        ArgumentTypeError: if it is not an ascending list of whole numbers.
    """
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers, as in 1,2,4") from None
    if found != sorted(set(found)) or found[0] < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected ascending numbers of at least 0")
    return found


PAIR = argument("pair", "target and draft", "checkpoints/quickstart", nargs="?")
DRAFT = argument("--draft", "a drafter's name or path, as in generate (default: the pair's draft)")
DRAFT_LEN = argument("--draft-len", "draft tokens per step", 4)
ACCEPTANCE = argument("--acceptance", "acceptance rule", "token")
TEMPERATURE = argument("--temperature", "0 is greedy", 0.0)
QUIET = argument("--quiet", "no progress display", False)
SET = argument("--set", "override a key of the configuration", [], metavar="PATH=VALUE")
_QUANTIZE = ("int8", "int8_activations")


def max_new_tokens(default: int) -> Argument:
    """Declares the limit of an output."""
    return argument("--max-new-tokens", "limit per output", default)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how the weights of a pair are stored and placed; see `load_models`."""
    add_all(
        parser.add_argument_group("models"),
        argument("--dtype", "of both models (default: as stored)", choices=("float32", "bfloat16")),
        argument("--quantize", "INT8 for the target's weights, or also for its activations", choices=_QUANTIZE),
        argument("--quantize-draft", "INT8 for the draft model, as --quantize", choices=_QUANTIZE),
        argument("--cache-dtype", "of the target's cache (default: as --dtype)", choices=("int8",)),
        argument("--tp", "spread both models over the first N devices", type=int, metavar="N"),
        argument("--whole-draft", "with --tp: the whole draft on every device", False),
    )


def add_process_arguments(parser: argparse.ArgumentParser, use: str) -> None:
    """Declares the place of this process in a job of several; `use` says what ``--distributed`` does."""
    add_all(
        parser.add_argument_group("several processes"),
        argument("--distributed", f"{use}, as one process of a job", False),
        argument("--coordinator", "HOST:PORT of the first process, if the job does not provide it"),
        argument("--num-processes", "if the job does not provide it", type=int),
        argument("--process", "number of this process from 0, if the job does not provide it", type=int),
    )


def is_preset(pair: str) -> bool:
    """Returns whether `pair` is the name of a preset and not a path."""
    from bass_jax.models import PRESETS

    return pair in PRESETS and not Path(pair).exists()


def check_source(path: str) -> None:
    """Checks that `path` exists, is a preset, or may be a Hub id.

    Raises:
        ValueError: if it is none of these.
    """
    from bass_jax.models import PRESETS

    if "/" not in path and ":" not in path and path not in PRESETS and not Path(path).exists():
        raise ValueError(f"{path}: neither a file, a directory nor a preset{nearest(path, PRESETS)}")


def load_models(options: argparse.Namespace, **changes: Any) -> "Pair":
    """Loads the pair ``options.pair`` with the drafter ``options.draft``; a preset gives random weights.

    Args:
        options: with the arguments of `add_model_arguments`.
        changes: fields of `bass_jax.ModelOptions` that replace those arguments.

    Raises:
        ValueError: as `bass_jax.load_pair` and `bass_jax.decoding.random_pair`.
    """
    from bass_jax.decoding.load_pair import ModelOptions, load_pair, random_pair
    from bass_jax.models.mesh import tensor_parallel_mesh

    check_source(options.pair)
    fields = {name: getattr(options, name) for name in ("dtype", "quantize", "quantize_draft", "cache_dtype")} | changes
    placement = ModelOptions(
        mesh=None if options.tp is None else tensor_parallel_mesh(options.tp),
        draft_rules={} if options.whole_draft else None,
        **fields,
    )
    if not is_preset(options.pair):
        return load_pair(options.pair, drafter=options.draft, options=placement)
    return random_pair(options.pair, None if options.draft == "ngram" else options.draft, options=placement)


def read_overrides(texts: Sequence[str], option: str = "") -> dict[str, Any]:
    """Reads overrides of a configuration; the values are YAML.

    Args:
        texts: ``"training.num_steps=10"``.
        option: precedes each text in error messages.

    Raises:
        ValueError: if a text is not ``PATH=VALUE``.
    """
    import yaml

    found = {}
    for text in texts:
        path, separator, value = text.partition("=")
        if not separator or not path:
            raise ValueError(f"{option}{text!r}: expected PATH=VALUE")
        try:
            found[path] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{option}{text!r}: the value is not YAML") from None
    return found
