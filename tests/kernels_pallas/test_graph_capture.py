"""Parsing of XLA's launch list."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.graph_capture import Thunk, compile_with_thunks, is_one_graph, parse_thunks

TWO_GRAPHS = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=003 (2)] loop_fusion grid: [1, 1, 1] threads: [8, 1, 1]
    002: kGemm         [prev=001 (1) | next=003 (1)] cublas
003: kCopy [source | sink] copy.1
004: kCommandBuffer [source | sink]
    005: kCustomCall   [prev=002 (1) | next=004 (1)] kCustomCall
"""


def test_thunks_have_the_number_of_their_graph():
    thunks = parse_thunks(TWO_GRAPHS)
    assert thunks == [
        Thunk("kCustomKernel", "loop_fusion", 0),
        Thunk("kGemm", "cublas", 0),
        Thunk("kCopy", "copy.1", None),
        Thunk("kCustomCall", "kCustomCall", 1),
    ]
    assert not is_one_graph(thunks)
    assert is_one_graph(thunks[:2])
    assert not is_one_graph(thunks[:3])
    assert not is_one_graph([])


def test_cpu_has_no_launch_list():
    lowered = jax.jit(jnp.sin).lower(jnp.zeros(4))
    with pytest.raises(ValueError, match="lowered for CUDA"):
        compile_with_thunks(lowered)
