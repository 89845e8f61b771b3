"""How close an implementation has to come to the float32 reference."""

import jax
import jax.numpy as jnp
import numpy as np

# Two units in the last place of the stored type for 99.9 % of the elements, and never more than four.
_ULPS = {0.999: 2.0, 1.0: 4.0}
# Sums of some hundred products of standard normals in float32, in a different order: 1e-5 is about 100 eps.
_FLOAT32_ERROR = 1e-5


def assert_close(out: jax.Array, expected: jax.Array) -> None:
    """Compares `out [..., H]` in its own precision with the float32 `expected [..., H]`.

    A unit in the last place is that of the element or, where the element is smaller than its vector's root
    mean square, of that. An output is a sum of weight times value, and tensor cores take weights of 16 bits: each term
    is rounded at its own size, so where the terms cancel the sum is off by many of its own units, in any kernel that
    multiplies in 16 bits. Counted in the element's own units 5.7 % are off by more than 2 and 0.1 % by more than 100
    (`qwen2_7b`, Triton interpreted; XLA's plain products: 6.0 % and 169); with weights in float32 none are.
    """
    out_f32, expected = np.asarray(out.astype(jnp.float32)), np.asarray(expected)
    assert np.isfinite(out_f32).all()
    error = np.abs(out_f32 - expected)
    if out.dtype == jnp.float32:
        assert error.max() <= _FLOAT32_ERROR
        return
    size = np.maximum(np.abs(expected), np.sqrt(np.mean(expected**2, axis=-1, keepdims=True)))
    size = np.maximum(size, float(jnp.finfo(out.dtype).tiny))
    ulps = error / (float(jnp.finfo(out.dtype).eps) * 2.0 ** np.floor(np.log2(size)))
    for share, limit in _ULPS.items():
        assert np.quantile(ulps, share) <= limit, f"{np.quantile(ulps, share):.2f} units for {share:.1%}"
