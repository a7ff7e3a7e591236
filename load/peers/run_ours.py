"""Our own engine, driven as the peers are: alone (`LLM`) or through tritonserver and its gRPC streams.

python -m load.peers.run_ours llm|triton MODEL SETTINGS

SETTINGS are the engine's, as a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

import numpy as np
import tritonclient.grpc.aio as triton

from load.peers.line import Prompts, Ready, Stream, run, serve
from load.serving import engine_processes, serving
from load.streams import MODEL
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams


def main(answers: TextIO) -> None:
    """Starts the engine and answers."""
    path, model, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if path == "llm":
        with LLM(model, **settings) as llm:
            serve(answers, Ready("", "ids", "engine", settings), lambda *command: stream_llm(llm, *command))
        return
    with serving("--model", model, **settings) as server, asyncio.Runner() as loop:
        client = loop.run(_connect(server.grpc))
        ready = Ready("", "ids", "client", settings, sorted(engine_processes(server.runtime)))
        try:
            serve(answers, ready, lambda *command: loop.run(stream_triton(client, *command)))
        finally:
            loop.run(client.close())


def stream_llm(llm: LLM, prompts: Prompts, tokens: int, start: float) -> Sequence[Stream]:
    """A thread for each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def read(prompt: Sequence[int]) -> Stream:
        stream = Stream()
        for piece in llm.stream(prompt, params):
            stream.take(start, piece.token_ids)
        return stream

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(read, prompts))


async def stream_triton(client: Any, prompts: Prompts, tokens: int, start: float) -> Sequence[Stream]:
    """A gRPC stream for each prompt, all on one connection, which stays open from round to round."""
    return await asyncio.gather(*(_ask(client, prompt, tokens, start) for prompt in prompts))


async def _connect(url: str) -> Any:
    return triton.InferenceServerClient(url)


async def _ask(client: Any, prompt: Sequence[int], tokens: int, start: float) -> Stream:
    ids = triton.InferInput("input_ids", [len(prompt)], "INT32")
    ids.set_data_from_numpy(np.array(prompt, dtype=np.int32))
    parameters = {"stream": True, "return_output_ids": True, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": MODEL, "inputs": [ids], "parameters": parameters}

    stream = Stream()
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        token_ids = result.as_numpy("output_ids")
        stream.take(start, [] if token_ids is None else token_ids.reshape(-1).tolist())
    return stream


if __name__ == "__main__":
    run(main)
