"""P-EAGLE reads the layers of its head once per step, whatever the draft length."""

import jax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests import tiny
from tests.drafters.test_protocol import context

MLP_SHAPE = (2 * 24, 16)
"""Of the joined gate and up projection of the tiny head, which has one layer."""


def count_layers(jaxpr, *, in_loops):
    """Returns how often the jaxpr multiplies by the MLP's first weight."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while" and not in_loops:
            continue
        is_product = equation.primitive.name == "dot_general"
        count += is_product and any(one.aval.shape in (MLP_SHAPE, MLP_SHAPE[::-1]) for one in equation.invars)
        inner = jax.tree.leaves(equation.params, is_leaf=lambda one: isinstance(one, Jaxpr | ClosedJaxpr))
        for one in inner:
            if isinstance(one, Jaxpr | ClosedJaxpr):
                count += count_layers(getattr(one, "jaxpr", one), in_loops=in_loops)
    return count


@pytest.mark.parametrize("draft_len", [1, 4])
def test_the_layers_are_traversed_once_per_step(draft_len):
    target, rows = tiny.model(1), context()
    rows = rows._replace(keys=rows.keys[:, :draft_len])
    passes = {}
    for mask in (None, 4):
        drafter = tiny.eagle3_drafter(target, mask=mask)
        hidden = jax.numpy.zeros((*rows.tokens.shape, 2 * target.config.width))
        state = drafter.init(rows.tokens, rows.lengths, hidden)
        propose = jax.make_jaxpr(lambda state, own=drafter: own.propose(state, rows, draft_len, is_sampled=False))
        jaxpr = propose(state).jaxpr
        passes[mask] = count_layers(jaxpr, in_loops=False), count_layers(jaxpr, in_loops=True)
    # One loop catches up after steps without drafts. EAGLE-3 has another, with a pass per draft.
    assert passes == {None: (1, 3), 4: (1, 2)}
