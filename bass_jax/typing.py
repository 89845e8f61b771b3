"""The dimension table and the array types that the package's annotations use.

| letter | meaning |
|---|---|
| B | rows of the batch |
| T | query tokens of a pass; ``G + 1`` when it verifies |
| G | draft tokens of a step (the bucket) |
| S | capacity of a cache, in tokens |
| C | capacity of a token buffer |
| N | query heads |
| K | key-value heads |
| R | query heads per key-value head, ``N / K`` |
| H | size of a head |
| D | width of the residual stream |
| E | width of the input embedding (``D`` unless projected) |
| F | width of the mlp |
| V | vocabulary |
| O | vocabulary that a trimmed draft can propose |
| L | layers |
"""

from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int, Key, UInt

type Params = Any
"""A nested dict of arrays, as Linen's ``init`` returns under ``"params"``."""

__all__ = ["Array", "Bool", "Float", "Int", "Key", "Params", "UInt"]
