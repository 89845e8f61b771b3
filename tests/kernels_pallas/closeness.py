"""The error bounds of every attention implementation against the float32 reference."""

import jax
import jax.numpy as jnp
import numpy as np

# At least this share of the elements is within this many units in the last place of the element itself.
_ULPS, _SHARE = 2.0, 0.999
# Every element is within this many units in the last place of its vector's root mean square, or of itself if larger.
_MAX_ULPS = 1.0
# About 100 eps: sums of some hundred float32 products of standard normals in a different order.
_FLOAT32_ERROR = 1e-5


def assert_close(out: jax.Array | np.ndarray, expected: jax.Array | np.ndarray) -> None:
    """Compares `out [..., H]` in its own precision with the float32 `expected [..., H]`.

    Vectors that are zero in `expected` (queries past `num_queries`) must be zero, and are not counted as elements.

    The bound on every element is relative to its vector. An output is a float32 sum of weight times value, and if the
    terms cancel almost completely, the rounding of the sum is many units of the remaining element: up to 0.098 % of a
    spec's elements differ by more than 2 of their own units (`docs/concepts/kernels.md`), one of
    `llama3_8b_long_draft` by 149. Relative to its vector, no element of any spec differs by more than 0.502 units
    (rounding alone gives 0.5).
    """
    out_f32, expected = np.asarray(out).astype(np.float32), np.asarray(expected)
    assert np.isfinite(out_f32).all()
    error = np.abs(out_f32 - expected)
    if out.dtype == jnp.float32:
        assert error.max() <= _FLOAT32_ERROR
        return
    is_real = expected.any(axis=-1)
    assert not out_f32[~is_real].any()
    error, expected = error[is_real], expected[is_real]
    share = np.mean(error / _unit(np.abs(expected), out.dtype) <= _ULPS)
    assert share >= _SHARE, f"only {share:.2%} are within {_ULPS} units"
    size = np.maximum(np.abs(expected), np.sqrt(np.mean(expected**2, axis=-1, keepdims=True)))
    largest = (error / _unit(size, out.dtype)).max()
    assert largest <= _MAX_ULPS, f"{largest:.2f} units relative to the vector"


def _unit(size: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Returns the unit in the last place of numbers of this `size [...]` (at least 0) in `dtype`."""
    info = jnp.finfo(dtype)
    return float(info.eps) * 2.0 ** np.floor(np.log2(np.maximum(size, float(info.tiny))))
