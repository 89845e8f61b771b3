"""Masked acceptance in Pallas' Triton dialect: NVIDIA GPUs from sm_80 on.

jax has deprecated this dialect since 0.11.0; the module goes when jax drops it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.acceptance.bodies import PrefillChunk
from kernels_pallas.acceptance.kernels import Operand, accept_in_kernels
from kernels_pallas.acceptance.verdict import KernelAcceptance
from kernels_pallas.targets import silence_triton_deprecation
from kernels_pallas.tuning import AcceptanceTiles


def masked_acceptance_triton(*arguments, tiles: AcceptanceTiles, interpret: bool = False) -> KernelAcceptance:
    """The op of `kernels_pallas.ops.masked_acceptance`.

    Args:
        *arguments: As `kernels_pallas.acceptance.kernels.accept_in_kernels` takes them.
        tiles: Chunk sizes and launch parameters.
        interpret: Run in jax's interpreter.

    Returns:
        The result.
    """
    silence_triton_deprecation()
    options = {
        "compiler_params": plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        "interpret": interpret,
    }
    return accept_in_kernels(functools.partial(_launch, options), *arguments, tiles=tiles)


def _launch(options, body, grid, inputs: Sequence[Operand], dtypes, name):
    """`kernels_pallas.acceptance.kernels.Launch` as one `pallas_call`."""

    def block_of(operand: Operand) -> pl.BlockSpec:
        depth, shape = operand.depth, operand.array.shape
        return pl.BlockSpec((None,) * depth + shape[depth:], lambda *at: (*at[:depth], *(0,) * (len(shape) - depth)))

    def kernel(*refs):
        body(_Dialect(), [pl.program_id(axis) for axis in range(len(grid))], *refs)

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[block_of(operand) for operand in inputs],
        out_specs=[pl.BlockSpec((None,) * len(grid), lambda *at: at) for _ in dtypes],
        out_shape=[jax.ShapeDtypeStruct(grid, dtype) for dtype in dtypes],
        name=name,
        **options,
    )(*(operand.array for operand in inputs))


class _Dialect:
    """`kernels_pallas.acceptance.bodies.Dialect`: masked loads, so that the last piece may stick out."""

    def chunk(self, index, size, vocab_size):
        token = index * size + jnp.arange(size)
        return PrefillChunk(index * size, token, token < vocab_size)

    def read(self, ref, chunk, other, *, row=None, is_wanted=True):
        place = pl.ds(chunk.start, chunk.token.shape[0])
        ref = ref.at[place] if row is None else ref.at[row, place]
        values = plgpu.load(ref, mask=chunk.is_own & is_wanted, other=other)
        return values.astype(jnp.float32)

    def as_float(self, bits):
        return lax.bitcast_convert_type(bits, jnp.float32)
