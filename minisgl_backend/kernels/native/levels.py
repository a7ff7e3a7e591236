"""Sets of instructions that the kernels are compiled for."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LEVEL_VARIABLE = "MINISGL_CPU_LEVEL"
"""Names a lower level than the best, or `none`: torch alone."""


@dataclass(frozen=True, slots=True)
class Level:
    """`needs`: words of Linux' /proc/cpuinfo; each has the compiler's flag of the same meaning in `flags`."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]

    @property
    def namespace(self) -> str:
        """Of its operators: torch.ops.NAMESPACE."""
        return f"minisgl_{self.name}"


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16")
_AMX = ("amx_tile", "amx_bf16", "amx_int8")


def _level(name: str, *words: str) -> Level:
    flags = (f"-m{_FLAG_OF.get(word, word.replace('_', '-'))}" for word in words)
    return Level(name, frozenset(words), tuple(flags))


_FLAG_OF = {"avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16"}

LEVELS = (_level("amx", *_AVX2, *_AVX512, *_AMX), _level("avx512", *_AVX2, *_AVX512), _level("avx2", *_AVX2))
"""Best first. `avx512` is that of Cooper Lake, Sapphire Rapids and Zen 4 on; what came before takes `avx2`."""


def levels_here() -> tuple[Level, ...]:
    """Those that this machine runs, best first. Asks the kernel for the matrix registers, which it gives for good."""
    words = _processor_words()
    levels = [level for level in LEVELS if level.needs <= words]
    return tuple(level for level in levels if level.name != "amx" or _tiles_granted())


def best_level() -> Level | None:
    """Of this machine, or the one that MINISGL_CPU_LEVEL names if the machine has it; None: no kernels of our own."""
    here = levels_here()
    wanted = os.environ.get(LEVEL_VARIABLE)
    if wanted:
        here = tuple(level for level in here if level.name == wanted)
    return here[0] if here else None


def _processor_words() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":")[1].split()) for line in lines if line.startswith("flags")), frozenset())


@cache
def _tiles_granted() -> bool:
    """arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), of Linux 5.16 on: without it the first tile ends the process."""
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
