"""Twenty hostile forms of answers against a server that streams: each is refused by name, no stream notices.

The device is the fake one, so a stream is a known sequence of tokens; SmolLM2's vocabulary, compiler and limits are the
real ones. On a machine without time a form that is costly to compile may be put off (UNAVAILABLE): it is not taken
either. Another one that is put off, behind them, asks again. What the streams' pace loses is measured elsewhere
(load/bench/structured.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from fakes.hostile_forms import Form, costly, refused_at_once
from load.serving import Server, serving
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams
from minisgl_client.aio import AsyncClient
from minisgl_client.errors import ClientError, RequestRefused, Unavailable, Unsupported
from minisgl_client.pieces import Piece

PROMPTS = [f"Story number {number}: once upon a time" for number in range(16)]
STREAM_TOKENS = 8000  # 160 s at least, so that all of them run when the last form is refused


@pytest.fixture
def server() -> Iterator[Server]:
    """Idle again after the test: what was left is cancelled."""
    with serving("--model", "smollm2", device="fake", fake_step_ms=20, lease_s=2) as server:
        yield server
        server.until_idle()


async def test_twenty_hostile_forms_are_refused_in_time_by_name_and_sixteen_streams_go_on_unchanged(
    server: Server,
) -> None:
    forms = [*costly(), *refused_at_once()]
    assert len(forms) == 20
    got: list[list[Piece]] = [[] for _ in PROMPTS]
    begun = [asyncio.Event() for _ in PROMPTS]
    refused = asyncio.Event()
    async with AsyncClient(server.grpc) as client:

        async def read(index: int) -> None:
            """Until the next piece after the last refusal."""
            fields = {"max_tokens": STREAM_TOKENS, "return_output_ids": True}
            async for piece in client.stream(PROMPTS[index], ignore_eos=True, **fields):
                got[index].append(piece)
                begun[index].set()
                if refused.is_set():
                    return

        async def refusal(form: Form) -> ClientError:
            while True:
                with pytest.raises(ClientError) as error:
                    await client.generate("x", max_tokens=1, **form)
                if form in costly() or not isinstance(error.value, Unavailable):
                    return error.value
                await asyncio.sleep(0.5)

        async with asyncio.TaskGroup() as readers:
            tasks = [readers.create_task(read(index)) for index in range(len(PROMPTS))]
            await asyncio.gather(*(event.wait() for event in begun))
            errors = await asyncio.gather(*map(refusal, forms))
            still_running = [not task.done() for task in tasks]
            refused.set()
        assert all(still_running), "the last refusal came after a stream had ended"

    for form, error in zip(forms, errors, strict=True):
        kinds = (RequestRefused, Unsupported, Unavailable) if form in costly() else (RequestRefused, Unsupported)
        assert re.match(rf"{next(iter(form))}[\w.]*: ", str(error)) and isinstance(error, kinds), error
    for pieces, expected in zip(got, quiet([len(ids(pieces)) for pieces in got]), strict=True):
        assert pieces[-1].finish_reason is None, "left before its end"
        assert ids(pieces) == expected[1] and expected[0].startswith("".join(piece.text for piece in pieces))


def ids(pieces: list[Piece]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.output_ids or ())


def quiet(lengths: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Text and ids of the answers to PROMPTS, of an engine that does nothing else."""
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    with LLM("smollm2", device="fake", executor="inline") as llm:
        return [(answer.text, answer.token_ids) for answer in llm.generate(PROMPTS, params, progress=False)]
