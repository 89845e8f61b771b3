"""A drafter to copy: it repeats the last token.

Rarely right, never wrong: a lossless rule keeps the target's distribution whatever is proposed. The protocol tests
run over every drafter named in `tests/drafters/test_protocol.py`, this one included.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepeatDrafter:
    """Deterministic, no state."""

    def init(self, tokens: Array, lengths: Array) -> None:
        """Nothing to keep."""
        del tokens, lengths

    def propose(self, state: None, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, None]:
        """Proposes the last committed token, `draft_len` times."""
        del is_sampled
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens = jnp.broadcast_to(last, (last.shape[0], draft_len)).astype(jnp.int32)
        return Proposal(tokens, context.num_wanted, probs=None), state

    def commit(self, state: None, lengths: Array) -> None:
        """Nothing to keep."""
        del state, lengths
