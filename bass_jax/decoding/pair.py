"""A target model, its drafter and their tokenizer."""

import dataclasses
from typing import Any

import jax

from bass_jax.drafters import Drafter
from bass_jax.drafters.protocols import check_drafter_object
from bass_jax.models.protocol import TargetModel, check_model
from bass_jax.runtime.checks import check_kind


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """A target model, its drafter and their tokenizer: the first argument of `bass_jax.speculate_step`.

    It is a pytree, so that it can be an argument of a jitted function.

    Attributes:
        target: the model whose distribution the tokens follow: any `bass_jax.models.TargetModel`.
        drafter: any `bass_jax.drafters.Drafter`.
        tokenizer: a `bass_jax.checkpoint.Tokenizer`, or None if prompts are token ids. It is hashed by its content, so
            that equal tokenizers share compiled functions.
    """

    target: TargetModel
    drafter: Drafter
    tokenizer: Any = dataclasses.field(default=None, metadata={"static": True})

    def with_drafter(self, drafter: Drafter) -> "Pair":
        """Returns a pair with the same target and another drafter."""
        return dataclasses.replace(self, drafter=drafter)


def check_pair(pair: Any) -> None:
    """Checks the parts of a pair, before anything is compiled.

    Raises:
        ValueError: if it is no pair, a part lacks a method, or JAX cannot take a part apart into arrays.
    """
    check_kind("pair", pair, Pair)
    check_model("pair.target", pair.target)
    check_drafter_object("pair.drafter", pair.drafter)
