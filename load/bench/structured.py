"""What forms of answers cost: throughput with a schema beside that without, and streams' pace under hostile forms.

    python -m load.bench.structured --streams 16 --pairs 20

Throughput: pairs of rounds, alternating, every stream exactly --output tokens; the ratio of each pair, their mean and
its 95 % interval. Pace: P99 of the time between tokens of --streams streams, alone and while twenty hostile schemas and
patterns are sent at once; each must be refused. Correctness first: a finished answer must be valid JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from load.bench.regime import regime
from minisgl_backend.errors import RequestError
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}
SHORT = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["age"]}


def hostile() -> list[dict[str, Any]]:
    """Twenty, each another one: too large, too deep, endless, or costly to compile."""
    nested: Any = {"type": "integer"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested}}
    wide = {
        f"p{i}": {"type": "object", "properties": {f"q{j}": {"type": "string"} for j in range(25)}} for i in range(30)
    }
    return [
        *({"guided_regex": f"(.{{0,{1500 + i}}}b.{{0,900}}c){{1,3}}"} for i in range(8)),
        *({"guided_regex": f"(.{{1,900}}x){{1,{18 + i}}}"} for i in range(2)),
        *({"guided_json": {"type": "string", "pattern": f"(.{{1,900}}x){{1,{20 + i}}}"}} for i in range(2)),
        {"guided_regex": "(a{1,1000}){1,1000}"},
        {"guided_json": {"enum": [f"value {i}" for i in range(20_000)]}},
        {"guided_json": nested},
        {"guided_json": {"type": "object", "properties": {"deep": {"type": "object", "properties": wide}}, "not": {}}},
        {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"guided_grammar": "root ::= root"},
        {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
        {"guided_choice": ["x" * 70_000]},
    ]


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--output", type=int, default=48, help="tokens of a stream, in throughput")
    parser.add_argument("--pace-output", type=int, default=128, help="tokens of a stream, in pace; 0: leave it out")
    arguments = parser.parse_args()
    with LLM(arguments.model, device="cpu", max_running=arguments.streams) as llm:
        _check(llm)
        ratios = _throughput(llm, arguments.streams, arguments.output, arguments.pairs)
        found: dict[str, Any] = {"ratios": [round(ratio, 4) for ratio in ratios], **_interval(ratios)}
        if arguments.pace_output:
            found.update(_pace(llm, arguments.streams, arguments.pace_output))
    print(json.dumps({"bench": "structured", **regime(), **vars(arguments), **found}))


def _check(llm: LLM) -> None:
    answer = llm.generate(["How old?"], SamplingParams(max_tokens=60, temperature=0.0, guided_json=SHORT))[0]
    assert 1 <= json.loads(answer.text)["age"] <= 99, answer.text


def _throughput(llm: LLM, streams: int, output: int, pairs: int) -> list[float]:
    """Of each pair: tokens per second with the schema over those without."""
    prompts = [f"Story number {index}: once upon a time" for index in range(streams)]
    plain = SamplingParams(max_tokens=output, temperature=1.0, seed=1, ignore_eos=True)
    formed = SamplingParams(max_tokens=output, temperature=1.0, seed=1, guided_json=ENDLESS)
    for params in (plain, formed):
        _round(llm, prompts, params)
    ratios = []
    for pair in range(pairs):
        order = (plain, formed) if pair % 2 else (formed, plain)
        times_s = {id(params): _round(llm, prompts, params) for params in order}
        ratios.append(times_s[id(plain)] / times_s[id(formed)])
        print(f"pair {pair + 1:>2}: {ratios[-1]:.3f}", flush=True)
    return ratios


def _round(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> float:
    began_s = time.perf_counter()
    answers = llm.generate(list(prompts), params)
    assert all(answer.num_output_tokens == params.max_tokens for answer in answers)
    return time.perf_counter() - began_s


def _interval(ratios: Sequence[float]) -> dict[str, float]:
    mean, half = statistics.fmean(ratios), 0.0
    if len(ratios) > 1:  # 2.09: Student's t of twenty values; for other numbers it is close enough
        half = 2.09 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    print(f"throughput with a schema: {mean:.3f} of that without, 95 % interval {mean - half:.3f} … {mean + half:.3f}")
    return {"ratio": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


def _pace(llm: LLM, streams: int, output: int) -> dict[str, Any]:
    quiet = _gaps_ms(llm, streams, output)
    refusals: list[tuple[float, str]] = []
    senders = [threading.Thread(target=_refused, args=(llm, form, refusals)) for form in hostile()]
    disturbed = _gaps_ms(llm, streams, output, senders)
    for sender in senders:
        sender.join()
    p99 = [float(np.percentile(gaps, 99)) for gaps in (quiet, disturbed)]
    slowest_s = max(seconds for seconds, _ in refusals)
    taken = sum(not words for _, words in refusals)
    print(f"P99 between tokens: {p99[0]:.1f} ms alone, {p99[1]:.1f} ms with {len(refusals)} hostile forms")
    print(f"all answered within {slowest_s:.1f} s; {taken} of them were taken")
    return {"p99_ms": p99, "pace": round(p99[1] / p99[0], 3), "slowest_refusal_s": round(slowest_s, 2), "taken": taken}


def _refused(llm: LLM, form: dict[str, Any], refusals: list[tuple[float, str]]) -> None:
    began_s, words = time.perf_counter(), ""
    try:
        llm.generate(["x"], SamplingParams(max_tokens=1, **form))
    except RequestError as error:
        words = str(error)
    refusals.append((time.perf_counter() - began_s, words))


def _gaps_ms(llm: LLM, streams: int, output: int, beside: Sequence[threading.Thread] = ()) -> list[float]:
    """Times between the pieces of all streams. beside: started when every stream has begun."""
    gaps: list[list[float]] = [[] for _ in range(streams)]
    begun = threading.Barrier(streams + 1)

    def read(index: int) -> None:
        last_s, waited = 0.0, False
        for _ in llm.stream(f"Story {index}", SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)):
            now_s = time.perf_counter()
            if waited:
                gaps[index].append((now_s - last_s) * 1e3)
            else:
                begun.wait()
                waited = True
            last_s = now_s

    readers = [threading.Thread(target=read, args=(index,)) for index in range(streams)]
    for reader in readers:
        reader.start()
    begun.wait()
    for thread in beside:
        thread.start()
    for reader in readers:
        reader.join()
    return [gap for own in gaps for gap in own]


if __name__ == "__main__":
    main()
