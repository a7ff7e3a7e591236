"""Problems that users of other servers reported, on the real Triton (the ids are those of docs/cases.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc

from load.serving import PATIENCE_S, START_S, STOP_S, Server, engine_processes, eventually, is_alive, serving
from load.streams import MODEL, Answer, ask, ask_on, inputs
from minisgl_backend.actors.launch import find
from minisgl_backend.messages.client import EngineState
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.tokenizer import Tokenizer

FAKE = {"device": "fake", "fake_step_ms": 5, "lease_s": 2}
LONG = {"max_tokens": 8000}
LONG_S = 40.0  # at least
HUGE = "word " * 4_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        "--model", "smollm2", options=["--model-control-mode=explicit", f"--load-model={MODEL}"], **FAKE
    ) as it:
        yield it


def test_tr_08_stopping_a_synchronous_stream_returns_at_once_and_frees_the_slot(server: Server) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with server.cut_short(8000), sync_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(MODEL, inputs("the cat", stream=True, sampling_parameters=LONG))
        for _ in range(5):
            assert answers.get(timeout=PATIENCE_S)[1] is None
        began = time.monotonic()
        client.stop_stream(cancel_requests=True)
        assert time.monotonic() - began < LONG_S / 2


async def test_rb_06_a_huge_prompt_is_refused_quickly_and_nobody_else_waits(server: Server) -> None:
    """Quickly: measured by what this machine needs, in this minute, to make tokens of it (16 s where there is time)."""
    tokenizer = Tokenizer.load(locate_model("smollm2"))
    began = time.monotonic()
    await asyncio.to_thread(tokenizer.encode, HUGE[: len(HUGE) // 100])
    encoding_s = 100 * (time.monotonic() - began)
    gaps: list[float] = []
    health: list[float] = []
    done = asyncio.Event()

    async def watch() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            while not done.is_set():
                began = time.monotonic()
                assert (await client.get(f"{server.http}/v2/health/ready")).status_code == 200
                health.append(time.monotonic() - began)
                await asyncio.sleep(0.1)

    async def stream() -> None:
        answer = await ask(server.grpc, "the cat", max_tokens=400)
        assert answer.error is None and len(answer.text) > 0
        gaps.extend(later - earlier for earlier, later in zip(answer.times_s, answer.times_s[1:], strict=False))

    async def huge() -> None:
        began = time.monotonic()
        answer = await ask(server.grpc, HUGE)
        assert answer.error is not None and "text_input" in str(answer.error)
        assert time.monotonic() - began < encoding_s
        done.set()

    await asyncio.gather(watch(), huge(), *(stream() for _ in range(4)))
    assert max(*health, *gaps) < encoding_s / 4


async def test_rb_07_many_requests_at_once_are_all_answered_or_refused_at_the_stated_limit(server: Server) -> None:
    """Eight answers take 0.6 s: the queue is full long before the last of 300 has come, also where they come slowly."""
    prompts = [f"Tell me about the number {number}." for number in range(10)]
    expected = [(await ask(server.grpc, prompt, max_tokens=20)).text for prompt in prompts]
    with serving("--model", "smollm2", queue_limit=50, max_running=8, **{**FAKE, "fake_step_ms": 30}) as small:
        answers = await asyncio.gather(
            *(_ask_for_status(small, prompts[number % 10], max_tokens=20) for number in range(300))
        )
        await asyncio.to_thread(small.until_idle)
        again = await ask(small.grpc, prompts[0], max_tokens=20)
    refused = [answer for answer in answers if answer.error is not None]
    assert 0 < len(refused) <= 300 - 58, len(refused)
    for answer in refused:
        assert "UNAVAILABLE" in str(answer.error.status()) and "queue is full" in str(answer.error), answer.error
    for number, answer in enumerate(answers):
        if answer.error is None:
            assert (answer.text, answer.reason, answer.finals) == (expected[number % 10], "length", 1)
    assert again.text == expected[0]


async def _ask_for_status(server: Server, text: str, **parameters: Any) -> Answer:
    async with aio_grpc.InferenceServerClient(server.grpc) as client:
        return await ask_on(client, text, status=True, **parameters)


async def test_tr_04_unload_lets_streams_finish_and_a_new_load_serves(server: Server) -> None:
    ended = await asyncio.gather(
        *(ask(server.grpc, "the cat", max_tokens=20) for _ in range(18)),
        ask(server.grpc, "the cat", cancel_after=3, max_tokens=500),
        ask(server.grpc, "the cat", temperature=-1),
    )
    assert [answer.finals for answer in ended[:18]] == [1] * 18 and ended[19].error is not None
    running = [asyncio.create_task(ask(server.grpc, "the cat", max_tokens=600)) for _ in range(5)]

    def begun() -> bool:  # or, where the test had no time to look, over
        return server.stats().running == 5 or any(task.done() for task in running)

    await asyncio.to_thread(eventually, begun, PATIENCE_S, lambda: str(server.stats()))
    async with httpx.AsyncClient(base_url=f"{server.http}/v2/repository", timeout=PATIENCE_S) as http:
        assert (await http.post(f"models/{MODEL}/unload")).status_code == 200
        answers = await asyncio.gather(*running)
        assert all(answer.reason == "length" and answer.finals == 1 for answer in answers)
        await asyncio.to_thread(eventually, lambda: _is_unloaded(server), PATIENCE_S, lambda: "UNLOADING for ever")
        nobody = "the engine outlives its unload"
        await asyncio.to_thread(eventually, lambda: not engine_processes(server.runtime), PATIENCE_S, lambda: nobody)
        assert (await http.post(f"models/{MODEL}/load")).status_code == 200
    assert (await ask(server.grpc, "the cat", max_tokens=3)).finals == 1
    eventually(lambda: any(map(unloaded, server.lines)), PATIENCE_S, lambda: str(server.lines))
    assert sum(map(unloaded, server.lines)) == 1  # finalize ran once


def unloaded(line: str) -> bool:
    return line.endswith(" unloaded")


def _is_unloaded(server: Server) -> bool:
    index = httpx.post(f"{server.http}/v2/repository/index", timeout=PATIENCE_S).json()
    return all(model.get("state") == "UNAVAILABLE" for model in index if model["name"] == MODEL)


async def test_rb_02_long_prompts_of_wide_characters_are_served_with_every_request_logged() -> None:
    with serving("--model", "smollm2", "--verbose", options=["--log-verbose=1"], **FAKE) as it:
        prompts = [(head + "你" * 400).encode()[:size] for head in ("a", "ab") for size in range(995, 1006)]
        whole = [prompt.decode("utf-8", "ignore") for prompt in prompts]
        answers = await asyncio.gather(*(ask(it.grpc, prompt, max_tokens=3) for prompt in whole))
        assert {(answer.reason, answer.finals) for answer in answers} == {("length", 1)}
        cut = await asyncio.gather(*(ask(it.grpc, prompt, max_tokens=3) for prompt in prompts))
        for prompt, text, answer in zip(prompts, whole, cut, strict=True):
            if prompt != text.encode():  # cut inside a character
                assert "text_input: is not valid UTF-8" in str(answer.error)
            else:
                assert answer.reason == "length"
    assert any("minisgl" in line for line in it.lines) and not any("你" in line for line in it.lines)


async def test_an_engine_that_stays_down_answers_at_once_and_a_new_load_brings_it_back() -> None:
    """A dead engine under a green health check: Triton's readiness can not be changed by a model, its answers can."""
    explicit = ["--model-control-mode=explicit", f"--load-model={MODEL}"]
    with serving("--model", "smollm2", options=explicit, max_restarts=0, **FAKE) as it:
        os.kill(dict((await asyncio.to_thread(it.stats)).pids)["worker-0"], signal.SIGKILL)
        await asyncio.to_thread(
            eventually, lambda: it.stats().state == EngineState.FAILED, PATIENCE_S, lambda: str(it.stats())
        )
        for _ in range(3):
            answer = await asyncio.wait_for(_ask_for_status(it, "the cat", max_tokens=3), PATIENCE_S)
            assert answer.error is not None and "UNAVAILABLE" in str(answer.error.status())
        async with httpx.AsyncClient(base_url=it.http, timeout=PATIENCE_S) as http:
            refused = await http.post(f"/v2/models/{MODEL}/generate", json={"text_input": "the cat"})
            assert refused.status_code == 400 and "engine" in refused.json()["error"]
            assert (await http.post(f"/v2/repository/models/{MODEL}/unload")).status_code == 200
            await asyncio.to_thread(eventually, lambda: _is_unloaded(it), PATIENCE_S, lambda: "UNLOADING for ever")
            assert (await http.post(f"/v2/repository/models/{MODEL}/load")).status_code == 200
        assert (await ask(it.grpc, "the cat", max_tokens=3)).reason == "length"


def small_shared_memory(size: str) -> list[str]:
    """`serving(within=…)`: a /dev/shm of this size, as a container's. Skips where users may not have such a world."""
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm; exec "$@"'
    if subprocess.run([*unshare, script, "sh", "true"], capture_output=True).returncode:
        pytest.skip("this machine gives its users no mount namespace")
    return [*unshare, script, "sh"]


@pytest.mark.parametrize(
    ("size", "names"),
    [("64m", "text_input: the prompt is too long: 2000000 bytes"), ("5m", "use '--shm-size'")],
    ids=["64 MB", "5 MB"],
)
async def test_tr_03_with_little_shared_memory_a_large_prompt_is_told_why_and_all_others_are_served(
    size: str, names: str
) -> None:
    """64 MB is what Docker gives: enough for a prompt far over the limit. Where it is not, Triton says what to do."""
    with serving("--model", "smollm2", within=small_shared_memory(size), **FAKE) as small:
        streams = [ask(small.grpc, "the cat", max_tokens=100) for _ in range(64)]
        *answers, refused = await asyncio.wait_for(
            asyncio.gather(*streams, ask(small.grpc, "word " * 400_000)), 2 * PATIENCE_S
        )
        assert {(answer.reason, answer.finals, answer.error) for answer in answers} == {("length", 1, None)}
        assert len({answer.text for answer in answers}) == 1
        assert refused.error is not None and names in str(refused.error)
        assert (await ask(small.grpc, "the cat", max_tokens=100)).text == answers[0].text
        await asyncio.to_thread(small.until_idle)


async def test_rb_05_servers_that_share_a_machine_answer_their_own_requests(server: Server) -> None:
    """Four at the same moment in one runtime folder: three engines, one of them with two servers."""
    prompts = [[f"Server {name}, tell me about {number}." for number in range(8)] for name in "abcd"]
    expected = [[(await ask(server.grpc, prompt, max_tokens=30)).text for prompt in own] for own in prompts]
    runtime = Path(tempfile.mkdtemp(prefix="msg-"))  # a short path: sockets lie in it
    everybody = threading.Barrier(4, timeout=START_S)

    async def ask_all(url: str, own: list[str]) -> list[str]:
        async with aio_grpc.InferenceServerClient(url) as client:
            answers = await asyncio.gather(*(ask_on(client, prompt, max_tokens=30) for prompt in own))
        return [answer.text for answer in answers]

    def live(own: list[str], max_running: int) -> tuple[list[str], int]:
        with serving("--model", "smollm2", runtime=runtime, max_running=max_running, **FAKE) as it:
            everybody.wait()
            texts = asyncio.run(ask_all(it.grpc, own))
            engines = sum(find(folder) is not None for folder in runtime.iterdir())
            everybody.wait()  # nobody leaves before all have counted
        return texts, engines

    try:
        with ThreadPoolExecutor(4) as pool:
            lives = list(pool.map(live, prompts, (3, 5, 7, 7)))
        assert [texts for texts, _ in lives] == expected
        assert [engines for _, engines in lives] == [3] * 4
        eventually(lambda: not engine_processes(runtime), PATIENCE_S, lambda: "an engine is left")
    finally:
        shutil.rmtree(runtime)


def test_rb_05_a_default_port_in_use_is_named_at_once() -> None:
    minisgl = Path(sys.executable).parent / "minisgl"
    with socket.socket() as holder:
        with contextlib.suppress(OSError):  # then somebody else holds it, which is as good
            holder.bind(("127.0.0.1", 8000))
            holder.listen()
        done = subprocess.run(
            [minisgl, "serve", "--set", "device=fake"], capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert done.returncode == 1
    assert "port 8000 (--http-port) is in use" in done.stderr and "Traceback" not in done.stderr


def test_rb_04_after_a_kill_the_same_ports_serve_three_hundred_requests() -> None:
    with serving("--model", "smollm2", **FAKE) as first:
        expected = asyncio.run(ask(first.grpc, "the cat", max_tokens=10)).text
        family = psutil.Process(first.process.pid).children(recursive=True)
        first.process.kill()
        eventually(lambda: not any(map(is_alive, family)), PATIENCE_S, lambda: "a child of the killed server is left")
        eventually(lambda: not engine_processes(first.runtime), PATIENCE_S, lambda: "the engine outlives its lease")
        with serving("--model", "smollm2", *first.ports, **FAKE) as second:
            assert second.grpc == first.grpc

            async def ask_twenty() -> list[Answer]:
                return await asyncio.gather(*(ask(second.grpc, "the cat", max_tokens=10) for _ in range(20)))

            for _ in range(15):
                assert [answer.text for answer in asyncio.run(ask_twenty())] == [expected] * 20


@pytest.mark.parametrize("name", ["tritonserver", "triton_python_b"])
def test_rb_04_a_killed_server_leaves_no_shared_memory(name: str) -> None:
    """Triton removes its files in /dev/shm when it ends well; after a kill `minisgl serve` does."""
    with serving("--model", "smollm2", **FAKE) as it:
        command = " ".join(psutil.Process(it.pid_of("tritonserver")).cmdline())
        (prefix,) = re.findall(r"shm-region-prefix-name=(\S+)", command)
        shared = Path("/dev/shm")
        assert list(shared.glob(f"{prefix}*"))
        os.kill(it.pid_of(name), signal.SIGKILL)
        if name == "triton_python_b":
            it.process.send_signal(signal.SIGTERM)
        it.process.wait(timeout=STOP_S)
        assert list(shared.glob(f"{prefix}*")) == []


def test_rb_04_ctrl_c_twice_ends_the_answers_in_flight_and_leaves_nothing() -> None:
    with serving("--model", "smollm2", **{**FAKE, "fake_step_ms": 200}) as it:
        family = psutil.Process(it.process.pid).children(recursive=True)
        client = sync_grpc.InferenceServerClient(it.grpc)
        client.start_stream(lambda result, error: None)
        client.async_stream_infer(MODEL, inputs("the cat", stream=True, sampling_parameters=LONG))
        eventually(lambda: it.stats().running, PATIENCE_S, lambda: "the request never ran")
        it.process.send_signal(signal.SIGINT)
        eventually(
            lambda: any("waiting for the answers" in line for line in it.lines), PATIENCE_S, lambda: str(it.lines)
        )
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(timeout=PATIENCE_S) == 130, "\n".join(
            it.lines
        )  # the answer alone would take many minutes
        client.close()
        eventually(lambda: not any(map(is_alive, family)), PATIENCE_S, lambda: "a child of the server is left")
        eventually(lambda: not engine_processes(it.runtime), PATIENCE_S, lambda: "the engine outlives its lease")


def test_tr_08_a_server_that_is_killed_gives_the_callback_of_a_stream_an_error() -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with serving("--model", "smollm2", **FAKE) as it:
        client = sync_grpc.InferenceServerClient(it.grpc)
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(MODEL, inputs("the cat", stream=True, sampling_parameters=LONG))
        assert answers.get(timeout=PATIENCE_S)[1] is None
        os.kill(it.pid_of("tritonserver"), signal.SIGKILL)
        error = None
        while error is None:
            _, error = answers.get(timeout=PATIENCE_S)
        client.close()
    assert answers.empty()


def test_tr_11_fifty_users_under_gevent_end_at_their_limit_and_both_sides_count_the_same(server: Server) -> None:
    """As locust runs them: each user streams without end and is killed in the middle of an answer."""
    users, seconds = 50, 6.0  # twenty answers of each where there is time

    def served() -> int:
        stats = httpx.get(f"{server.http}/v2/models/{MODEL}/stats", timeout=PATIENCE_S).json()["model_stats"][0][
            "inference_stats"
        ]
        return int(stats["success"]["count"]) + int(stats["fail"]["count"])

    before = served()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "load.gevent_users", server.grpc, str(users), str(seconds)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < seconds + PATIENCE_S  # the interpreter's start and end, on a busy machine
    count = json.loads(done.stdout)
    assert count["answered"] >= users and 0 < count["left"] <= users
    assert count["sent"] == count["answered"] + count["left"]
    server.until_idle()
    eventually(lambda: served() - before == count["sent"], PATIENCE_S, lambda: f"{count}, served {served() - before}")
