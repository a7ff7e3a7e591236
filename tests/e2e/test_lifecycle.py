"""The life of the model in a real tritonserver: unload, load again, a load that fails, and the server's stop.

On the fake device, but for a folder with a damaged tensor file: Triton, the stub, the processes and the sockets are the
real ones.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
from tritonclient.utils import InferenceServerException

from load.serving import PATIENCE_S, Server, engine_processes, eventually, is_alive, serving
from load.streams import MODEL, Answer, ask, ask_on
from minisgl_backend.actors.launch import find
from minisgl_backend.models.locate import locate_model
from minisgl_client.client import Client

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
DRAIN_S = 5.0
FAKE = {"model": "smollm2", "device": "fake", "fake_step_ms": 10, "lease_s": 30, "drain_s": DRAIN_S}
ENDLESS = {"max_tokens": 8000, "temperature": 0}
ENDLESS_S = 80.0  # at least, of which the test may take what a busy machine needs
SHORT = {"max_tokens": 80, "temperature": 0}  # 0.8 s, of DRAIN_S
EXPLICIT = ("--model-control-mode=explicit", f"--load-model={MODEL}")


@dataclass
class Site:
    """A server whose model repository is the test's own."""

    server: Server
    repository: Path

    def configure(self, **settings: Any) -> None:
        (self.repository / MODEL / "1" / "model.json").write_text(json.dumps(settings))

    def control(self, what: str) -> httpx.Response:
        """`load` or `unload`, over HTTP."""
        return httpx.post(f"{self.server.http}/v2/repository/models/{MODEL}/{what}", timeout=120)

    def state(self) -> str:
        index = httpx.post(f"{self.server.http}/v2/repository/index", timeout=PATIENCE_S).json()
        return next((str(model.get("state", "")) for model in index if model["name"] == MODEL), "")

    def until_unloaded(self) -> None:
        eventually(lambda: self.state() == "UNAVAILABLE", PATIENCE_S, lambda: f"still {self.state()}")

    def engine(self) -> int:
        place = find(self.server.run_dir)
        assert place is not None
        return place.pid

    def log_since(self, line: int) -> list[str]:
        return self.server.lines[line:]


@contextmanager
def _site(folder: Path) -> Iterator[Site]:
    repository = folder / "repository"
    shutil.copytree(REPOSITORY / MODEL, repository / MODEL)
    (repository / MODEL / "1" / "model.json").write_text(json.dumps(FAKE))
    with serving("--model-repository", str(repository), "--verbose", options=EXPLICIT) as server:
        yield Site(server, repository)


@pytest.fixture(scope="module")
def running_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with _site(tmp_path_factory.mktemp("served")) as site:
        yield site


@pytest.fixture
def site(running_site: Site) -> Iterator[Site]:
    """Loaded and idle, before the test and after it."""
    yield running_site
    if running_site.state() != "READY":
        assert running_site.control("load").status_code == 200
    running_site.server.until_idle()


@pytest.fixture(scope="module")
def unloaded_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """For loads that fail. At the end the right settings are there again, and the model loads."""
    with _site(tmp_path_factory.mktemp("unloaded")) as site:
        assert site.control("unload").status_code == 200
        site.until_unloaded()
        yield site
        site.configure(**FAKE)
        assert site.control("load").status_code == 200


async def _streams(server: Server, count: int, **parameters: Any) -> list[asyncio.Task[Answer]]:
    """Answers that have begun (short ones may have ended), each on a connection of its own, errors as statuses."""

    async def one() -> Answer:
        async with aio_grpc.InferenceServerClient(server.grpc) as client:
            return await ask_on(client, "the cat", status=True, **parameters)

    before = (await asyncio.to_thread(server.stats)).running
    tasks = [asyncio.create_task(one()) for _ in range(count)]

    def begun() -> bool:
        return server.stats().running >= before + count or any(task.done() for task in tasks)

    await asyncio.to_thread(eventually, begun, PATIENCE_S, lambda: str(server.stats()))
    return tasks


def _was_told_of_the_unload(answer: Answer) -> bool:
    error = answer.error
    return error is not None and "UNAVAILABLE" in str(error.status()) and "is being unloaded" in str(error)


async def test_an_unload_lets_answers_finish_within_the_limit_then_ends_the_rest_and_a_load_serves_again(
    site: Site,
) -> None:
    engine = site.engine()
    endless = await _streams(site.server, 4, **ENDLESS)
    body = {"text_input": "the cat", **ENDLESS}
    async with httpx.AsyncClient(timeout=ENDLESS_S) as client:
        whole = asyncio.create_task(client.post(f"{site.server.http}/v2/models/{MODEL}/generate", json=body))
        await asyncio.to_thread(eventually, lambda: site.server.stats().running == 5, PATIENCE_S, lambda: "not begun")
        short = await _streams(site.server, 4, **SHORT)
        began = time.monotonic()
        assert (await asyncio.to_thread(site.control, "unload")).status_code == 200
        refused = await ask(site.server.grpc, "the cat", max_tokens=3)
        assert refused.error is not None and "no available versions" in str(refused.error)  # Triton's own words
        answers = await asyncio.gather(*endless, *short)
        reply = await whole
    took_s = time.monotonic() - began
    assert all(_was_told_of_the_unload(answer) and answer.pieces for answer in answers[:4])
    assert all((answer.reason, answer.finals, answer.error) == ("length", 1, None) for answer in answers[4:])
    assert reply.status_code == 400 and reply.json() == {"error": "the model is being unloaded"}
    assert DRAIN_S <= took_s < ENDLESS_S / 2
    await asyncio.to_thread(site.until_unloaded)
    assert (await asyncio.to_thread(site.control, "load")).status_code == 200
    again = await ask(site.server.grpc, "the cat", max_tokens=3)
    assert (again.reason, again.finals, site.engine()) == ("length", 1, engine)


async def test_a_client_that_is_open_and_idle_does_not_keep_the_model_loaded(site: Site) -> None:
    """An open stream of gRPC would, long after its answers (docs/triton.md): our client has one per request."""
    with Client(site.server.grpc) as client:
        assert client.generate("the cat", max_tokens=3).text
        assert (await asyncio.to_thread(site.control, "unload")).status_code == 200
        await asyncio.to_thread(site.until_unloaded)
        assert (await asyncio.to_thread(site.control, "load")).status_code == 200
        assert client.generate("the cat", max_tokens=3).text


def test_a_reload_serves_from_the_new_instance_while_the_old_one_finishes_without_a_limit(site: Site) -> None:
    config = site.repository / MODEL / "config.pbtxt"
    old = config.read_text()
    try:
        with Client(site.server.grpc) as client:
            stream = client.stream("the cat", **ENDLESS)
            next(stream)
            config.write_text(old + f'parameters {{ key: "drain_s" value {{ string_value: "{DRAIN_S + 1}" }} }}\n')
            assert site.control("load").status_code == 200
            reloaded = time.monotonic()
            assert client.generate("the cat", max_tokens=3).finish_reason == "length"
            while time.monotonic() < reloaded + DRAIN_S + 3:  # 2: the old one's question and its answer
                assert next(stream).finish_reason is None, "it goes on after the limit of an unload"
    finally:
        config.write_text(old)


def _belongings(site: Site) -> dict[str, int]:
    """What must not grow with the number of loads."""
    triton = psutil.Process(site.server.pid_of("tritonserver"))
    host = psutil.Process(site.engine())
    return {
        "stubs": sum("triton_python" in child.name() for child in triton.children()),
        "threads of tritonserver": triton.num_threads(),
        "descriptors of tritonserver": triton.num_fds(),
        "threads of the host": host.num_threads(),
        "descriptors of the host": host.num_fds(),
        "processes of the engine": len(engine_processes(site.server.runtime)),
        "shared memory": len(list(Path("/dev/shm").glob(f"triton_python_backend_shm_region_*{triton.pid}*"))),
    }


async def test_unloads_and_loads_leave_no_thread_process_descriptor_or_lease_behind(site: Site) -> None:
    async def cycle() -> None:
        running = await _streams(site.server, 3, **SHORT)
        assert (await asyncio.to_thread(site.control, "unload")).status_code == 200
        assert [answer.reason for answer in await asyncio.gather(*running)] == ["length"] * 3
        await asyncio.to_thread(site.until_unloaded)
        assert (await asyncio.to_thread(site.control, "load")).status_code == 200
        assert (await ask(site.server.grpc, "the cat", max_tokens=2)).finals == 1

    await cycle()  # threads that tritonserver makes once
    engine, before = site.engine(), await asyncio.to_thread(_belongings, site)
    for _ in range(4):
        await cycle()
    now: dict[str, int] = {}

    def at_rest() -> bool:
        now.update(_belongings(site))
        return all(now[name] <= before[name] for name in before)

    await asyncio.to_thread(eventually, at_rest, PATIENCE_S, lambda: f"before {before}, now {now}")
    assert site.engine() == engine


LOADS_THAT_FAIL = {
    "unknown setting": ({"page_siz": 8}, "unknown setting 'page_siz'; did you mean 'page_size'?"),
    "range": ({"page_size": 0}, "setting 'page_size' must be from 1 to 1024, got 0"),
    "the bridge's setting": ({"drain_s": -1}, "setting 'drain_s' must be from 0 to 86400, got -1.0"),
    "unknown model": ({"model": "smollm3", "device": "cpu"}, "did you mean 'smollm2'?"),
    "no folder": ({"model": "/nowhere/at/all", "device": "cpu"}, "model folder '/nowhere/at/all' does not exist"),
}


def _load_error(site: Site, protocol: str) -> str:
    if protocol == "http":
        response = site.control("load")
        assert response.status_code == 400
        return str(response.json()["error"])
    client = sync_grpc.InferenceServerClient(site.server.grpc)
    try:
        with pytest.raises(InferenceServerException) as raised:
            client.load_model(MODEL)
    finally:
        client.close()
    return str(raised.value.message())


def _says_why_and_nothing_else(site: Site, protocol: str, reason: str) -> None:
    line = len(site.server.lines)
    error = _load_error(site, protocol)
    assert reason in error and "At:" not in error and ".py" not in error, error
    failed = f"failed to load '{MODEL}' version 1"
    eventually(
        lambda: any(failed in text for text in site.log_since(line)), PATIENCE_S, lambda: str(site.log_since(line))
    )
    (logged,) = (text for text in site.log_since(line) if failed in text)
    assert reason in logged and ".py(" not in logged


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("why", LOADS_THAT_FAIL)
def test_a_load_that_fails_says_why_in_its_error_and_in_the_log(unloaded_site: Site, why: str, protocol: str) -> None:
    settings, reason = LOADS_THAT_FAIL[why]
    unloaded_site.configure(**{**FAKE, **settings})
    _says_why_and_nothing_else(unloaded_site, protocol, reason)


def test_a_damaged_tensor_file_fails_the_load_by_its_name_and_leaves_no_process(
    unloaded_site: Site, tmp_path: Path
) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(locate_model("smollm2"), damaged)
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    before = engine_processes(unloaded_site.server.runtime)  # a lease may hold an engine of another test
    unloaded_site.configure(model=str(damaged), device="cpu")
    _says_why_and_nothing_else(unloaded_site, "grpc", weights.name)
    left = "an engine is left"
    eventually(lambda: engine_processes(unloaded_site.server.runtime) <= before, PATIENCE_S, lambda: left)


async def test_a_server_that_is_stopped_ends_what_runs_on_and_leaves_nobody() -> None:
    with serving(**FAKE) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        family += [psutil.Process(pid) for pid in engine_processes(server.runtime)]
        endless = await _streams(server, 4, **ENDLESS)
        short = await _streams(server, 4, **SHORT)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)  # which `minisgl serve` hands on to tritonserver
        answers = await asyncio.gather(*endless, *short)
        took_s = time.monotonic() - began
        code = await asyncio.to_thread(server.process.wait, PATIENCE_S)
        assert code == 0, "\n".join(server.lines)  # 0 only if tritonserver's own is
        assert all(_was_told_of_the_unload(answer) and answer.pieces for answer in answers[:4])
        assert all((answer.reason, answer.finals) == ("length", 1) for answer in answers[4:])
        assert DRAIN_S <= took_s < ENDLESS_S / 2
        eventually(lambda: not any(map(is_alive, family)), PATIENCE_S, lambda: "a process is left")
