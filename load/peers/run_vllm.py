"""vLLM's AsyncLLM, its front in this process and its engine in one of its own. Runs in its own environment.

python -m load.peers.run_vllm MODEL_FOLDER DTYPE STREAMS KV_BYTES CONTEXT_TOKENS
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from load.peers.line import Prompts, Ready, Stream, run, serve

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(answers: TextIO) -> None:
    """Starts the engine and answers."""
    folder, dtype, streams, kv_bytes, context = sys.argv[1:]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, int(kv_bytes) >> 30))  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores  # left to itself it keeps one core free: half of a machine of two
    settings = {
        "dtype": _DTYPES[dtype],
        "max_num_seqs": int(streams),
        "max_model_len": int(context),
        "enable_prefix_caching": True,
    }
    with asyncio.Runner() as runner:

        async def begin() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, seed=0, **settings))

        engine = runner.run(begin())
        try:
            serve(
                answers, _ready({**settings, "cores": cores}), lambda *command: runner.run(generate(engine, *command))
            )
        finally:
            engine.shutdown()


def _ready(settings: dict[str, Any]) -> Ready:
    return Ready(vllm.__version__, "ids", "client", {**settings, "LD_PRELOAD": os.environ.get("LD_PRELOAD", "")})


async def generate(engine: AsyncLLM, prompts: Prompts, tokens: int, start: float) -> Sequence[Stream]:
    """All prompts at once."""
    return await asyncio.gather(*(_one(engine, prompt, tokens, start) for prompt in prompts))


async def _one(engine: AsyncLLM, prompt: Sequence[int], tokens: int, start: float) -> Stream:
    stream = Stream()
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, seed=0, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, params, os.urandom(8).hex()):
        stream.take(start, output.outputs[0].token_ids)
    return stream


if __name__ == "__main__":
    run(main)
