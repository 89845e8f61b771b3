"""Our reader and writer of safetensors agree with the library, and cast as JAX does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from bass_jax.checkpoint.safetensors import SafetensorsFile, tensor_builders, write_safetensors

ARRAYS = {
    "scale": ((3,), np.float32),
    "bytes": ((3, 5, 7), np.int8),  # An odd number of bytes, so that the next tensor is unaligned.
    "ids": ((509,), np.int32),
    "large": ((600, 509), jnp.bfloat16),
    "none": ((0, 4), np.float32),
    "halves": ((32, 3), np.float16),
}


@pytest.fixture
def arrays():
    draw = np.random.default_rng(0)
    return {name: (9 * draw.standard_normal(shape)).astype(dtype) for name, (shape, dtype) in ARRAYS.items()}


def test_written_files_are_read_by_the_library_and_by_us(arrays, tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, arrays, arrays.__getitem__)
    by_library, builders = load_file(path), tensor_builders(path, arrays)
    assert by_library.keys() == builders.keys() == arrays.keys()
    for name, array in arrays.items():
        for found in (by_library[name], builders[name](), SafetensorsFile(path).read(name)):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


def test_read_tensors_do_not_change_with_the_file(arrays, tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, arrays, arrays.__getitem__)
    found = {name: build() for name, build in tensor_builders(path, arrays).items()}
    with path.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_casting_to_bfloat16_rounds_as_in_jax(tmp_path):
    """The input is random bits, which include subnormal numbers, infinities and ties."""
    bits = np.random.default_rng(0).integers(0, 2**32, 40000, np.uint32)
    bits[:4000] = bits[:4000] & 0xFFFF0000 | 0x8000
    array = bits.view(np.float32)
    array = array[~np.isnan(array)]
    write_safetensors(tmp_path / "a", {"a": array}, lambda _: array)
    expected = {"a": jax.ShapeDtypeStruct(array.shape, jnp.dtype(jnp.bfloat16))}
    found = tensor_builders(tmp_path / "a", expected)["a"]()
    np.testing.assert_array_equal(
        found.view(np.uint16), np.asarray(jnp.asarray(array).astype(jnp.bfloat16)).view(np.uint16)
    )
