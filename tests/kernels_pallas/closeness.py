"""How close an implementation has to come to the float32 reference."""

import jax
import jax.numpy as jnp
import numpy as np

# Units in the last place of the element itself, for this share of the elements of the real queries.
_ULPS, _SHARE = 2.0, 0.999
# And of the element or of its vector's root mean square, whichever is larger, for every element.
_MAX_ULPS = 1.0
# Sums of some hundred products of standard normals in float32, in a different order: 1e-5 is about 100 eps.
_FLOAT32_ERROR = 1e-5


def assert_close(out: jax.Array, expected: jax.Array) -> None:
    """Compares `out [..., H]` in its own precision with the float32 `expected [..., H]`.

    Vectors that are zero in `expected` (queries past `num_queries`) must be zero, and do not count as elements.

    The bound on every element is not in its own units: an output is a sum of weight times value in float32, and where
    the terms cancel to next to nothing, the last bits of that sum are many units of what is left. That puts up to
    0.098 % of a spec's elements off by more than 2 of their own units (`docs/kernels.md`), one of
    `llama3_8b_long_draft` by 149. In units of the vector's size no element of any spec is off by more than 0.502
    (rounding alone: 0.5).
    """
    out_f32, expected = np.asarray(out.astype(jnp.float32)), np.asarray(expected)
    assert np.isfinite(out_f32).all()
    error = np.abs(out_f32 - expected)
    if out.dtype == jnp.float32:
        assert error.max() <= _FLOAT32_ERROR
        return
    is_real = expected.any(axis=-1)
    assert not out_f32[~is_real].any()
    error, expected = error[is_real], expected[is_real]
    own = error / _unit(np.abs(expected), out.dtype)
    share = np.mean(own <= _ULPS)
    assert share >= _SHARE, f"only {share:.2%} are within {_ULPS} units"
    size = np.maximum(np.abs(expected), np.sqrt(np.mean(expected**2, axis=-1, keepdims=True)))
    most = (error / _unit(size, out.dtype)).max()
    assert most <= _MAX_ULPS, f"{most:.2f} units of the vector's size"


def _unit(size: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """The unit in the last place of numbers of this `size [...]` (at least 0) in `dtype`."""
    info = jnp.finfo(dtype)
    return float(info.eps) * 2.0 ** np.floor(np.log2(np.maximum(size, float(info.tiny))))
