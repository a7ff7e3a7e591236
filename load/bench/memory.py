"""What an engine holds in memory, ours beside OpenVINO's, as the sum of its processes' proportional set sizes.

    python -m load.peers.install_openvino                                         (once)
    python -m load.bench.memory --engines llm,triton,openvino --dtype bf16 --case 128/128@32

One engine after the other, each alone. A page that several processes map counts in each by its share, so other programs
of the same libraries make an engine look smaller: measure where there are none. All have a KV cache of the same bytes,
so of the same number of tokens in the same dtype; what of it is not used is nobody's memory. After a warm-up of the
case, memory is looked at while the case runs: the most at any moment, and the same when it is over. The client of
`triton` is no part of the engine and is left out. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from load.bench.peer_cases import Case, make_prompts, parse_cases, word_ids
from load.bench.peer_process import Engine, EngineBroke, start
from load.bench.peer_runners import DTYPES, NotInstalled, runner
from load.bench.peers import parse_engines
from load.bench.regime import regime
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.tokenizer import Tokenizer

_EVERY_S = 0.25
_MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """Proportional set size of one process, bytes."""

    name: str
    private: int  # anonymous: heaps, stacks, KV
    files: int  # mapped: weights, libraries
    shared: int  # memory that processes share, such as Triton's

    @property
    def total(self) -> int:
        return self.private + self.files + self.shared


@dataclass(frozen=True)
class Memory:
    """Of one engine."""

    engine: str
    started: tuple[Held, ...]  # before its first prompt
    most: tuple[Held, ...]  # at the moment of the largest sum
    after: tuple[Held, ...]


def main() -> None:
    """Measures the engines of the command line."""
    arguments = parse_arguments(sys.argv[1:])
    words = word_ids(Tokenizer.load(locate_model(arguments.model)))
    found, refused = [], {}
    with tempfile.TemporaryDirectory(prefix="memory-") as logs:
        for name in arguments.engines:
            try:
                made = runner(name, arguments, arguments.case.streams, arguments.case.context)
                with start(made, Path(logs), arguments.start_s) as engine:
                    found.append(measure(name, engine, arguments.case, words))
            except (NotInstalled, EngineBroke) as error:
                refused[name] = str(error)
                print(f"{name} was left out: {error}")
                continue
            print("\n".join(lines(found[-1])), flush=True)
    settings = vars(arguments) | {"case": str(arguments.case)}
    rows = [asdict(one) for one in found]
    print(json.dumps({"bench": "memory", **regime(), **settings, "refused": refused, "rows": rows}))


def measure(name: str, engine: Engine, case: Case, words: Sequence[int]) -> Memory:
    """A warm-up, then the case."""
    started = held(engine)
    engine.generate(make_prompts(words, case, "warm-up"), case.output)
    with watched(engine) as seen:
        engine.generate(make_prompts(words, case, "round"), case.output)
    return Memory(name, started, max(seen, key=total), held(engine))


@contextmanager
def watched(engine: Engine) -> Iterator[list[tuple[Held, ...]]]:
    """What it holds, again and again while the block runs."""
    seen, over = [held(engine)], threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY_S):
            seen.append(held(engine))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def held(engine: Engine) -> tuple[Held, ...]:
    """Of this moment, process by process; the largest first."""
    found = []
    for process in engine.processes():
        if process.pid == engine.pid and engine.ready.driver == "client":
            continue
        with suppress(psutil.NoSuchProcess, OSError):
            found.append(held_by(process.pid, role(process.cmdline())))
    return tuple(sorted(found, key=lambda one: -one.total))


def held_by(pid: int, name: str) -> Held:
    """Raises OSError: there is no such process, or it is not ours to look at."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kib = {key: int(fields[key].split()[0]) for key in ("Pss_Anon", "Pss_File", "Pss_Shmem")}
    return Held(name, kib["Pss_Anon"] << 10, kib["Pss_File"] << 10, kib["Pss_Shmem"] << 10)


def role(command: Sequence[str]) -> str:
    """A short name of a process by its command line: the module it runs, its model, or the program."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    for part in command[1:]:
        if part.endswith("/1/model.py"):
            return f"stub of {Path(part).parents[1].name}"
    program = Path(command[1] if len(command) > 1 and "python" in Path(command[0]).name else command[0])
    return program.name


def total(parts: Sequence[Held]) -> int:
    """Bytes."""
    return sum(one.total for one in parts)


def lines(memory: Memory) -> Iterator[str]:
    """For people."""
    sums = (f"{total(parts) / _MIB:.0f} MiB" for parts in (memory.started, memory.most, memory.after))
    yield "{}: {} when it had started, {} at most, {} afterwards".format(memory.engine, *sums)
    for one in memory.most:
        parts = (f"{part / _MIB:6.0f}" for part in (one.total, one.private, one.files, one.shared))
        yield "  {} MiB: {} private, {} files, {} shared   {}".format(*parts, one.name)


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line; engines come back as NAME:DTYPE."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engines", default="llm,triton,openvino", help="NAME or NAME:DTYPE, with commas (see load.bench.peers)")
    add("--dtype", default="bf16", choices=DTYPES, help="of every engine that names none")
    add("--case", default="128/128@32", metavar="INPUT/OUTPUT@STREAMS")
    add("--model", default="smollm2")
    add("--threads", type=int, default=0, help="of our worker; 0: its default")
    add("--kv-bytes", type=int, default=1 << 30, help="of each engine's KV cache; OpenVINO takes whole GiB")
    add("--start-s", type=float, default=300.0, help="patience with a start")
    arguments = parser.parse_args(given)
    try:
        (arguments.case,) = parse_cases([arguments.case])
        arguments.engines = parse_engines(arguments.engines, arguments.dtype, beside_ours=False)
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    main()
