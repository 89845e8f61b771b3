"""Masked acceptance in Pallas' Triton dialect, for NVIDIA GPUs from sm_80 on.

jax 0.11.0 deprecated this dialect; this module will be removed when jax removes it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.acceptance.kernel_bodies import VocabBlock
from kernels_pallas.acceptance.kernels import Operand, accept_in_kernels
from kernels_pallas.acceptance.types import AcceptanceInputs, KernelAcceptance
from kernels_pallas.targets import silence_triton_deprecation
from kernels_pallas.tuning import AcceptanceTiles


def masked_acceptance_triton(
    inputs: AcceptanceInputs, *, tiles: AcceptanceTiles, interpret: bool = False
) -> KernelAcceptance:
    """Computes `kernels_pallas.ops.masked_acceptance`; `interpret` runs it in jax's interpreter."""
    silence_triton_deprecation()
    options = {
        "compiler_params": plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        "interpret": interpret,
    }
    return accept_in_kernels(functools.partial(_launch, options), inputs, tiles)


def _launch(options, body, grid, inputs: Sequence[Operand], dtypes, name):
    """Implements `kernels_pallas.acceptance.kernels.Launch` with one `pallas_call`."""

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
    """Implements `kernels_pallas.acceptance.kernel_bodies.Dialect` with masked loads past the vocabulary."""

    def block(self, index, size, vocab_size):
        token = index * size + jnp.arange(size)
        return VocabBlock(index * size, token, token < vocab_size)

    def read(self, ref, block, other, *, row=None, is_wanted=True):
        place = pl.ds(block.start, block.token.shape[0])
        ref = ref.at[place] if row is None else ref.at[row, place]
        values = plgpu.load(ref, mask=block.is_own & is_wanted, other=other)
        return values.astype(jnp.float32)

    def as_float(self, bits):
        return lax.bitcast_convert_type(bits, jnp.float32)
