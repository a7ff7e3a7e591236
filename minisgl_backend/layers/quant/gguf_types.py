"""How rows of a tensor are stored in a GGUF file: the block types that are read here. Pure, no torch.

Read by models/gguf_file.py, for sizes, and by gguf.py beside this file, which unpacks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """Blocks of so many values in so many bytes."""

    name: str  # as in ggml.h
    values: int
    bytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
"""ggml's number of a type → the type."""
