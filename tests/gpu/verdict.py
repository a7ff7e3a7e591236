"""What the compiler says of a kernel, and whether that is well. Loads no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAPABILITIES = (80, 90, 100)
"""A100; H100 and H200; B200."""

SPILL_BYTES = 128
"""At most, of a thread, stores and loads together: sixteen registers that go out once and come back once."""

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""At most, of one block."""

MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one launch on one architecture."""

    kernel: str
    capability: int
    launch: str
    registers: int
    spill_bytes: int  # stores and loads, of a thread
    stack_bytes: int
    shared_bytes: int
    warps: int
    instructions: tuple[str, ...]  # of MATRIX_INSTRUCTIONS
    dots: tuple[tuple[int, int, int, str], ...]  # rows, columns, depth, type of the operands
    fault: str  # empty: nothing is wrong


def fault_of(compiled: Compiled) -> str:
    """What is wrong with it; empty: nothing."""
    if not compiled.registers:
        return "the compiler's report tells no registers"
    if compiled.spill_bytes > SPILL_BYTES:
        return f"spills {compiled.spill_bytes} bytes a thread, more than {SPILL_BYTES}"
    if compiled.shared_bytes > SHARED_BYTES[compiled.capability]:
        return f"needs {compiled.shared_bytes:,} bytes of shared memory"
    for rows, _, _, kind in compiled.dots:
        if kind in ("bf16", "f16"):
            if not compiled.instructions:
                return f"a product of {kind} without matrix instructions"
            if compiled.capability == 90 and rows >= 64 and "wgmma.mma_async" not in compiled.instructions:
                return f"a product of {rows} rows without wgmma"
    return ""


def table(made: Sequence[Compiled]) -> str:
    """A line for each kernel and architecture: the worst of its launches."""
    lines = [f"{'kernel':34}{'sm':>5}{'launches':>10}{'registers':>11}{'spills':>8}{'shared':>9}  instructions"]
    for key in dict.fromkeys((one.kernel, one.capability) for one in made):
        own = [one for one in made if (one.kernel, one.capability) == key]
        instructions = sorted({name.split(".")[0] for one in own for name in one.instructions})
        lines.append(
            f"{key[0]:34}{key[1]:>5}{len(own):>10}{max(one.registers for one in own):>11}"
            f"{max(one.spill_bytes for one in own):>8}{max(one.shared_bytes for one in own):>9}"
            f"  {' '.join(instructions)}"
        )
    return "\n".join(lines)
