"""The process that compiles grammars: it forks a child for each, with limits on time and memory, and outlives it.

    GrammarCompiler ── vocabulary, then jobs, on stdin ──►  python -m (this)  ── fork ──►  child: compile, try out, end
    GrammarCompiler ◄── Loaded, then an answer a job, ────      (waits)       ◄── pipe ───
                        on stdout

Where it stands in the flow: started by `actors/grammars.py` on the first grammar. A child begins with the library and
the vocabulary loaded, so an honest grammar costs milliseconds, and a hostile one takes nothing along when it is killed.
Loading is a fixed second of work, done at the engine's own priority, since all grammars wait for it; what clients sent
steps back behind the engine's processes. The end of the starter closes stdin, which ends this.
"""

from __future__ import annotations

import math
import os
import re
import resource
import select
import signal
import struct
import sys
import time
from typing import IO, TYPE_CHECKING

import msgspec

from minisgl_backend.text.structured.spec import GrammarSpec

if TYPE_CHECKING:
    from minisgl_backend.text.structured.compiling import Compiler

MEMORY_BYTES = 512 << 20  # of address space, of which the library and a large vocabulary take half
WALL_S = 10.0  # of a job, from its fork: for a machine so busy that the time of a job takes longer
NICE = 19


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One grammar."""

    spec: GrammarSpec
    cpu_s: float


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Of a job: one of the four. All but the last are a function of the grammar and the limits."""

    compiled: bytes = b""  # Grammar.compiled
    fault: str = ""  # what is wrong with the grammar: a clause that follows its name, plain and short
    exceeded: bool = False  # the child was ended by its limits, or by what the grammar made the library do
    killed: bool = False  # the child was ended after WALL_S, or from outside: nothing is known of the grammar


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """The first message back: jobs are compiled from now on."""


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The first message."""

    token_bytes: list[bytes]  # of every id what it adds to the text


def write_frame(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Its length, then itself."""
    data = msgspec.msgpack.encode(message)
    pipe.write(struct.pack("<I", len(data)) + data)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """None: the other side has ended."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    data = pipe.read(size)
    return data if len(data) == size else None


def _main() -> None:
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    first = read_frame(jobs)
    if first is None:
        return
    from minisgl_backend.text.structured.compiling import Compiler  # numpy and the grammar library: not in the host

    compiler = Compiler(msgspec.msgpack.decode(first, type=Vocabulary).token_bytes)
    decoder = msgspec.msgpack.Decoder(Job)
    os.nice(NICE)
    write_frame(answers, Loaded())
    while (frame := read_frame(jobs)) is not None:
        write_frame(answers, _in_child(compiler, decoder.decode(frame)))


def _in_child(compiler: Compiler, job: Job) -> Answer:
    told, tells = os.pipe()
    said, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(0)
        os.dup2(says, 2)  # the library's warnings
        _limit(job.cpu_s)
        os._exit(_compile(compiler, job.spec, tells))
    os.close(tells)
    os.close(says)
    try:
        exit_code, answer, warnings = _collect(pid, told, said)
    finally:
        os.close(told)
        os.close(said)
    if exit_code != 0:
        return answer_of_end(exit_code)
    found = msgspec.msgpack.decode(answer, type=Answer)
    if found.compiled and (warning := _words(warnings)):
        return Answer(fault=f"can not be enforced exactly: {warning}")
    return found


def answer_of_end(exit_code: int) -> Answer:
    """Of a child that did not end by itself and well. exit_code: negative for the signal that ended it."""
    return Answer(killed=True) if -exit_code in _FROM_OUTSIDE else Answer(exceeded=True)


_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""By us after WALL_S, by a kernel that is out of memory, by an operator. A limit ends with SIGPROF or status 1."""


def _limit(cpu_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
    whole_s = math.ceil(cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s + 1))  # at the second the kernel would send SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compile(compiler: Compiler, spec: GrammarSpec, tells: int) -> int:
    """In the child. Returns its exit status."""
    try:
        answer = Answer(compiled=compiler.compiled(spec))
    except MemoryError:
        return 1
    except Exception as error:  # the library's own, for what it can not read
        if "bad_alloc" in str(error):
            return 1
        answer = Answer(fault=_words(str(error).encode()) or type(error).__name__)
    with os.fdopen(tells, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(answer))
    return 0


def _collect(pid: int, told: int, said: int) -> tuple[int, bytes, bytes]:
    """Reads both pipes to their ends, or kills the child → its exit code, and what came through either."""
    parts: dict[int, list[bytes]] = {told: [], said: []}
    open_pipes, deadline_s = {told, said}, time.monotonic() + WALL_S
    while open_pipes:
        ready, _, _ = select.select(sorted(open_pipes), [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            break
        for pipe in ready:
            data = os.read(pipe, 1 << 16)
            if not data:
                open_pipes.discard(pipe)
            elif pipe == told or len(parts[pipe]) < 4:
                parts[pipe].append(data)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), b"".join(parts[told]), b"".join(parts[said])


_PLACE = re.compile(r"\[[\d:]+\] [\w./]*?\.(?:cc|h):\d+: (?:Check failed: \(.*?\) is false: )?(?:Warning: )?")


def _words(raw: bytes) -> str:
    """The library's own, without its time and place; they may quote the client at any length."""
    lines = [_PLACE.sub("", line).strip() for line in raw.decode("utf-8", "replace").splitlines()]
    return ascii("; ".join(line for line in lines if line))[1:-1][:300]


if __name__ == "__main__":
    _main()
