"""SmolLM2 dealt out to three processes, through the real tritonserver."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from load.serving import PATIENCE_S, serving
from load.streams import ask
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

PROMPTS = ("The capital of France is", "Once upon a time", "A list of colours: red,")
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
SEEDED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 7}


@pytest.mark.parametrize("dtype", ["fp32"])
async def test_three_ranks_answer_as_one_does_and_a_lost_rank_is_started_again(dtype: str) -> None:
    with LLM(model="smollm2", dtype=dtype, context_tokens=512) as llm:
        expected = [
            answer.text
            for parameters in (GREEDY, SEEDED)
            for answer in llm.generate(list(PROMPTS), SamplingParams(**parameters))
        ]
    with serving("--model", "smollm2", "--dtype", dtype, tensor_parallel=3, context_tokens=512) as server:

        async def answers() -> list[str]:
            asked = [ask(server.grpc, prompt, **parameters) for parameters in (GREEDY, SEEDED) for prompt in PROMPTS]
            return [answer.text for answer in await asyncio.gather(*asked)]

        assert await answers() == expected
        pids = dict((await asyncio.to_thread(server.stats)).pids)
        assert set(pids) == {"scheduler", "worker-0", "worker-1", "worker-2"}
        os.kill(pids["worker-2"], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while (await ask(server.grpc, PROMPTS[0], **GREEDY)).error is not None:
                pass
        assert await answers() == expected
