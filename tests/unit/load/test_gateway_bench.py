"""The benchmark of the gateway: what its client reads, what is compared with what, and how sure a ratio is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from load.bench.gateway import Seen, check_same_answers, interval, line_of, name_of, parse_arguments, settings, summary
from load.sse import BadAnswer, Heard, open_stream

CHUNK = 'data: {"choices": [{"text": "%s"}]}\n\n'


@asynccontextmanager
async def answering(*writes: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """The URL of a server that answers every request with these writes and leaves, and the requests it got."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head + await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])))
        for part in writes:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", asked


def chunked(*texts: str) -> bytes:
    """As uvicorn writes events: each an HTTP chunk."""
    events = [CHUNK % text for text in texts] + ["data: [DONE]\n\n"]
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(one), one.encode()) for one in events)


@pytest.mark.parametrize("cut", [1, 7, 10_000])
async def test_a_stream_is_read_however_it_is_cut(cut: int) -> None:
    whole = chunked("Par", "", "is é")
    async with answering(*(whole[at : at + cut] for at in range(0, len(whole), cut))) as (url, asked):
        stream = await open_stream(url, prompt=[5], max_tokens=2)
        await stream.begun
        await stream.ended
    assert (stream.heard.text, len(stream.heard.times_s)) == ("Paris é", 2), "an event without text is no token"
    body = json.loads(asked[0].partition(b"\r\n\r\n")[2])
    assert body == {"prompt": [5], "max_tokens": 2, "stream": True} and asked[0].startswith(b"POST /v1/completions ")


@pytest.mark.parametrize(
    "written",
    [
        b'HTTP/1.1 429 X\r\n\r\n{"error": {}}',
        chunked("a").partition(b"data: [DONE]")[0],
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "no"}}\n\n',
    ],
)
async def test_what_is_no_whole_stream_is_an_error(written: bytes) -> None:
    async with answering(written) as (url, _):
        with pytest.raises(BadAnswer):
            await (await open_stream(url, prompt="x")).ended


def seen(tokens_per_s: float, ttft_ms: float, gateway_s: float, answer: str = "a") -> Seen:
    return Seen(tokens_per_s, ttft_ms, {"gateway": gateway_s, "worker-0": 1.0}, (answer,))


def test_ratios_are_of_neighbours_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [
        {"direct": seen(100, 10, 0.0), "gateway": seen(90, 11, 0.2)},
        {"direct": seen(50, 20, 0.0), "gateway": seen(50, 24, 0.4, "b")},
    ]
    found = summary(pairs)
    assert found["tokens_per_s_ratio"]["mean"] == pytest.approx(0.95)
    assert found["ttft_ratio"]["mean"] == pytest.approx(1.15)
    assert found["gateway"]["cpu_s_per_1000_tokens"] == {"gateway": pytest.approx(0.3), "worker-0": 1.0}
    assert found["same_answers"] == 0.5 and json.dumps(found)
    assert "gateway 0.300" in capsys.readouterr().out and line_of(pairs[1]) == "tokens/s 1.000, TTFT 1.200"


def test_an_interval_is_students() -> None:
    assert interval([0.9]) == {"mean": 0.9, "low": 0.9, "high": 0.9}
    two = interval([0.9, 1.1])  # t of one degree of freedom: 12.706, standard error: 0.1
    assert two == {"mean": 1.0, "low": pytest.approx(-0.2706), "high": pytest.approx(2.2706)}
    many = interval([0.9, 1.1] * 10)  # 2.093 of nineteen
    assert many["high"] - 1.0 == pytest.approx(2.093 * 0.10260 / 20**0.5, rel=2e-3)


async def test_ways_that_give_other_texts_are_not_measured() -> None:
    async def says(text: str) -> Heard:
        heard = Heard()
        heard.take(text)
        return heard

    await check_same_answers({"direct": lambda *_: says("a"), "gateway": lambda *_: says("a")}, [[1]])
    with pytest.raises(AssertionError, match="disagree"):
        await check_same_answers({"direct": lambda *_: says("a"), "gateway": lambda *_: says("b")}, [[1]])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python /x/bin/minisgl gateway --port 9000", "gateway"),
        ("python /x/bin/minisgl serve --openai 0", "rest"),
        ("/x/bin/tritonserver --model-repository /m", "tritonserver"),
    ],
)
def test_the_gateways_cpu_time_is_told_apart(command: str, name: str) -> None:
    assert name_of(command.split()) == name


def test_settings_of_the_command_line_reach_the_engine() -> None:
    fake = parse_arguments(["--device", "fake", "--fake-step-ms", "2", "--streams", "8"])
    assert settings(fake)["fake_step_ms"] == 2.0 and settings(fake)["max_running"] == 8
    assert "fake_step_ms" not in settings(parse_arguments([])), "a real device takes no such setting"
    with pytest.raises(SystemExit):
        parse_arguments(["--output", "1"])
