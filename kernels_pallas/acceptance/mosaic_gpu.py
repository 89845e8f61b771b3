"""Masked acceptance in Pallas' Mosaic GPU dialect: Hopper and later."""

# The dialect re-exports private names.
# pyright: reportPrivateImportUsage=false

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.acceptance.bodies import PrefillChunk
from kernels_pallas.acceptance.kernels import Operand, accept_in_kernels
from kernels_pallas.acceptance.verdict import KernelAcceptance
from kernels_pallas.tuning import AcceptanceTiles

_LANES = 128
"""Threads of a warpgroup: a vector has a multiple of them."""
_LOAD_BYTES = 16


def masked_acceptance_mosaic_gpu(*arguments, tiles: AcceptanceTiles, interpret: bool = False) -> KernelAcceptance:
    """The op of `kernels_pallas.ops.masked_acceptance`.

    Args:
        *arguments: As `kernels_pallas.acceptance.kernels.accept_in_kernels` takes them.
        tiles: Chunk sizes; both are at most the vocabulary. A program is one warpgroup, whatever they say.
        interpret: Run in jax's interpreter.

    Returns:
        The result.

    Raises:
        NotImplementedError: A vocabulary of fewer than 128 tokens, or whose rows do not all begin on 16 bytes (GPT-2's
            50257): threads load that many at once, and the dialect has no masked load.
    """
    _, _, logits, draft_probs, *_ = arguments
    vocab_size = logits.shape[2]
    if vocab_size < _LANES:
        raise NotImplementedError(f"the Mosaic GPU kernel needs a vocabulary of at least {_LANES}, not {vocab_size}")
    for array in (logits,) if draft_probs is None else (logits, draft_probs):
        if vocab_size * array.dtype.itemsize % _LOAD_BYTES:
            raise NotImplementedError(
                f"the Mosaic GPU kernel needs rows of whole {_LOAD_BYTES} bytes, not {vocab_size} of {array.dtype}"
            )
    return accept_in_kernels(functools.partial(_launch, interpret), *arguments, tiles=tiles)


def _launch(interpret, body, grid, inputs: Sequence[Operand], dtypes, name):
    """`kernels_pallas.acceptance.kernels.Launch` as one Mosaic GPU kernel."""
    names = ("sequence", "position", "chunk")[: len(grid)]
    num_inputs = len(inputs)

    def kernel(*refs):
        at = [lax.axis_index(axis) for axis in names]
        seen = [ref.at[tuple(at[: x.depth])] for ref, x in zip(refs[:num_inputs], inputs, strict=True)]
        body(_Dialect(), at, *seen, *(ref.at[tuple(at)] for ref in refs[num_inputs:]))

    kernel.__name__ = name
    return plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(grid, dtype) for dtype in dtypes),
        grid=grid,
        grid_names=names,
        compiler_params=plgpu.CompilerParams(approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*(operand.array for operand in inputs))


class _Dialect:
    """`kernels_pallas.acceptance.bodies.Dialect`: the last piece begins early enough to end with the vocabulary."""

    def chunk(self, index, size, vocab_size):
        start = jnp.minimum(index * size, vocab_size - size)
        token = start + lax.broadcasted_iota(jnp.int32, (size,), 0)
        return PrefillChunk(start, token, token >= index * size)

    def read(self, ref, chunk, other, *, row=None, is_wanted=True):
        # What is not wanted is one piece for all programs, which the cache holds.
        place = pl.ds(jnp.where(is_wanted, chunk.start, 0), chunk.token.shape[0])
        values = ref[place] if row is None else ref[row, place]
        return jnp.where(chunk.is_own & is_wanted, values.astype(jnp.float32), other)

    def as_float(self, bits):
        # The dialect reinterprets vectors alone.
        values = lax.bitcast_convert_type(jnp.full((_LANES,), bits), jnp.float32)
        return jnp.where(lax.broadcasted_iota(jnp.int32, (_LANES,), 0) == 0, values, 0.0).sum(axis=0)
