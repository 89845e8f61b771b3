"""Times three ways to get the recurrent state of accepted drafts, for a layer of the shape of Qwen3-Next.

    python benchmarks/recurrent_state.py

* ``updates``: a pass returns what its tokens write, and a commit adds the accepted ones. This is what the models do.
* ``states``: a pass keeps the state after every token, and a commit selects one.
* ``again``: a pass keeps nothing, and a commit computes the accepted tokens again.

All three compute the same results. Prints the median time of a pass with its commit, in milliseconds, and the megabytes
that the pass keeps for the commit.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models.gated_delta import gated_delta_rule
from bass_jax.models.recurrent_state import PendingState, RecurrentState, commit_state

K, R, A, V = 16, 2, 128, 128
"""Key heads, value heads per key head, and lanes of a key and of a value."""


def updates(inputs, state, num_kept):
    """Returns the results and the state, by a `PendingState`."""
    queries, keys, values, log_decays, betas = inputs
    results, written, sums = gated_delta_rule(queries, keys, values, log_decays, betas, state)
    batch, num_tokens = keys.shape[0], keys.shape[2]
    nothing, num = jnp.zeros((batch, K, 0, 1)), jnp.full(batch, num_tokens, jnp.int32)
    before = RecurrentState(state, nothing)
    pending = PendingState(before, keys, written, sums, jnp.zeros((batch, K, num_tokens, 1)), num)
    kept = keys, written, sums
    return results, commit_state(pending, num_kept).state, kept


def states(inputs, state, num_kept):
    """Returns the results and the state, by the states after every token."""
    queries, keys, *others = inputs

    def step(state, one):
        query, key, value, log_decay, beta = one
        state = jnp.exp(log_decay)[..., None, None] * state
        written = beta[..., None] * (value - jnp.einsum("bka,bkrav->bkrv", key, state))
        state = state + key[:, :, None, :, None] * written[..., None, :]
        return state, (jnp.einsum("bka,bkrav->bkrv", query, state), state)

    tokens = (*(jnp.moveaxis(one, 2, 0) for one in (queries, keys)), *(jnp.moveaxis(one, 3, 0) for one in others))
    _, (results, after) = jax.lax.scan(step, state, tokens)
    all_states = jnp.concatenate([state[None], after])
    return jnp.moveaxis(results, 0, 3), all_states[num_kept, jnp.arange(len(num_kept))], after


def again(inputs, state, num_kept):
    """Returns the results and the state, by computing the accepted tokens a second time."""
    results, *_ = gated_delta_rule(*inputs, state)
    # Behind a barrier, because the compiler would otherwise use the results of the first time.
    repeated, state = jax.lax.optimization_barrier((inputs, state))
    return results, updates(repeated, state, num_kept)[1], inputs[1:]


WAYS = (updates, states, again)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    print(f"{'batch':>5} {'tokens':>6} " + " ".join(f"{way.__name__ + ' ms':>12} {'MB':>6}" for way in WAYS))
    for batch in (1, 8):
        for num_tokens in (1, 5):
            draw = np.random.default_rng(0)
            queries, keys = (draw.normal(size=(batch, K, num_tokens, A)) for _ in range(2))
            keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
            values = draw.normal(size=(batch, K, R, num_tokens, V))
            log_decays, betas = -draw.exponential(size=values.shape[:-1]), draw.random(values.shape[:-1])
            inputs = tuple(jnp.asarray(one, jnp.float32) for one in (queries, keys, values, log_decays, betas))
            state = jnp.asarray(draw.normal(size=(batch, K, R, A, V)), jnp.float32)
            num_kept = jnp.asarray(draw.integers(1, num_tokens + 1, batch), jnp.int32)
            functions = [jax.jit(lambda *arguments, way=way: way(*arguments)[:2]) for way in WAYS]
            outputs = [function(inputs, state, num_kept) for function in functions]
            for found in outputs[1:]:
                for one, other in zip(found, outputs[0], strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
            seconds = [[] for _ in WAYS]
            for _ in range(options.repeats):
                for function, times in zip(functions, seconds, strict=True):
                    start = time.perf_counter()
                    jax.block_until_ready(function(inputs, state, num_kept))
                    times.append(time.perf_counter() - start)
            cells = []
            for way, times in zip(WAYS, seconds, strict=True):
                kept = jax.eval_shape(way, inputs, state, num_kept)[2]
                size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) / 1e6
                cells.append(f"{1e3 * statistics.median(times):12.2f} {size:6.2f}")
            print(f"{batch:5} {num_tokens:6} " + " ".join(cells))


if __name__ == "__main__":
    main()
