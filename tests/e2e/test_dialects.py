"""The thin models beside `minisgl` on the real server: clients as they are, one engine, cancels and errors.

Where the text matters the session's SmolLM2 answers, else a fake device.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from load.serving import Server, engine_processes, eventually, serving

MODELS = ("minisgl", "minisgl_unary")
PROMPT = "The capital of France is"
GREEDY = {"max_tokens": 6, "temperature": 0}
LONG = {"max_tokens": 8000}  # 40 s on the fake device: a test that waits for such an answer fails
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def fakes() -> Iterator[Server]:
    """All models on a fake device, loaded and unloaded by the tests, and all loaded after each."""
    options = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in MODELS)]
    with serving("--model", "smollm2", options=options, device="fake", fake_step_ms=5, lease_s=2) as server:
        for model in MODELS:
            await_ready(server, model)
        yield server


@pytest.fixture
def fake(fakes: Server) -> Iterator[Server]:
    """Idle again after the test."""
    yield fakes
    fakes.until_idle(patience_s=PATIENCE_S)


@pytest.fixture
def real(server: Server) -> Server:
    """SmolLM2, all models ready."""
    for model in MODELS:
        await_ready(server, model)
    return server


def await_ready(server: Server, model: str) -> None:
    url = f"{server.http}/v2/models/{model}/ready"
    eventually(lambda: httpx.get(url).status_code == 200, PATIENCE_S, lambda: "\n".join(server.lines))


def generate(server: Server, model: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.http}/v2/models/{model}/generate", json=body, timeout=PATIENCE_S)


def tensors(client: ModuleType, arrays: dict[str, Any]) -> list[Any]:
    """Inputs for one of tritonclient's modules."""
    made = []
    for name, values in arrays.items():
        array = np.asarray(values)
        tensor = client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def text(*values: str) -> Any:
    return np.array([value.encode() for value in values], dtype=np.object_)


def unary_inputs(client: ModuleType, prompt: str = PROMPT, **sampling: Any) -> list[Any]:
    return tensors(client, {"text_input": text(prompt), "sampling_parameters": text(json.dumps(sampling))})


def by_http(server: Server) -> Any:
    with tritonclient.http.InferenceServerClient(server.http.removeprefix("http://")) as client:
        return client.infer("minisgl_unary", unary_inputs(tritonclient.http, **GREEDY)).as_numpy("text_output")


def by_grpc(server: Server) -> Any:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        return client.infer("minisgl_unary", unary_inputs(tritonclient.grpc, **GREEDY)).as_numpy("text_output")


def by_asyncio(server: Server) -> Any:
    async def infer() -> Any:
        async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:
            return await client.infer("minisgl_unary", unary_inputs(tritonclient.grpc.aio, **GREEDY))

    return asyncio.run(infer()).as_numpy("text_output")


# ── minisgl_unary ────────────────────────────────────────────────────────────────────────────────────────────────


def test_clients_that_can_not_stream_get_the_answer_of_minisgl(real: Server) -> None:
    whole = generate(real, "minisgl", text_input=PROMPT, **GREEDY).json()["text_output"]
    assert whole.startswith(f"{PROMPT} Paris")
    assert generate(real, "minisgl_unary", text_input=PROMPT, **GREEDY).json()["text_output"] == whole
    for ask in (by_http, by_grpc, by_asyncio):
        assert [part.decode() for part in ask(real)] == [whole], ask


async def test_many_unary_requests_run_at_once(fake: Server) -> None:
    """Each takes 100 steps: in turn they would take 32 times as many steps as were run."""
    before = (await asyncio.to_thread(fake.stats)).steps
    async with tritonclient.grpc.aio.InferenceServerClient(fake.grpc) as client:
        inputs = unary_inputs(tritonclient.grpc.aio, max_tokens=100, ignore_eos=True)
        answers = await asyncio.gather(*(client.infer("minisgl_unary", inputs) for _ in range(32)))
    assert [answer.as_numpy("finish_reason").tolist() for answer in answers] == [[b"length"]] * 32
    steps = (await asyncio.to_thread(fake.stats)).steps - before
    assert 100 <= steps < 32 * 100 / 4


def test_a_refusal_and_a_deadline_reach_a_unary_client_as_the_status_of_its_call(fake: Server) -> None:
    with tritonclient.grpc.InferenceServerClient(fake.grpc) as client:

        def refusal(timeout_us: int | None = None, **sampling: Any) -> tuple[str, str]:
            with pytest.raises(InferenceServerException) as raised:
                client.infer("minisgl_unary", unary_inputs(tritonclient.grpc, **sampling), timeout=timeout_us)
            return str(raised.value.status()), str(raised.value.message())

        assert refusal(max_tokens=-1) == (
            "StatusCode.INVALID_ARGUMENT",
            "max_tokens: must be an integer from 1 to 2147483647, got -1",
        )
        assert refusal(timeout_us=200_000, **LONG) == (
            "StatusCode.UNAVAILABLE",
            "the deadline of this request passed before its answer was complete",
        )
    answer = generate(fake, "minisgl_unary", text_input="x", stream=True)
    assert (answer.status_code, answer.json()["error"].partition(":")[0]) == (400, "stream")


@pytest.mark.parametrize("leave", ["cancel", "close"])
def test_a_unary_client_that_leaves_over_grpc_frees_its_request(fake: Server, leave: str) -> None:
    client = tritonclient.grpc.InferenceServerClient(fake.grpc)
    errors: list[Any] = []
    inputs = unary_inputs(tritonclient.grpc, **LONG)
    call = client.async_infer("minisgl_unary", inputs, callback=lambda result, error: errors.append(error))
    eventually(lambda: fake.stats().running == 1, PATIENCE_S, lambda: "never began")
    if leave == "cancel":
        call.cancel()
    client.close()
    fake.until_idle(patience_s=5)
    eventually(lambda: errors, PATIENCE_S, lambda: "the callback was not called")


def test_a_client_that_leaves_over_http_is_not_noticed_and_its_deadline_frees_the_request(fake: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        url = f"{fake.http}/v2/models/minisgl_unary/generate"
        httpx.post(url, json={"text_input": "x", "timeout": 1_500_000, **LONG}, timeout=0.5)
    assert fake.stats().running == 1
    fake.until_idle(patience_s=10)


# ── one engine ───────────────────────────────────────────────────────────────────────────────────────────────────


def repository(server: Server, model: str, action: str) -> None:
    answer = httpx.post(f"{server.http}/v2/repository/models/{model}/{action}", timeout=60)
    assert answer.status_code == 200, answer.text


def unload(server: Server, model: str) -> None:
    """Returns when the model's process has given its lease back."""
    repository(server, model, "unload")

    def gone() -> bool:
        index = httpx.post(f"{server.http}/v2/repository/index").json()
        return any(entry["name"] == model and entry.get("reason") == "unloaded" for entry in index)

    eventually(gone, PATIENCE_S, lambda: f"{model} stays")


def test_all_models_hold_leases_on_one_engine_which_stays_until_the_last_is_gone(fake: Server) -> None:
    """Each model is once the first and once the last to be unloaded; whoever is left answers, from the same engine."""
    processes = engine_processes(fake.runtime)
    host = int((fake.run_dir / "host.pid").read_text())
    assert host in processes and len(processes) == 3, "a host, a scheduler, a worker"
    for turn in range(len(MODELS)):
        *leaving, last = MODELS[turn:] + MODELS[:turn]
        for model in leaving:
            unload(fake, model)
            assert generate(fake, last, text_input="x", max_tokens=2).status_code == 200, last
        assert engine_processes(fake.runtime) == processes
        for model in leaving:
            repository(fake, model, "load")
        assert engine_processes(fake.runtime) == processes


def test_models_that_are_loaded_at_once_start_one_engine(fakes: Server) -> None:
    for model in MODELS:
        unload(fakes, model)
    eventually(lambda: not engine_processes(fakes.runtime), PATIENCE_S, lambda: "the engine outlives its last lease")
    with ThreadPoolExecutor(len(MODELS)) as pool:
        list(pool.map(lambda model: repository(fakes, model, "load"), MODELS))
    assert len(engine_processes(fakes.runtime)) == 3
    for model in MODELS:
        assert generate(fakes, model, text_input="x", max_tokens=2).status_code == 200, model
