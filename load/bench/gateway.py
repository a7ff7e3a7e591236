"""What the gateway costs: OpenAI's API over HTTP beside gRPC direct, on one server, and a thousand idle streams.

    python -m load.bench.gateway --dtype fp32                              (SmolLM2)
    python -m load.bench.gateway --device fake --fake-step-ms 50           (no model: the path alone)
    python -m load.bench.gateway --pairs 0 --idle 1000                     (memory of idle connections alone)

Correctness first: both ways must give the same greedy text. Then pairs of rounds, alternating which way goes first, the
same prompts (token ids, new ones in each pair, apart in the cache by a salt) in --streams streams. The ratio of each
pair, gateway over direct, their mean and its 95 % interval. CPU time is told for each process, in seconds for a
thousand output tokens; `client` is this one, which reads events of plain sockets or tritonclient's asyncio streams.

Idle: that many streams on the fake device, each begun and then waiting for its second token; what they added to the
memory of each process (proportional set size) while nothing is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import tritonclient.grpc.aio as triton

from load.bench.path import process_name
from load.bench.peer_cases import Case, make_prompts, word_ids
from load.bench.peer_checks import CHECKS
from load.bench.peer_runners import DTYPES
from load.bench.regime import regime
from load.serving import Server, engine_processes, eventually, serving
from load.sse import Heard, open_stream
from load.streams import MODEL
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.tokenizer import Tokenizer

TARGETS = {"TTFT": "at most 1.15", "tokens/s": "at least 0.90", "idle streams": "under 200 MB for 1,000"}
WAYS = ("direct", "gateway")

_CHECKS, _CHECK_TOKENS = 4, 24
_IDLE_STEP_MS = 10_000.0
_MIB = 1 << 20

Ask = Callable[[Sequence[int], int, str], Awaitable[Heard]]
"""(prompt, tokens of its answer, cache salt) → the stream, read to its end. Greedy; end tokens ignored."""


@dataclass(frozen=True)
class Seen:
    """One round of one way."""

    tokens_per_s: float
    ttft_ms: float  # median over the streams
    cpu_s: Mapping[str, float]  # process → seconds for a thousand tokens
    answers: tuple[str, ...]


def main() -> None:
    """Runs what the command line asks for."""
    arguments = parse_arguments(sys.argv[1:])
    found: dict[str, Any] = {"bench": "gateway", **regime(), **vars(arguments)}
    if arguments.pairs:
        found |= asyncio.run(measure(arguments))
    if arguments.idle:
        found["idle_mb"] = asyncio.run(measure_idle(arguments))
    print("asked for: " + "; ".join(f"{key} {value}" for key, value in TARGETS.items()))
    print(json.dumps(found))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The pairs."""
    tokenizer = Tokenizer.load(locate_model(arguments.model))
    case = Case(0, arguments.input, arguments.output, arguments.streams)
    pairs: list[dict[str, Seen]] = []
    with server(arguments, **settings(arguments)) as running:
        async with triton.InferenceServerClient(running.grpc) as client:
            ways = {"direct": direct(client), "gateway": through(openai_url(running))}
            await check_same_answers(ways, [tokenizer.encode(text) for text in CHECKS[:_CHECKS]])
            for number in range(-1, arguments.pairs):  # the first is a warm-up
                prompts = make_prompts(word_ids(tokenizer), case, f"pair {number}")
                order = WAYS[:: -1 if number % 2 else 1]
                pair = {way: await measure_round(running, ways[way], prompts, case.output, way) for way in order}
                if number >= 0:
                    pairs.append(pair)
                    print(f"pair {number + 1:>2}: {line_of(pair)}", flush=True)
            return summary(pairs)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the engine, for the pairs."""
    made = {"device": arguments.device, "kv_bytes": arguments.kv_bytes, "max_running": arguments.streams}
    return {**made, "fake_step_ms": arguments.fake_step_ms} if arguments.device == "fake" else made


def server(arguments: argparse.Namespace, **engine: Any) -> Any:
    """With the gateway beside it."""
    return serving("--model", arguments.model, "--dtype", arguments.dtype, "--openai", "0", **engine)


def openai_url(server: Server) -> str:
    """Of the API, as `minisgl serve` tells it."""

    def url() -> str | None:
        found = re.search(r"OpenAI +(http://\S+)", "\n".join(server.lines))
        return found[1] if found else None

    return eventually(url, 30, lambda: "\n".join(server.lines))


def through(url: str) -> Ask:
    """The gateway, a connection a stream."""

    async def ask(prompt: Sequence[int], tokens: int, salt: str) -> Heard:
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, "cache_salt": salt}
        stream = await open_stream(url, prompt=list(prompt), **greedy)
        await stream.ended
        return stream.heard

    return ask


def direct(client: triton.InferenceServerClient) -> Ask:
    """gRPC, all streams on one connection."""

    async def ask(prompt: Sequence[int], tokens: int, salt: str) -> Heard:
        ids = triton.InferInput("input_ids", [len(prompt)], "INT32")
        ids.set_data_from_numpy(_int32(prompt))
        fields = {"stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": tokens, "cache_salt": salt}

        async def requests() -> Any:
            yield {"model_name": MODEL, "inputs": [ids], "parameters": fields}

        heard = Heard()
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            if (text := result.as_numpy("text_output")) is not None:
                heard.take(b"".join(text.reshape(-1)).decode())
        return heard

    return ask


async def check_same_answers(ways: Mapping[str, Ask], prompts: Sequence[Sequence[int]]) -> None:
    """One prompt at a time, so that both compute the same steps."""
    for number, prompt in enumerate(prompts):
        told = {way: (await ask(prompt, _CHECK_TOKENS, f"check {number} {way}")).text for way, ask in ways.items()}
        assert told["direct"] and told["direct"] == told["gateway"], f"the ways disagree: {told}"


async def measure_round(server: Server, ask: Ask, prompts: Sequence[Sequence[int]], tokens: int, salt: str) -> Seen:
    """All prompts at once."""
    before, start = cpu_by_process(server), time.perf_counter()
    heard = await asyncio.gather(*(ask(prompt, tokens, salt) for prompt in prompts))
    thousands = len(prompts) * tokens / 1000
    used = {name: (cpu_s - before.get(name, 0.0)) / thousands for name, cpu_s in cpu_by_process(server).items()}
    return Seen(
        tokens_per_s=1000 * thousands / (max(one.times_s[-1] for one in heard) - start),
        ttft_ms=1000 * (statistics.median(one.times_s[0] for one in heard) - start),
        cpu_s=used,
        answers=tuple(one.text for one in heard),
    )


def cpu_by_process(server: Server) -> dict[str, float]:
    """CPU seconds since its start of each process that takes part, by name; `rest` is that of all others."""
    return _by_process(server, lambda process: sum(process.cpu_times()[:2]))


def memory_by_process(server: Server) -> dict[str, float]:
    """Proportional set size in bytes, by name."""
    return _by_process(server, lambda process: float(process.memory_full_info().pss))


def _by_process(server: Server, look: Callable[[psutil.Process], float]) -> dict[str, float]:
    own = psutil.Process(os.getpid())
    found = {"client": look(own)}
    below = {child.pid for child in psutil.Process(server.process.pid).children(recursive=True)}
    for pid in sorted({server.process.pid} | below | engine_processes(server.runtime)):
        try:
            process = psutil.Process(pid)
            name = name_of(process.cmdline())
            found[name] = found.get(name, 0.0) + look(process)
        except psutil.Error:
            continue
    return found


def name_of(command: Sequence[str]) -> str:
    """As in `load.bench.path`, and the gateway."""
    return "gateway" if "gateway" in command else process_name(command)


def summary(pairs: Sequence[Mapping[str, Seen]]) -> dict[str, Any]:
    """What the last line tells: medians of each way, and the ratios with their interval. Prints the same for people."""
    rates = [pair["gateway"].tokens_per_s / pair["direct"].tokens_per_s for pair in pairs]
    firsts = [pair["gateway"].ttft_ms / pair["direct"].ttft_ms for pair in pairs]
    made: dict[str, Any] = {"tokens_per_s_ratio": interval(rates), "ttft_ratio": interval(firsts)}
    for way in WAYS:
        seen = [pair[way] for pair in pairs]
        names = sorted({name for one in seen for name in one.cpu_s})
        cpu = {name: round(statistics.median(one.cpu_s.get(name, 0.0) for one in seen), 4) for name in names}
        rate, first = (statistics.median(getattr(one, field) for one in seen) for field in ("tokens_per_s", "ttft_ms"))
        made[way] = {"tokens_per_s": round(rate, 2), "ttft_ms": round(first, 2), "cpu_s_per_1000_tokens": cpu}
        shares = ", ".join(f"{name} {value:.3f}" for name, value in cpu.items())
        print(f"{way:<8} {rate:.1f} tokens/s, TTFT {first:.1f} ms; CPU s per 1,000 tokens: {shares}")
    same = [a == b for pair in pairs for a, b in zip(pair["direct"].answers, pair["gateway"].answers, strict=True)]
    made["same_answers"] = round(sum(same) / len(same), 3)  # rounding may part them where steps hold other rows
    for name, ratio in (("tokens/s", made["tokens_per_s_ratio"]), ("TTFT", made["ttft_ratio"])):
        print(
            f"{name}, gateway over direct: {ratio['mean']:.3f}, 95 % interval {ratio['low']:.3f} … {ratio['high']:.3f}"
        )
    return made


def line_of(pair: Mapping[str, Seen]) -> str:
    """For people who wait."""
    one, two = pair["direct"], pair["gateway"]
    return f"tokens/s {two.tokens_per_s / one.tokens_per_s:.3f}, TTFT {two.ttft_ms / one.ttft_ms:.3f}"


def interval(values: Sequence[float]) -> dict[str, float]:
    """Their mean and its 95 % interval; of one value there is none."""
    mean, half = statistics.fmean(values), 0.0
    if len(values) > 1:
        half = _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


def _student(freedom: int) -> float:
    """The quantile at 97.5 % of Student's t: exact for few, then Cornish and Fisher's series, within 0.1 %."""
    few = (12.706, 4.303, 3.182, 2.776)
    if freedom <= len(few):
        return few[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


async def measure_idle(arguments: argparse.Namespace) -> dict[str, float]:
    """MB that the idle streams added to each process, and to the server's all together."""
    count = arguments.idle
    engine = {"device": "fake", "fake_step_ms": _IDLE_STEP_MS, "max_running": count, "token_budget": 4 * count + 64}
    with server(arguments, **engine) as running:
        url = openai_url(running)
        before = memory_by_process(running)
        opening = [open_stream(url, prompt=[100 + number % 50], max_tokens=8) for number in range(count)]
        streams = await asyncio.gather(*opening)
        try:
            await asyncio.gather(*(stream.begun for stream in streams))
            added = {name: used - before.get(name, 0.0) for name, used in memory_by_process(running).items()}
        finally:
            for stream in streams:
                stream.close()
    told = {name: round(value / 1e6, 1) for name, value in added.items()}
    told["server"] = round(sum(value for name, value in told.items() if name != "client"), 1)
    print(f"{count} idle streams, MB: " + ", ".join(f"{name} {value}" for name, value in told.items()))
    return told


def _int32(values: Sequence[int]) -> Any:
    import numpy as np

    return np.array(values, dtype=np.int32)


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--device", default="auto", help="`fake` computes no model")
    add("--fake-step-ms", type=float, default=50.0, help="with --device fake: time of a step")
    add("--streams", type=int, default=16)
    add("--input", type=int, default=32, help="tokens of a prompt")
    add("--output", type=int, default=64, help="tokens of an answer")
    add("--pairs", type=int, default=10)
    add("--kv-bytes", type=int, default=1 << 30)
    add("--idle", type=int, default=0, help="idle streams whose memory is measured; 0: leave it out")
    arguments = parser.parse_args(given)
    if min(arguments.streams, arguments.input) < 1 or arguments.output < 2 or min(arguments.pairs, arguments.idle) < 0:
        parser.error("streams and input must be at least 1, output at least 2, pairs and idle no less than 0")
    return arguments


if __name__ == "__main__":
    main()
