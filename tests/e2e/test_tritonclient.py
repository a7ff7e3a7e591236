"""tritonclient in all its forms, as it comes: each way of asking gives the answer that /generate gives.

How streams are cancelled and what errors look like is in test_surface.py, test_dialects.py and test_reported_cases.py.
"""

from __future__ import annotations

import json
import queue
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor, shared_memory

from fakes.clients import is_final, results_of
from load.serving import PATIENCE_S, Server, eventually

ONCE, STREAMING = "minisgl_unary", "minisgl"
PROMPT = "The capital of France is"
GREEDY = json.dumps({"max_tokens": 5, "temperature": 0})
MANY_TOKENS = 64  # of a stream that must come in several pieces: a busy machine puts some together, and not a second's
http, http_aio, grpc, grpc_aio = tritonclient.http, tritonclient.http.aio, tritonclient.grpc, tritonclient.grpc.aio


def text(value: str) -> Any:
    return np.array([value.encode()], dtype=np.object_)


def inputs(module: Any, *, stream: bool = False, sampling: str = GREEDY, **options: Any) -> list[Any]:
    """options: of set_data_from_numpy."""
    made = []
    for name, value in (("text_input", PROMPT), ("sampling_parameters", sampling)):
        made.append(module.InferInput(name, [1], "BYTES"))
        made[-1].set_data_from_numpy(text(value), **options)
    if stream:
        made.append(module.InferInput("stream", [1], "BOOL"))
        made[-1].set_data_from_numpy(np.array([True]))
    return made


def text_of(result: Any) -> str:
    (whole,) = result.as_numpy("text_output")
    return str(whole.decode())


@pytest.fixture(scope="module")
def expected(running_server: Server) -> str:
    """Of `minisgl_unary`, which puts the prompt in front."""
    with http.InferenceServerClient(running_server.http.removeprefix("http://")) as client:
        eventually(lambda: client.is_model_ready(ONCE), PATIENCE_S, lambda: f"{ONCE} is not ready")
    url = f"{running_server.http}/v2/models/minisgl/generate"
    answer = httpx.post(url, json={"text_input": PROMPT, "max_tokens": 5, "temperature": 0}, timeout=PATIENCE_S)
    whole = str(answer.json()["text_output"])
    assert whole.startswith(f"{PROMPT} Paris")
    return whole


@pytest.fixture
def by_http(server: Server) -> Iterator[Any]:
    with http.InferenceServerClient(
        server.http.removeprefix("http://"), concurrency=4, network_timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture
def by_grpc(server: Server) -> Iterator[Any]:
    with grpc.InferenceServerClient(server.grpc) as client:
        yield client


def test_http_sends_bytes_and_json_and_compressed_bodies(by_http: Any, expected: str) -> None:
    assert text_of(by_http.infer(ONCE, inputs(http))) == expected
    assert text_of(by_http.infer(ONCE, inputs(http, binary_data=False))) == expected
    as_json = [http.InferRequestedOutput("text_output", binary_data=False)]
    assert by_http.infer(ONCE, inputs(http), outputs=as_json).as_numpy("text_output").tolist() == [expected]
    for algorithm in ("gzip", "deflate"):
        result = by_http.infer(
            ONCE, inputs(http), request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
        )
        assert text_of(result) == expected, algorithm


def test_http_asks_several_at_once(by_http: Any, expected: str) -> None:
    asked = [by_http.async_infer(ONCE, inputs(http)) for _ in range(4)]
    assert [text_of(one.get_result(timeout=PATIENCE_S)) for one in asked] == [expected] * 4


async def test_http_by_asyncio(server: Server, expected: str) -> None:
    async with http_aio.InferenceServerClient(server.http.removeprefix("http://")) as client:
        assert text_of(await client.infer(ONCE, inputs(http_aio))) == expected


def test_grpc_asks_and_is_called_back_and_compresses(by_grpc: Any, expected: str) -> None:
    assert text_of(by_grpc.infer(ONCE, inputs(grpc), compression_algorithm="gzip")) == expected
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for _ in range(4):
        by_grpc.async_infer(ONCE, inputs(grpc), callback=lambda result, error: came.put((result, error)))
    for _ in range(4):
        result, error = came.get(timeout=PATIENCE_S)
        assert error is None and text_of(result) == expected


def test_a_grpc_stream_carries_both_models(by_grpc: Any, expected: str) -> None:
    with results_of(by_grpc) as result:
        many = json.dumps({"max_tokens": MANY_TOKENS, "temperature": 0})
        by_grpc.async_stream_infer(STREAMING, inputs(grpc, stream=True, sampling=many))
        pieces = [result()]
        while not is_final(pieces[-1]):
            pieces.append(result())
        by_grpc.async_stream_infer(ONCE, inputs(grpc))
        assert text_of(result()) == expected
    assert (PROMPT + "".join(map(text_of, pieces))).startswith(expected) and 1 < len(pieces) <= MANY_TOKENS


async def test_grpc_by_asyncio_asks_once_and_streams(server: Server, expected: str) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": STREAMING, "inputs": inputs(grpc_aio, stream=True)}

    pieces = []
    async with grpc_aio.InferenceServerClient(server.grpc) as client:
        assert text_of(await client.infer(ONCE, inputs(grpc_aio))) == expected
        async for result, error in client.stream_infer(requests()):
            assert error is None
            pieces.append(text_of(result))
    assert PROMPT + "".join(pieces) == expected


def is_unregistered(client: Any, name: str) -> bool:
    """Not while the server holds the request that used it, for some moments after its answer."""
    try:
        client.unregister_system_shared_memory(name)
    except InferenceServerException as error:
        if "in use" not in str(error):
            raise
        return False
    return True


@contextmanager
def region(client: Any, raw: bytes, size_bytes: int) -> Iterator[tuple[str, Any]]:
    """System shared memory that the server knows, with these bytes at its beginning. Its name and its handle."""
    name = f"minisgl-test-{uuid.uuid4().hex[:12]}"
    handle = shared_memory.create_shared_memory_region(name, f"/{name}", size_bytes)
    try:
        if raw:
            shared_memory.set_shared_memory_region(handle, [np.frombuffer(raw, dtype=np.uint8)])
        client.register_system_shared_memory(name, f"/{name}", size_bytes)
        yield name, handle
    finally:
        eventually(lambda: is_unregistered(client, name), PATIENCE_S, lambda: "the server uses it for ever")
        shared_memory.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_prompt_may_stand_in_shared_memory(by_http: Any, by_grpc: Any, expected: str, way: str) -> None:
    module, client = (http, by_http) if way == "http" else (grpc, by_grpc)
    raw = serialize_byte_tensor(text(PROMPT)).item()
    with region(client, raw, len(raw)) as (name, _):
        _, sampling = inputs(module)
        prompt = module.InferInput("text_input", [1], "BYTES")
        prompt.set_shared_memory(name, len(raw))
        assert text_of(client.infer(ONCE, [prompt, sampling])) == expected
        if way == "grpc":
            with results_of(client) as result:
                client.async_stream_infer(STREAMING, [prompt, sampling])
                assert text_of(result()) == expected


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_an_answer_may_be_put_into_shared_memory_that_is_large_enough(
    by_http: Any, by_grpc: Any, expected: str, way: str
) -> None:
    module, client = (http, by_http) if way == "http" else (grpc, by_grpc)
    for size_bytes, fits in ((4096, True), (8, False)):
        with region(client, b"", size_bytes) as (name, handle):
            output = module.InferRequestedOutput("text_output")
            output.set_shared_memory(name, size_bytes)
            if fits:
                client.infer(ONCE, inputs(module), outputs=[output])
                (whole,) = shared_memory.get_contents_as_numpy(handle, np.object_, [1])
                assert whole.decode() == expected
            else:
                with pytest.raises(InferenceServerException, match="shared memory size specified"):
                    client.infer(ONCE, inputs(module), outputs=[output])


def test_a_client_that_does_not_wait_so_long_frees_its_request(server: Server, by_grpc: Any, expected: str) -> None:
    """`client_timeout` of the synchronous client: the call is cancelled."""
    tokens = 4000
    endless = json.dumps({"max_tokens": tokens, "ignore_eos": True})
    before = server.stats().steps
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        by_grpc.infer(ONCE, inputs(grpc, sampling=endless), client_timeout=1.0)
    assert server.until_idle(PATIENCE_S).steps - before < tokens, "it ran on to its end"


def streamed(client: Any, model: str, arrays: dict[str, Any]) -> tuple[str, int]:
    """The text, and how many pieces it came in."""
    sent = []
    for name, array in arrays.items():
        sent.append(grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        sent[-1].set_data_from_numpy(array)
    with results_of(client) as result:
        client.async_stream_infer(model, sent)
        pieces = [result()]
        while not is_final(pieces[-1]):
            pieces.append(result())
    texts = [piece.as_numpy("text_output").reshape(-1).tolist() for piece in pieces]
    assert all(len(text) == 1 for text in texts)
    return b"".join(text for (text,) in texts).decode(), len(pieces)


def test_what_genai_perf_sends_is_answered(server: Server, by_grpc: Any, expected: str) -> None:
    """The inputs of its converters `vllm` (numbers are strings there), `tensorrtllm` and `triton_generate`, 0.0.16."""
    many = str(MANY_TOKENS)
    sampling = json.dumps({"max_tokens": many, "min_tokens": many, "temperature": "0"})
    vllm = {
        "text_input": text(PROMPT),
        "exclude_input_in_output": np.array([True]),
        "stream": np.array([True]),
        "sampling_parameters": text(sampling),
    }
    tensorrt = {
        "text_input": text(PROMPT).reshape(1, 1),
        "max_tokens": np.array([[MANY_TOKENS]], dtype=np.int32),
        "exclude_input_in_output": np.array([[True]]),
        "stream": np.array([[True]]),
        "min_length": np.array([[MANY_TOKENS]], dtype=np.int32),
    }
    for model, arrays in ((STREAMING, vllm), ("ensemble", tensorrt)):
        told, pieces = streamed(by_grpc, model, arrays)
        assert told.startswith(expected.removeprefix(PROMPT)) and 1 < pieces <= MANY_TOKENS, model
    body = {"text_input": [PROMPT], "stream": True, "max_tokens": 5, "temperature": 0}
    url = f"{server.http}/v2/models/{STREAMING}/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert PROMPT + "".join(event["text_output"] for event in events) == expected


def test_what_tritons_own_openai_frontend_sends_is_answered(by_grpc: Any, expected: str) -> None:
    """To any model whose back end is not named vllm: TensorRT-LLM's inputs, with OpenAI's defaults among them."""
    arrays: dict[str, Any] = {
        "text_input": text(PROMPT).reshape(1, 1),
        "max_tokens": np.array([[MANY_TOKENS]], dtype=np.int32),
        "stop_words": text("never").reshape(1, 1),
        "seed": np.array([[7]], dtype=np.uint64),
    }
    for name, value in (("temperature", 0), ("top_p", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
        arrays[name] = np.array([[value]], dtype=np.float32)
    for stream in (True, False):
        arrays["stream"] = np.array([[stream]])
        told, pieces = streamed(by_grpc, "ensemble", arrays)
        assert told.startswith(expected.removeprefix(PROMPT)) and (1 < pieces <= MANY_TOKENS) == stream
