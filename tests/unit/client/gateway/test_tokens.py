"""/tokenize and /detokenize: vLLM's bodies, the engine's judgement by the client's names, under both paths."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from fakes.gateway import error_of, gateway
from fakes.inference_server import InferenceServer, aborts, inputs_of, response, says

TOLD = {"count": 2, "max_model_len": 8192, "tokens": [5, 6], "token_strs": None}
CHAT = [{"role": "developer", "content": "Hi", "name": None}]


@pytest.fixture
def answering(server: InferenceServer) -> InferenceServer:
    server.script = says(response(final=True, result=[json.dumps(TOLD)]))
    return server


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_and_a_chat_go_to_the_engine_and_its_result_comes_back(
    answering: InferenceServer, prefix: str
) -> None:
    async with gateway(answering) as http:
        text = {"model": "minisgl", "prompt": "Hé", "add_special_tokens": False, "return_token_strs": True}
        assert (await http.post(f"{prefix}/tokenize", json=text)).json() == TOLD
        chat = {"messages": CHAT, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "tools": None}
        assert (await http.post(f"{prefix}/tokenize", json=chat)).json() == TOLD
        await http.post(f"{prefix}/detokenize", json={"tokens": [5, 6], "skip_special_tokens": True})
    text_, chat_, tokens = map(inputs_of, answering.requests)
    assert (text_["operation"], text_["text_input"]) == ("tokenize", "Hé")
    assert json.loads(text_["sampling_parameters"]) == {"add_special_tokens": False, "return_token_strs": True}
    assert json.loads(chat_["messages"]) == [{"role": "system", "content": "Hi"}] and "text_input" not in chat_
    assert json.loads(chat_["sampling_parameters"]) == {
        "add_generation_prompt": False,
        "chat_template_kwargs": {"a": 1},
    }
    assert (tokens["operation"], tokens["input_ids"]) == ("detokenize", [5, 6])
    assert json.loads(tokens["sampling_parameters"]) == {"skip_special_tokens": True}
    assert all(request.id.startswith(("tokenize-", "detokenize-")) for request in answering.requests)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says_"),
    [
        ("tokenize", {}, 400, "prompt", "prompt: give either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": []}, 400, "prompt", "prompt: give either prompt or messages"),
        ("tokenize", {"prompt": ["a"]}, 400, "prompt", "prompt: expected `str | null`, got `array`"),
        ("tokenize", {"prompt": "a", "max_tokens": 1}, 400, "max_tokens", "unknown field 'max_tokens'"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model", "The model 'other' does not exist"),
        ("detokenize", {}, 400, "tokens", "tokens: is required"),
        ("detokenize", {"tokens": "a"}, 400, "tokens", "tokens: expected `array`, got `str`"),
        ("detokenize", {"tokens": [1 << 40]}, 400, "tokens", "tokens: must be integers of 32 bits"),
    ],
)
async def test_a_wrong_body_is_refused_before_the_engine_is_asked(
    server: InferenceServer, path: str, body: dict[str, Any], status: int, param: str, says_: str
) -> None:
    async with gateway(server) as http:
        answer = await http.post(f"/{path}", json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (status, param) and error["message"].startswith(says_)
    assert not server.requests


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        ("tokenize", {"prompt": "a"}, "text_input: must hold at most 9 bytes", "prompt"),
        ("tokenize", {"messages": CHAT}, "messages: has no user", "messages"),
        ("detokenize", {"tokens": [7]}, "input_ids: must be from 0 to 5, got 7 at position 0", "tokens"),
    ],
)
async def test_what_the_engine_refuses_has_the_clients_name(
    server: InferenceServer, path: str, body: dict[str, Any], words: str, param: str
) -> None:
    server.script = aborts(grpc.StatusCode.INVALID_ARGUMENT, words)
    async with gateway(server) as http:
        answer = await http.post(f"/{path}", json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param) and error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"])
async def test_they_are_behind_the_keys_take_json_only_and_post_only(server: InferenceServer, path: str) -> None:
    async with gateway(server, api_keys=("k",)) as http:
        assert (await http.post(path, json={"prompt": "a"})).status_code == 401
        http.headers["Authorization"] = "Bearer k"
        assert (await http.post(path, content=b"{}")).status_code == 415
        assert (await http.get(path)).status_code == 405
    assert not server.requests
