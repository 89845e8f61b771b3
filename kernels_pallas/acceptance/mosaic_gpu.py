"""Masked acceptance in Pallas' Mosaic GPU dialect, for Hopper and later GPUs."""

# The dialect re-exports private names.
# pyright: reportPrivateImportUsage=false

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.acceptance.kernel_bodies import VocabBlock
from kernels_pallas.acceptance.kernels import Operand, accept_in_kernels
from kernels_pallas.acceptance.types import AcceptanceInputs, KernelAcceptance
from kernels_pallas.tuning import AcceptanceTiles

_LANES = 128
"""Threads of a warpgroup; the size of a vector is a multiple of it."""
_LOAD_BYTES = 16


def masked_acceptance_mosaic_gpu(
    inputs: AcceptanceInputs, *, tiles: AcceptanceTiles, interpret: bool = False
) -> KernelAcceptance:
    """Computes `kernels_pallas.ops.masked_acceptance`.

    Args:
        inputs: The op's arguments.
        tiles: The vocabulary has at least `chunk` and `block` tokens. `num_warps` is ignored: a program is one
            warpgroup.
        interpret: Run in jax's interpreter.

    Raises:
        NotImplementedError: The vocabulary has fewer than 128 tokens, or not all of its rows begin at a multiple of 16
            bytes (GPT-2's 50257): threads load 16 bytes at once, and the dialect has no masked load.
    """
    vocab_size = inputs.target_logits.shape[2]
    if vocab_size < _LANES:
        raise NotImplementedError(f"the Mosaic GPU kernel needs a vocabulary of at least {_LANES}, not {vocab_size}")
    for array in (inputs.target_logits, inputs.draft_probs):
        if array is not None and vocab_size * array.dtype.itemsize % _LOAD_BYTES:
            raise NotImplementedError(
                f"the Mosaic GPU kernel needs rows of whole {_LOAD_BYTES} bytes, not {vocab_size} of {array.dtype}"
            )
    return accept_in_kernels(functools.partial(_launch, interpret), inputs, tiles)


def _launch(interpret, body, grid, inputs: Sequence[Operand], dtypes, name):
    """Implements `kernels_pallas.acceptance.kernels.Launch` with one Mosaic GPU kernel."""
    names = ("sequence", "position", "block")[: len(grid)]
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
    """Implements `kernels_pallas.acceptance.kernel_bodies.Dialect`; the last block overlaps the one before it."""

    def block(self, index, size, vocab_size):
        start = jnp.minimum(index * size, vocab_size - size)
        token = start + lax.broadcasted_iota(jnp.int32, (size,), 0)
        return VocabBlock(start, token, token >= index * size)

    def read(self, ref, block, other, *, row=None, is_wanted=True):
        # Programs that want nothing all read the first block, which is in the cache.
        place = pl.ds(jnp.where(is_wanted, block.start, 0), block.token.shape[0])
        values = ref[place] if row is None else ref[row, place]
        return jnp.where(block.is_own & is_wanted, values.astype(jnp.float32), other)

    def as_float(self, bits):
        # The dialect reinterprets vectors only.
        values = lax.bitcast_convert_type(jnp.full((_LANES,), bits), jnp.float32)
        return jnp.where(lax.broadcasted_iota(jnp.int32, (_LANES,), 0) == 0, values, 0.0).sum(axis=0)
