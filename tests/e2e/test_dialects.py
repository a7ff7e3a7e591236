"""The thin models beside `minisgl` on the real server: clients as they are, one engine, cancels and errors.

Where the text matters the session's SmolLM2 answers, else a fake device.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from fakes.clients import is_final, results_of
from load.serving import PATIENCE_S, Server, engine_processes, eventually, serving

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("minisgl", "minisgl_unary", "ensemble")
PROMPT = "The capital of France is"
GREEDY = {"max_tokens": 6, "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 8000}  # 160 s on the fake device: a test that waits for such an answer fails


@pytest.fixture(scope="module")
def fakes() -> Iterator[Server]:
    """All models on a fake device, loaded and unloaded by the tests, and all loaded after each."""
    options = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in MODELS)]
    with serving("--model", "smollm2", options=options, device="fake", fake_step_ms=20, lease_s=2, drain_s=1) as server:
        for model in MODELS:
            await_ready(server, model)
        yield server


@pytest.fixture
def fake(fakes: Server) -> Iterator[Server]:
    """Idle again after the test."""
    yield fakes
    fakes.until_idle()


@pytest.fixture
def real(server: Server) -> Server:
    """SmolLM2, all models ready."""
    for model in MODELS:
        await_ready(server, model)
    return server


def await_ready(server: Server, model: str) -> None:
    url = f"{server.http}/v2/models/{model}/ready"
    eventually(
        lambda: httpx.get(url, timeout=PATIENCE_S).status_code == 200, PATIENCE_S, lambda: "\n".join(server.lines)
    )


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


def documented_requests() -> dict[str, str]:
    """The path and the body of the curl commands of docs/triton.md."""
    page = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
    commands = [shlex.split(command) for command in re.findall(r"```sh\n(curl .*?)```", page, re.DOTALL)]
    return {urlsplit(command[2]).path: command[command.index("-d") + 1] for command in commands}


def test_the_documented_requests_are_answered_as_they_stand(real: Server) -> None:
    requests = documented_requests()
    assert list(requests) == [
        f"/v2/models/{path}" for path in ("minisgl/generate", "minisgl_unary/infer", "ensemble/generate")
    ]
    answers = [
        httpx.post(f"{real.http}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE_S)
        for path, body in requests.items()
    ]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert json.loads(answers[0].json()["result"])["token_strs"][-1] == "Ġis"
    outputs = {output["name"]: output["data"] for output in answers[1].json()["outputs"]}
    assert outputs["text_output"][0].startswith(f"{PROMPT} Paris") and outputs["finish_reason"] == ["length"]
    assert answers[2].json()["text_output"].startswith(" Paris")


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
    fake.until_idle()
    eventually(lambda: errors, PATIENCE_S, lambda: "the callback was not called")


def test_a_client_that_leaves_over_http_is_not_noticed_and_its_deadline_frees_the_request(fake: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        url = f"{fake.http}/v2/models/minisgl_unary/generate"
        body = {"text_input": "x", "timeout": 5_000_000, **LONG}
        httpx.post(url, json=body, timeout=httpx.Timeout(PATIENCE_S, read=0.5))
    eventually(lambda: fake.stats().running == 1, PATIENCE_S, lambda: "it was noticed")
    fake.until_idle()


def test_an_unload_ends_a_unary_answer_when_the_limit_has_passed(fake: Server) -> None:
    errors: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(fake.grpc) as client:
        inputs = unary_inputs(tritonclient.grpc, **LONG)
        client.async_infer("minisgl_unary", inputs, callback=lambda result, error: errors.append(error))
        eventually(lambda: fake.stats().running == 1, PATIENCE_S, lambda: "never began")
        unload(fake, "minisgl_unary")
        eventually(lambda: errors, PATIENCE_S, lambda: "the callback was not called")
        assert [error.message() for error in errors] == ["the model is being unloaded"]
    load(fake, "minisgl_unary")


# ── ensemble ─────────────────────────────────────────────────────────────────────────────────────────────────────


def scalar(value: Any, dtype: type = np.int32) -> Any:
    """[1, 1], as TensorRT-LLM's clients send every scalar."""
    return np.array([[value]], dtype=dtype)


def trt_inputs(client: ModuleType, prompt: str = PROMPT, max_tokens: int = 6, **more: Any) -> list[Any]:
    """What `end_to_end_grpc_client.py` of TensorRT-LLM's back end sends with its default arguments."""
    arrays = {
        "text_input": text(prompt).reshape(1, 1),
        "max_tokens": scalar(max_tokens),
        "stream": scalar(True, np.bool_),
        "beam_width": scalar(1),
        "temperature": scalar(1.0, np.float32),
        **more,
    }
    return tensors(client, arrays)


def answer_of(server: Server) -> str:
    """The greedy answer of `minisgl`, which every dialect must give."""
    body = {"text_input": PROMPT, "exclude_input_in_output": True, **GREEDY}
    return str(generate(server, "minisgl", **body).json()["text_output"])


def test_clients_of_tensorrt_llm_get_the_answer_of_minisgl_unchanged(real: Server) -> None:
    expected = answer_of(real)
    documented = {"text_input": PROMPT, "max_tokens": 6, "bad_words": "", "stop_words": ""}
    whole = generate(real, "ensemble", **documented, return_log_probs=True, return_num_input_tokens=True).json()
    assert whole["text_output"] == expected
    assert len(whole["output_log_probs"]) == 6
    assert whole["cum_log_probs"] == pytest.approx(sum(whole["output_log_probs"]), abs=1e-4)
    assert (whole["num_input_tokens"], whole["batch_index"], whole["sequence_index"]) == (5, 0, 0)

    url = f"{real.http}/v2/models/ensemble/generate_stream"
    with httpx.stream("POST", url, json={**documented, "stream": True}, timeout=PATIENCE_S) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert len(events) > 1 and "".join(event["text_output"] for event in events) == expected

    with tritonclient.grpc.InferenceServerClient(real.grpc) as client, results_of(client) as result:
        client.async_stream_infer("ensemble", trt_inputs(tritonclient.grpc), request_id="1")
        results = [result()]
        while not is_final(results[-1]):
            results.append(result())
    assert b"".join(piece.as_numpy("text_output")[0] for piece in results).decode() == expected
    assert len(results) > 1


async def test_a_stream_by_asyncio_gives_the_same(real: Server) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "ensemble", "inputs": trt_inputs(tritonclient.grpc.aio)}

    pieces = []
    async with tritonclient.grpc.aio.InferenceServerClient(real.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            pieces.append(result.as_numpy("text_output")[0].decode())
    assert "".join(pieces) == await asyncio.to_thread(answer_of, real)


def test_a_guide_of_tensorrt_llm_holds_the_answer(real: Server) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": " (London|Rome)"}
    answer = generate(real, "ensemble", text_input=PROMPT, max_tokens=8, **guide)
    assert answer.status_code == 200 and answer.json()["text_output"] in (" London", " Rome")


def test_refusals_and_deadlines_reach_a_client_of_tensorrt_llm_by_its_own_names(fake: Server) -> None:
    def error(**body: Any) -> str:
        answer = generate(fake, "ensemble", **{"text_input": "x", "max_tokens": 2, **body})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"])

    assert error(beam_width=2) == "beam_width: must be 1, got 2"
    assert error(lora_task_id=1) == "lora_task_id: is not an input of this model"
    assert (
        error(random_seed=2**63)
        == "random_seed: must be an integer from 0 to 9223372036854775807, got 9223372036854775808"
    )
    assert error(stream=True, exclude_input_in_output=False).startswith("exclude_input_in_output: ")
    assert error(timeout=200_000, **LONG) == "the deadline of this request passed before its answer was complete"


def test_a_batch_of_prompts_is_refused_by_triton(fake: Server) -> None:
    with tritonclient.grpc.InferenceServerClient(fake.grpc) as client, results_of(client) as result:
        two = {"text_input": text("a", "b").reshape(2, 1), "max_tokens": np.array([[1], [2]], dtype=np.int32)}
        client.async_stream_infer("ensemble", tensors(tritonclient.grpc, two))
        with pytest.raises(InferenceServerException, match="batch-size must be <= 1"):
            result()


def test_a_client_of_tensorrt_llm_that_leaves_frees_its_request(fake: Server) -> None:
    with tritonclient.grpc.InferenceServerClient(fake.grpc) as client:
        with results_of(client) as result:
            client.async_stream_infer("ensemble", trt_inputs(tritonclient.grpc, **LONG))
            result()
            client.stop_stream(cancel_requests=True)
        fake.until_idle()


# ── one engine ───────────────────────────────────────────────────────────────────────────────────────────────────


def repository(server: Server, model: str, action: str) -> None:
    answer = httpx.post(f"{server.http}/v2/repository/models/{model}/{action}", timeout=2 * PATIENCE_S)
    assert answer.status_code == 200, answer.text


def unload(server: Server, model: str) -> None:
    """Returns when the model's process has given its lease back."""
    repository(server, model, "unload")

    def gone() -> bool:
        index = httpx.post(f"{server.http}/v2/repository/index", timeout=PATIENCE_S).json()
        return any(entry["name"] == model and entry.get("reason") == "unloaded" for entry in index)

    eventually(gone, PATIENCE_S, lambda: f"{model} stays")


def load(server: Server, *models: str) -> None:
    """All of them at once."""
    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(lambda model: repository(server, model, "load"), models))


def test_all_models_hold_leases_on_one_engine_which_stays_until_the_last_is_gone(fake: Server) -> None:
    """`minisgl` is the first to be unloaded, then the last; whoever is left answers, from the same engine."""
    processes = engine_processes(fake.runtime)
    assert len(processes) == 3, "a host, a scheduler, a worker"
    for order in (MODELS, MODELS[::-1]):
        load(fake, *MODELS)  # those that are loaded already stay as they are
        *leaving, last = order
        for model in leaving:
            unload(fake, model)
            assert generate(fake, last, text_input="x", max_tokens=2).status_code == 200, last
        assert engine_processes(fake.runtime) == processes
    unload(fake, last)
    eventually(lambda: not engine_processes(fake.runtime), PATIENCE_S, lambda: "the engine outlives its last lease")
    load(fake, *MODELS)
    assert len(engine_processes(fake.runtime)) == 3, "models that are loaded at once start one engine"
    for model in MODELS:
        assert generate(fake, model, text_input="x", max_tokens=2).status_code == 200, model
