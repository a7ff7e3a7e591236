"""Sets of instructions that the kernels are compiled for."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minisgl_backend.errors import ConfigError

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
    try:
        levels = levels_of(Path("/proc/cpuinfo").read_text())
    except OSError:
        return ()
    return tuple(level for level in levels if level.name != "amx" or _tiles_granted())


def levels_of(cpuinfo: str) -> tuple[Level, ...]:
    """Those that a processor has, best first, by what Linux says of it."""
    flags = next((line.split(":")[1] for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    words = frozenset(flags.split())
    return tuple(level for level in LEVELS if level.needs <= words)


def why_no_level() -> str:
    """Where `best_level` gives none."""
    if os.environ.get(LEVEL_VARIABLE) == "none":
        return f"{LEVEL_VARIABLE} is none"
    return "this processor runs none of our kernels"


def best_level() -> Level | None:
    """Of this machine, or the one that MINISGL_CPU_LEVEL names; None: no kernels of our own.

    Raises ConfigError: the variable names what is no level, or none of this machine.
    """
    here = levels_here()
    wanted = os.environ.get(LEVEL_VARIABLE)
    if not wanted:
        return here[0] if here else None
    if wanted == "none":
        return None
    names = [level.name for level in here]
    if wanted not in names:
        raise ConfigError(f"{LEVEL_VARIABLE} is {wanted!r}; this machine has {', '.join([*names, 'none'])}")
    return here[names.index(wanted)]


@cache
def _tiles_granted() -> bool:
    """arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), of Linux 5.16 on: without it the first tile ends the process."""
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
