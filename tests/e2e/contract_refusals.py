"""The second table of test_conformance.py: requests that are refused, and how the refusal begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from e2e.contract_answers import CHAT, CONTEXT, DOORS, GRPC, HTTP, VOCABULARY, sampled


@dataclass(frozen=True)
class Refused:
    """A request that the model refuses. says: how its message begins."""

    says: str
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    status: str = "INVALID_ARGUMENT"
    doors: tuple[str, ...] = DOORS
    timeout_us: int | None = None


def refused(says: str, inputs: Mapping[str, Any] | None = None, /, **more: Any) -> Refused:
    """more: of Refused, or sampling parameters."""
    own = {name: more.pop(name) for name in ("parameters", "status", "doors", "timeout_us") if name in more}
    has_prompt = inputs is not None and any(kind in inputs for kind in ("text_input", "input_ids", "messages"))
    prompt = {} if has_prompt else {"text_input": "say:"}
    return Refused(says, {**prompt, **(inputs or {}), **(sampled(**more) if more else {})}, **own)


def unsupported(field: str, inputs: Mapping[str, Any] | None = None, /, **more: Any) -> Refused:
    return refused(f"{field}: ", inputs, status="UNIMPLEMENTED", **more)


def chat(content: Any) -> dict[str, str]:
    return {"messages": f'[{{"role": "user", "content": {content}}}]'}


REFUSED = [
    # one prompt
    Refused("text_input: is missing, and so are input_ids and messages", {}),
    refused("text_input: is given together with input_ids", {"text_input": "say:", "input_ids": [5]}),
    refused("text_input: is given together with messages", {"text_input": "say:", "messages": CHAT}),
    refused("input_ids: is given together with messages", {"input_ids": [5], "messages": CHAT}),
    refused(
        "text_input: is given together with input_ids and messages",
        {"text_input": "say:", "input_ids": [5], "messages": CHAT},
    ),
    refused("text_input: must not be empty", {"text_input": ""}),
    refused("text_input: is not valid UTF-8", {"text_input": b"a\xff\xfe"}, doors=GRPC),
    refused("text_input: is not valid UTF-8", {"text_input": "a\ud800"}, doors=GRPC),
    refused(f"text_input: the prompt is too long: {CONTEXT} tokens", {"text_input": "w" * CONTEXT}),
    refused("text_input: the prompt is too long: 1000000 bytes", {"text_input": "w" * 1_000_000}),
    refused("text_input: must be an input tensor", parameters={"text_input": "say:"}, doors=GRPC),
    refused("input_ids: must not be empty", {"input_ids": np.array([], dtype=np.int32)}),
    refused(f"input_ids: must be from 0 to {VOCABULARY - 1}, got -1 at position 1", {"input_ids": [5, -1]}),
    refused(
        f"input_ids: must be from 0 to {VOCABULARY - 1}, got {VOCABULARY} at position 0", {"input_ids": [VOCABULARY]}
    ),
    refused("input_ids: must be from 0", {"input_ids": [2**31 - 1]}),
    refused(f"input_ids: the prompt is too long: {CONTEXT} tokens", {"input_ids": [5] * CONTEXT}),
    # a chat
    refused("messages: ", {"messages": ""}),
    refused("messages: ", {"messages": "hi"}),
    refused("messages: ", {"messages": "[]"}),
    refused("messages: ", {"messages": '{"role": "user", "content": "hi"}'}),
    refused("messages: message 0", {"messages": '["hi"]'}),
    refused("messages: message 0", {"messages": '[{"content": "hi"}]'}),
    refused("messages: message 0: content", chat("5")),
    refused("messages: message 0, part 0", chat('["hi"]')),
    refused("messages: message 0, part 0", chat('[{"type": "text"}]')),
    unsupported("messages", chat('[{"type": "image_url", "image_url": {"url": "data:,"}}]')),
    refused("messages: ", chat('"\\ud800"')),
    refused("messages: ", {"messages": b'[{"role": "user", "content": "\xff"}]'}, doors=GRPC),
    refused("messages: ", {"messages": "[" * 100_000}),
    refused("messages: the prompt is too long", chat('"' + "w" * CONTEXT + '"')),
    refused("messages: the prompt is too long:", chat('"' + "w" * 1_000_000 + '"')),
    unsupported("tools", {"messages": CHAT, "tools": '[{"type": "function", "function": {"name": "f"}}]'}),
    refused("parse_output: needs messages", {"parse_output": True}),
    refused("tools: needs messages", {"tools": "[1]"}),
    unsupported("chat_template", {"messages": CHAT}, chat_template="{{ messages }}"),
    refused("continue_final_message: needs a last message", {"messages": CHAT}, continue_final_message=True),
    refused("chat_template_kwargs: ", {"messages": CHAT}, chat_template_kwargs=[1]),
    refused("chat_template_kwargs: needs messages", chat_template_kwargs={"ending": "x"}),
    refused("add_generation_prompt: needs messages", add_generation_prompt=False),
    refused("add_generation_prompt: must be true or false", {"messages": CHAT}, add_generation_prompt="perhaps"),
    unsupported("image", {"image": ["aGk="]}),
    # what can not be echoed
    refused("exclude_input_in_output: ", {"stream": True, "exclude_input_in_output": False}),
    refused("exclude_input_in_output: ", {"input_ids": [5], "exclude_input_in_output": False}),
    refused("exclude_input_in_output: ", {"messages": CHAT, "exclude_input_in_output": False}),
    # the object of sampling parameters
    *(
        refused("sampling_parameters: ", {"sampling_parameters": raw})
        for raw in ("max_tokens=5", "[1]", "5", "{", '{"seed": 1, "seed": 1}', '{"seed": ' + "[" * 100_000)
    ),
    refused("sampling_parameters: ", {"sampling_parameters": b'{"seed": "\xff"}'}, doors=GRPC),
    refused("sampling_parameters: must be an input tensor", parameters={"sampling_parameters": "{}"}, doors=GRPC),
    # ranges
    *(refused("max_tokens: must ", max_tokens=value) for value in (0, -1, 1.5, "many", None, True, [], 2**31, "1e400")),
    *(
        refused("temperature: must ", temperature=value)
        for value in (-0.1, float("nan"), float("inf"), "hot", 101, {}, "NaN")
    ),
    *(refused("top_k: must ", top_k=value) for value in (-2, 1.5, "some", 2**31)),
    *(refused("top_p: must ", top_p=value) for value in (0, -1, 1.01, "most", float("nan"))),
    *(refused("seed: must ", seed=value) for value in (-2, 2**63, 0.5, "lucky")),
    *(refused("ignore_eos: must ", ignore_eos=value) for value in (2, "perhaps", [])),
    *(
        refused("stop_token_ids: ", stop_token_ids=value)
        for value in ([-1], [VOCABULARY], ["x"], "x", 1.5, [5] * 257, {})
    ),
    refused("stop_token_ids: must ", {"stop_token_ids": [-1]}),
    refused("stop_token_ids: must ", {"stop_token_ids": [VOCABULARY]}),
    refused("stop_token_ids: must ", {"stop_token_ids": [5] * 257}),
    refused("stop_token_ids: ", parameters={"stop_token_ids": "1,2"}, doors=GRPC),
    refused("max_tokens: must ", parameters={"max_tokens": "many"}),
    refused("temperature: must ", parameters={"temperature": -1}),
    refused("max_tokens: must ", parameters={"parameters": {"max_tokens": 0}}, doors=HTTP),
    # words
    *(
        refused(f"{name}: must ", **{name: value})
        for name in ("stop", "stop_words", "bad_words")
        for value in ([5], 5, {}, ["x" * 9_000], [str(number) for number in range(300)])
    ),
    refused("stop: must hold at most 64 strings", {"stop": [str(number) for number in range(65)]}),
    refused("bad_words: must be made of the model's tokens", bad_words=[" "]),
    # how tokens are drawn, and what is told
    *(refused("n: must ", n=value) for value in (0, -1, 1.5, 129, 5_000_000, "many")),
    refused("n: must be 1 when temperature is 0", n=2, temperature=0),
    refused("n: must ", parameters={"n": 0}),
    *(refused("min_p: must ", min_p=value) for value in (-0.1, 1.1, float("nan"))),
    *(
        refused(f"{name}: must ", **{name: value})
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.1, 2.1, float("inf"), "NaN")
    ),
    *(refused("repetition_penalty: must ", repetition_penalty=value) for value in (0, -1, 101, float("nan"))),
    *(
        refused("logit_bias: ", logit_bias=value)
        for value in ({"cat": 1}, {"5": 101}, {str(VOCABULARY): 1}, [1], "{}x")
    ),
    *(refused("allowed_token_ids: ", allowed_token_ids=value) for value in ([], [-1], [VOCABULARY], 5)),
    refused("allowed_token_ids: may leave nothing to draw", allowed_token_ids=[2], min_tokens=1),
    *(refused("min_tokens: must ", min_tokens=value) for value in (-1, 17, "some")),
    *(
        refused(f"{name}: must ", **{name: value})
        for name in ("logprobs", "prompt_logprobs")
        for value in (-1, 21, 1_000_000, "all")
    ),
    *(refused("truncate_prompt_tokens: must ", truncate_prompt_tokens=value) for value in (0, -2, CONTEXT, "all")),
    *(
        refused(f"{name}: must be true or false", **{name: "perhaps"})
        for name in ("skip_special_tokens", "include_stop_str_in_output", "echo", "return_token_ids")
    ),
    refused("echo: says one thing and exclude_input_in_output another", {"exclude_input_in_output": True}, echo=True),
    refused("echo: must not be true with input_ids", {"input_ids": [5]}, echo=True),
    # known, not built
    *(
        unsupported(name, **{name: value})
        for name, value in {
            "best_of": "3",
            "length_penalty": 2,
            "use_beam_search": True,
            "top_logprobs": 1,
            "detokenize": False,
            "lora_name": "a",
        }.items()
    ),
    unsupported("best_of", parameters={"best_of": 2}),
    # unknown keys, with the nearest known
    *(
        refused(f"sampling_parameters: unknown parameter '{key}'; did you mean '{known}'", **{key: 1})
        for key, known in {
            "temprature": "temperature",
            "max_token": "max_tokens",
            "topk": "top_k",
            "stop_word": "stop_words",
            "return_logprob": "return_logprobs",
            "excludeinput_in_output": "exclude_input_in_output",
            "timeuot": "timeout",
        }.items()
    ),
    refused(
        "sampling_parameters: unknown parameter 'temprature'; did you mean 'temperature'",
        parameters={"temprature": 1.5},
    ),
    refused("sampling_parameters: unknown parameter 'xyzzy'", xyzzy=1),
    refused("sampling_parameters: unknown parameter ", **{"é\n/etc/passwd" + "x" * 500: 1}),
    *(
        refused(f"{name}: is no sampling parameter", **{name: True})
        for name in ("stream", "return_output_ids", "text_input", "timeout")
    ),
    # two places that do not agree
    refused("max_tokens: ", parameters={"max_tokens": 3}, max_tokens=2),
    refused("max_tokens: ", parameters={"max_tokens": "3"}, max_tokens="2"),
    refused("max_tokens: ", parameters={"parameters": {"max_tokens": 3}}, max_tokens=2, doors=HTTP),
    refused("stream: ", {"stream": True}, parameters={"stream": False}, doors=GRPC),
    refused(
        "exclude_input_in_output: ",
        {"exclude_input_in_output": True},
        parameters={"exclude_input_in_output": "false"},
        doors=GRPC,
    ),
    refused("return_output_ids: ", {"return_output_ids": True}, parameters={"return_output_ids": False}, doors=GRPC),
    refused("stop_token_ids: ", {"stop_token_ids": [5]}, parameters={"stop_token_ids": "[6]"}, doors=GRPC),
    refused("stop_token_ids: ", {"stop_token_ids": [5]}, stop_token_ids=[5, 6]),
    refused(
        "parameters: names 'max_tokens' twice",
        parameters={"max_tokens": 2, "parameters": {"max_tokens": 3}},
        doors=HTTP,
    ),
    # options that are no option
    *(
        refused(f"{name}: must be true or false", parameters={name: value}, doors=GRPC)
        for name in ("stream", "return_output_ids")
        for value in ("maybe", 2, 0.5)
    ),
    # Triton's own
    unsupported("sequence_id", parameters={"sequence_id": 4}, doors=HTTP),
    *(
        refused("priority: must ", parameters={"priority": value}, doors=HTTP)
        for value in ("high", 2**31, -(2**31) - 1)
    ),
    *(refused("timeout: must ", parameters={"timeout": value}, doors=HTTP) for value in ("soon", -1)),
    refused("priority: must ", priority=1.5),
    unsupported("priority", parameters={"priority": 1}, doors=HTTP),
    unsupported("priority", priority=-5),
    refused("deadline_ms: must ", deadline_ms=-1),
    refused("deadline_ms: must ", deadline_ms="soon"),
]
