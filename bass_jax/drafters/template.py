"""A drafter to copy: it repeats the last token.

Few of its drafts are accepted, but a lossless rule keeps the target's distribution with every drafter. The protocol
tests run over every drafter that `tests/drafters/test_protocol.py` names, including this one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepeatDrafter:
    """Proposes the last token. Deterministic and without a state."""

    def init(self, tokens: Array, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del tokens, lengths

    def propose(self, state: None, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, None]:
        """Proposes the last committed token, `draft_len` times."""
        del is_sampled
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens = jnp.broadcast_to(last, (last.shape[0], draft_len)).astype(jnp.int32)
        return Proposal(tokens, context.num_wanted, probs=None), state

    def commit(self, state: None, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del state, lengths
