"""A target with its drafter and their tokenizer."""

import dataclasses
from typing import Any

import jax

from bass_jax.drafters import Drafter
from bass_jax.models import Model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """What `bass_jax.speculate_step` decodes with; a pytree, so `jax.jit` takes it as an argument.

    Attributes:
        target: the model whose distribution the tokens follow.
        drafter: any `bass_jax.drafters.Drafter`.
        tokenizer: of both; hashed by its content, so that equal tokenizers share compiled functions. None when the
            caller works with token ids only.
    """

    target: Model
    drafter: Drafter
    tokenizer: Any = dataclasses.field(default=None, metadata={"static": True})

    def with_drafter(self, drafter: Drafter) -> "Pair":
        """Returns the same target with another drafter."""
        return dataclasses.replace(self, drafter=drafter)
