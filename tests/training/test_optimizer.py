"""Muon against Optax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bass_jax.training import optimizer
from bass_jax.training.distill_config import OptimizerConfig


@pytest.fixture
def params(make_config, make_draft):
    params = make_draft(make_config()).params
    return {name: leaf for name, leaf in params.items() if name != "embedding"}


def test_muon_takes_the_steps_of_optax(params, monkeypatch):
    """With coefficients in another form, which is faster on a CPU."""
    random = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), params) for _ in range(3)]

    def after_steps():
        rule = optimizer.make_optimizer.__wrapped__(OptimizerConfig(kind="muon", warmup_steps=1), 100)
        update, state, found = jax.jit(rule.update), rule.init(params), params
        for gradient in gradients:
            updates, state = update(gradient, state, found)
            found = optax.apply_updates(found, updates)
        return found

    ours, muon = after_steps(), optimizer.muon

    monkeypatch.setattr(optimizer, "muon", lambda *args, ns_coeffs, **kwargs: muon(*args, **kwargs))
    for before, found, expected in zip(*map(jax.tree.leaves, (params, ours, after_steps())), strict=True):
        assert jnp.abs(found - before).max() > 1e-4
        np.testing.assert_allclose(found, expected, atol=1e-6)
