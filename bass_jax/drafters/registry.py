"""The registry of drafters that need no checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bass_jax.drafters.early_exit import early_exit_drafter
from bass_jax.drafters.forced_tokens import ForcedTokensDrafter
from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.protocols import Drafter, check_drafter_object
from bass_jax.drafters.suffix import suffix_drafter
from bass_jax.models.protocol import TargetModel
from bass_jax.runtime.imports import call_part, import_part, parse_part

_REGISTRY: dict[str, Callable[..., Drafter]] = {
    "early_exit": early_exit_drafter,
    "forced_tokens": ForcedTokensDrafter,
    "ngram": NgramDrafter,
    "suffix": suffix_drafter,
}


def register_drafter(name: str, make: Callable[..., Drafter]) -> None:
    """Registers a drafter under `name`, for arguments, configurations and the command line.

    Args:
        name: as in ``load_pair(path, drafter=name)``. It can have arguments there: ``"name(size=3)"``.
        make: builds the drafter. If it has parameters `target` or `tokenizer`, it receives those of the pair.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _REGISTRY:
        raise ValueError(f"drafter={name!r}: a drafter of this name is registered already")
    _REGISTRY[name] = make


def registered_drafters() -> dict[str, Callable[..., Drafter]]:
    """Returns the functions that build the registered drafters, by name."""
    return dict(_REGISTRY)


def is_drafter_name(text: str) -> bool:
    """Returns whether `find_drafter` can find what `text` names: a registered drafter or ``"module:name"``."""
    name = text.partition("(")[0]
    return name in _REGISTRY or (":" in name and not Path(text).exists())


def find_drafter(text: str, target: TargetModel, tokenizer: Any = None) -> Drafter:
    """Returns the drafter that `text` names.

    Args:
        text: a registered name or ``"module:name"`` of a drafter or of a function or class that makes one, either with
            arguments or without: ``"ngram(max_ngram=4)"``.
        target: of the pair, for functions that have a parameter of this name.
        tokenizer: likewise.

    Raises:
        ValueError: if there is no such drafter, or it does not take the arguments.
    """
    offered = {"target": target, "tokenizer": tokenizer}
    part = parse_part(text, "drafter", "ngram(max_ngram=4)")
    if part.name in _REGISTRY:
        found = call_part(_REGISTRY[part.name], part, f"drafter={text!r}", **offered)
    else:
        found = import_part(text, "drafter", Drafter, **offered)
    check_drafter_object(f"drafter={text!r}", found)
    return found
