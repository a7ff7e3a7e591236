"""Triton's vLLM backend comes with a sample client; users began with it, so it must work here unchanged.

Ours is written anew after what that one does (github.com/triton-inference-server/vllm_backend, samples/client.py, seen
at commit 040ae37): prompts are the lines of a file, newline included; each goes out once per iteration on ONE asyncio
stream, with sampling parameters that are strings and stand in both places, as a tensor and as request parameters; only
`text_output` is asked for; responses are filed under their request id and never look at any final flag.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from load.serving import Server
from load.streams import MODEL

PROMPTS = [
    "Hello, my name is\n",
    "The most dangerous animal is\n",
    "The capital of France is\n",
    "The future of AI is\n",
]
SAMPLED = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "30"}
GREEDY = {"temperature": "0", "top_p": "1.0", "max_tokens": "12"}


class SampleClient:
    """One run of the program: its flags, and what it writes into its results file."""

    def __init__(
        self,
        url: str,
        *,
        stream: bool,
        exclude: bool | None = None,
        iterations: int = 1,
        offset: int = 0,
        shuffled: bool = False,
        stream_timeout_s: float | None = None,
    ) -> None:
        self._url = url
        self._stream = stream
        self._exclude = exclude  # the sample leaves it out; clients built on it do not
        self._iterations = iterations
        self._offset = offset
        self._shuffled = shuffled  # ids leave in no order, as those of several users on one stream
        self._stream_timeout_s = stream_timeout_s
        self.prompts: dict[str, str] = {}  # by request id
        self.results: dict[str, list[bytes]] = {}
        self.errors: list[Exception] = []
        self.outputs: set[str] = set()

    async def run(self, prompts: Sequence[str], sampling_parameters: dict[str, str]) -> None:
        async with triton.InferenceServerClient(self._url) as client:
            responses = client.stream_infer(
                self._requests(prompts, sampling_parameters), stream_timeout=self._stream_timeout_s
            )
            async for result, error in responses:
                if error:
                    self.errors.append(error)
                    continue
                response = result.get_response()
                self.results[response.id].extend(result.as_numpy("text_output"))
                self.outputs |= {output.name for output in response.outputs}

    async def _requests(self, prompts: Sequence[str], parameters: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        ids = [str(self._offset + number) for number in range(self._iterations * len(prompts))]
        if self._shuffled:
            random.Random(1).shuffle(ids)
        for number, id in enumerate(ids):
            self.prompts[id] = prompts[number % len(prompts)]
            self.results[id] = []
            yield self._request(id, self.prompts[id], parameters)

    def _request(self, id: str, prompt: str, parameters: dict[str, str]) -> dict[str, Any]:
        values = {
            "text_input": np.array([prompt.encode()], dtype=np.object_),
            "stream": np.array([self._stream], dtype=bool),
            "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=np.object_),
        }
        if self._exclude is not None:
            values["exclude_input_in_output"] = np.array([self._exclude], dtype=bool)
        tensors = []
        for name, value in values.items():
            tensors.append(triton.InferInput(name, [1], "BOOL" if value.dtype == bool else "BYTES"))
            tensors[-1].set_data_from_numpy(value)
        return {
            "model_name": MODEL,
            "inputs": tensors,
            "outputs": [triton.InferRequestedOutput("text_output")],
            "request_id": id,
            "parameters": parameters,
        }


async def run(server: Server, parameters: dict[str, str], **flags: Any) -> SampleClient:
    client = SampleClient(server.grpc, **flags)
    await client.run(PROMPTS, parameters)
    assert client.errors == []
    assert client.outputs == {"text_output"}, "an output that was not asked for"
    return client


@pytest.mark.parametrize("shuffled", [False, True], ids=["ids in order", "ids out of order"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
async def test_the_sample_client_files_an_answer_under_every_id(server: Server, stream: bool, shuffled: bool) -> None:
    client = await run(server, SAMPLED, stream=stream, iterations=3, offset=100, shuffled=shuffled)
    assert sorted(map(int, client.results)) == list(range(100, 112))
    for id, pieces in client.results.items():
        text = b"".join(pieces).decode()
        assert text.startswith(client.prompts[id]) is not stream, "the prompt stands in front of whole answers only"
        assert text.strip() and (stream or len(pieces) == 1)
    if stream:
        assert max(len(pieces) for pieces in client.results.values()) > 3, "nothing was streamed"


async def test_streamed_or_not_excluded_or_not_the_text_is_the_same(server: Server) -> None:
    streamed = await run(server, GREEDY, stream=True)
    excluded = await run(server, GREEDY, stream=True, exclude=True)
    whole = await run(server, GREEDY, stream=False)
    bare = await run(server, GREEDY, stream=False, exclude=True, shuffled=True)
    echoed = await run(server, GREEDY, stream=False, exclude=False, iterations=2)

    def texts(client: SampleClient) -> set[tuple[str, str]]:
        return {(client.prompts[id], b"".join(pieces).decode()) for id, pieces in client.results.items()}

    answers = texts(streamed)
    assert len(answers) == len(PROMPTS)
    assert texts(excluded) == texts(bare) == answers
    assert texts(whole) == texts(echoed) == {(prompt, prompt + text) for prompt, text in answers}


async def test_two_programs_with_offset_ids_run_at_the_same_time(server: Server) -> None:
    one, other = await asyncio.gather(
        run(server, GREEDY, stream=True, iterations=2),
        run(server, GREEDY, stream=True, iterations=2, offset=1000, stream_timeout_s=120.0),
    )
    assert [b"".join(pieces) for pieces in one.results.values()] == [
        b"".join(pieces) for pieces in other.results.values()
    ]
