"""Reads which kernels a compiled function launches on a GPU, and which CUDA graph each of them is in.

XLA turns a compiled function into a list of thunks: kernel launches, library calls and copies. It then groups thunks
into command buffers, which the driver replays as CUDA graphs. The list is read from XLA's dump.
"""

import pathlib
import re
import tempfile
from typing import Any, NamedTuple

import jax

ONE_GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
"""Compiler options for `jax.jit` that put loops into CUDA graphs too; XLA for a CPU ignores them.

By default XLA excludes loops, and a step with a drafting loop becomes several graphs and a loop on the host."""

_LINE = re.compile(r"^(?P<indent>\s*)\d+: (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?P<rest>.*)$")
# Thunks that contain others, which follow them with indentation.
_CONTAINERS = {"kCommandBuffer", "kSequential", "kWhile", "kConditional"}


class Thunk(NamedTuple):
    """One entry of XLA's launch list."""

    kind: str
    """XLA's name of the kind, such as `kCustomKernel`, `kGemm` or `kCopy`."""
    name: str
    """The kernel's name, if XLA reports one."""
    graph: int | None
    """Number of the CUDA graph that contains the thunk; None if it is in no graph."""


def compile_with_thunks(
    lowered: jax.stages.Lowered, *, compiler_options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, list[Thunk]]:
    """Compiles for a GPU, present or described, and reads the launch list.

    Args:
        lowered: A function lowered for CUDA.
        compiler_options: Further XLA options, by flag name without the dashes.

    Returns:
        The compiled function and its thunks in order, without containers.

    Raises:
        ValueError: XLA wrote no launch list, because the function was compiled for another platform.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **(compiler_options or {})}
        compiled = lowered.compile(compiler_options=options)
        # XLA writes the second list only if its passes changed the first one.
        files = [
            *sorted(pathlib.Path(folder).glob("*thunk_sequence.txt")),
            *sorted(pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")),
        ]
        if not files:
            raise ValueError("XLA wrote no launch list; expected a function lowered for CUDA")
        return compiled, parse_thunks(files[-1].read_text())


def parse_thunks(text: str) -> list[Thunk]:
    """Parses XLA's launch list and returns the thunks in order, without containers."""
    thunks: list[Thunk] = []
    num_graphs = 0
    graph_indent: int | None = None
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent, kind = len(match["indent"]), match["kind"]
        if graph_indent is not None and indent <= graph_indent:
            graph_indent = None
        if kind == "kCommandBuffer":
            graph_indent = indent
            num_graphs += 1
        elif kind not in _CONTAINERS:
            graph = None if graph_indent is None else num_graphs - 1
            thunks.append(Thunk(kind, match["rest"].split(" grid:")[0].strip(), graph))
    return thunks


def is_one_graph(thunks: list[Thunk]) -> bool:
    """Returns whether all thunks are in the same CUDA graph."""
    return bool(thunks) and {thunk.graph for thunk in thunks} == {0}
