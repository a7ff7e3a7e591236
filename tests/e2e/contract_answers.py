"""The first table of test_conformance.py: requests that are answered, and what with.

Where it stands: the model of these tests answers a prompt by its last character (see SCRIPTS), so each case is an input
or output of the contract in one of its spellings, and the whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fakes.scripted_model import EOS_ID, ids_of

SCRIPTS = {
    ":": [b" the", b" quick", b" fox"],
    "~": [b" one", b" two", b" three", b" one"],  # for ever
    "\n": [b"Hello", b" there"],  # what the chat template ends with
    "?": [b"<thi", b"nk>hm", b"</", b"think>\n\n", b"yes"],
}
IDS = ids_of(SCRIPTS)
VOCABULARY = 3 + len(IDS)
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ ending | default('') }}"
)

GRPC, HTTP = ("sync gRPC", "asyncio gRPC"), ("generate", "generate_stream")
DOORS = (*GRPC, *HTTP)

FOX = " the quick fox"
FOX_IDS = [IDS[b" the"], IDS[b" quick"], IDS[b" fox"], EOS_ID]
SEVERAL_TURNS = (
    '[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},'
    ' {"role": "assistant", "content": "ho"}, {"role": "user", "content": "é"}]'
)
CHAT = '[{"role": "user", "content": "hi"}]'


@dataclass(frozen=True)
class Good:
    """A request that is answered. told: outputs beside text and reason, all responses joined; None: any number."""

    name: str
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    text: str = FOX
    reason: str = "stop"
    told: Mapping[str, list[Any] | None] = field(default_factory=dict)
    prompt: str | None = None  # in front of a whole answer; None: text_input
    streams: bool = True
    doors: tuple[str, ...] = DOORS


def good(name: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None, **expected: Any) -> Good:
    """inputs without a prompt get "say:", whose answer is FOX."""
    has_prompt = any(kind in inputs for kind in ("text_input", "input_ids", "messages"))
    return Good(name, inputs if has_prompt else {"text_input": "say:", **inputs}, parameters or {}, **expected)


def sampled(**values: Any) -> dict[str, Any]:
    return {"sampling_parameters": values}


QUICK = {"text": " the quick", "reason": "length"}
UP_TO_TWO = {"text": " one", "reason": "stop"}  # a token that stops is counted and told, and is no text
ENDLESS = {"text_input": "say~"}
CHATTED = {"text": "Hello there", "prompt": ""}
BARE = {"prompt": ""}

GOOD = [
    good("a text alone", {}),
    good("sixteen tokens by default", ENDLESS, text=" one two three" * 5 + " one", reason="length"),
    # the prompt in front
    good("the prompt excluded", {"exclude_input_in_output": True}, **BARE),
    good("the prompt not excluded", {"exclude_input_in_output": False}, streams=False),
    good("excluded by a parameter", {}, {"exclude_input_in_output": True}, **BARE),
    good("excluded by a word", {}, {"exclude_input_in_output": "true"}, **BARE, doors=GRPC),
    good(
        "excluded in both places",
        {"exclude_input_in_output": True},
        {"exclude_input_in_output": "True"},
        **BARE,
        doors=GRPC,
    ),
    good("any characters", {"text_input": "é😀\x00\t\u2028 :"}),
    good("no word but a space", {"text_input": " :"}),
    # sampling parameters: numbers and strings, in either place and in both
    good("a number in the tensor", sampled(max_tokens=2), **QUICK),
    good("a float in the tensor", sampled(max_tokens=2.0), **QUICK),
    good("a string in the tensor", sampled(max_tokens="2"), **QUICK),
    good("a number in the request", {}, {"max_tokens": 2}, **QUICK),
    good("a float in the request", {}, {"max_tokens": 2.0}, **QUICK),
    good("a string in the request", {}, {"max_tokens": "2"}, **QUICK),
    good("both places agree", sampled(max_tokens=2), {"max_tokens": 2}, **QUICK),
    good("both places agree, one as a string", sampled(max_tokens="2"), {"max_tokens": 2}, **QUICK),
    good("each place has its own", sampled(max_tokens=2, top_k=5), {"temperature": "0.5", "seed": 3}, **QUICK),
    good("an empty object", {"sampling_parameters": "{}"}),
    good("an empty string of parameters", {"sampling_parameters": ""}),
    good(
        "all as numbers", sampled(max_tokens=2, temperature=0.7, top_k=3, top_p=0.9, seed=5, ignore_eos=False), **QUICK
    ),
    good(
        "all as strings",
        sampled(max_tokens="2", temperature="0", top_k="-1", top_p="1.0", seed="5", ignore_eos="0"),
        **QUICK,
    ),
    good("null asks for nothing", sampled(seed=None, temperature=None, n=None, stop=None)),
    good(
        "what is not built, switched off",
        sampled(
            best_of="1",
            use_beam_search="false",
            top_logprobs=0,
            lora_name=None,
        ),
    ),
    good(
        "all that shapes a draw",
        sampled(
            n=1,
            max_tokens=2,
            min_p="0.1",
            presence_penalty=0.5,
            frequency_penalty="-1",
            repetition_penalty=1.1,
            bad_words=["lazy"],
            min_tokens=1,
            logprobs=3,
        ),
        **QUICK,
    ),
    good("a biased token", sampled(max_tokens=1, logit_bias={str(IDS[b" two"]): 100}), text=" two", reason="length"),
    good(
        "a bias as a string",
        {},
        {"max_tokens": 1, "logit_bias": f'{{"{IDS[b" two"]}": "1e2"}}'},
        text=" two",
        reason="length",
        doors=GRPC,
    ),
    good(
        "one allowed token", sampled(max_tokens=2, allowed_token_ids=[IDS[b" two"]]), text=" two two", reason="length"
    ),
    good(
        "special tokens shown",
        sampled(ignore_eos=True, max_tokens=5, skip_special_tokens=False),
        text=f"{FOX}<|im_end|><|im_end|>",
        reason="length",
    ),
    good("an echo", sampled(echo=True), streams=False),
    good("no echo", sampled(echo="false"), prompt=""),
    good(
        "only the end of a prompt",
        {"return_num_input_tokens": True, **sampled(truncate_prompt_tokens=1)},
        prompt=":",  # of "say:", as the model saw it
        told={"num_input_tokens": [1]},
    ),
    good("past the end", sampled(ignore_eos=True, max_tokens=5), reason="length"),
    # the end
    good("a stop token in its tensor", {**ENDLESS, "stop_token_ids": [IDS[b" two"]]}, **UP_TO_TWO),
    good("stop tokens in the parameters", {**ENDLESS, **sampled(stop_token_ids=[IDS[b" two"], 5])}, **UP_TO_TWO),
    good("stop tokens as a string", ENDLESS, {"stop_token_ids": f"[{IDS[b' two']}]"}, **UP_TO_TWO, doors=GRPC),
    good(
        "stop tokens in both places",
        {**ENDLESS, "stop_token_ids": [IDS[b" two"]], **sampled(stop_token_ids=[IDS[b" two"]])},
        **UP_TO_TWO,
    ),
    good("a stop string in its tensor", {**ENDLESS, "stop": ["", " tw"]}, **UP_TO_TWO),
    good("a stop string by the other name", {**ENDLESS, "stop_words": [" two", "fox"]}, **UP_TO_TWO),
    good("a stop string in the parameters", {**ENDLESS, **sampled(stop=" tw")}, **UP_TO_TWO),
    good("a stop string in the request", ENDLESS, {"stop": " tw"}, **UP_TO_TWO),
    good("a list in the body as a stop", ENDLESS, {"stop": [" tw"]}, **UP_TO_TWO, doors=HTTP),
    good("a stop string that spans tokens", {**ENDLESS, "stop": ["e two t"]}, text=" on", reason="stop"),
    good(
        "a stop string shown",
        {**ENDLESS, "stop": [" tw"], **sampled(include_stop_str_in_output=True)},
        text=" one tw",
        reason="stop",
    ),
    good(
        "a stop string after so many tokens, the last one counted",
        {**ENDLESS, "stop": [" two"], "return_num_output_tokens": True, **sampled(min_tokens=2)},
        text=" one two three one",
        reason="stop",
        told={"num_output_tokens": [5]},
    ),
    good("no stop token", {"stop_token_ids": np.array([], dtype=np.int32)}),
    good("stop words that are none", {"stop": [""], "stop_words": ["", ""], "bad_words": [""]}),
    good("no stop words", sampled(stop=[], stop_words=[""], bad_words="")),
    good(
        "the longest prompt",
        {"text_input": "w" * (CONTEXT - 2) + ":", **sampled(max_tokens=1)},
        text=" the",
        reason="length",
    ),
    good("an answer cut by the context", {"text_input": "w" * (CONTEXT - 3) + ":", **sampled(max_tokens=99)}, **QUICK),
    # what a client asks to be told
    good("input tokens counted", {"return_num_input_tokens": True}, told={"num_input_tokens": [4]}),
    good("output tokens counted", {"return_num_output_tokens": True}, told={"num_output_tokens": [4]}),
    good("the tokens themselves", {"return_output_ids": True}, told={"output_ids": FOX_IDS}),
    good(
        "the tokens of a cut answer",
        {"return_output_ids": True, **sampled(max_tokens=2)},
        told={"output_ids": FOX_IDS[:2]},
        **QUICK,
    ),
    good(
        "the tokens up to a stop token",
        {**ENDLESS, "stop_token_ids": [IDS[b" two"]], "return_output_ids": True},
        told={"output_ids": [IDS[b" one"], IDS[b" two"]]},
        **UP_TO_TWO,
    ),
    good("times", {"return_perf_metrics": True}, told={"num_cached_tokens": None, "queue_ms": None, "ttft_ms": None}),
    good("no reason", {"return_finish_reason": False}, reason=""),
    good("a reason", {"return_finish_reason": True}),
    good(
        "nothing more",
        {
            "return_num_input_tokens": False,
            "return_num_output_tokens": False,
            "return_output_ids": False,
            "return_perf_metrics": False,
            "return_logprobs": False,
            "return_cumulative_logprob": False,
        },
    ),
    good(
        "told by parameters",
        {},
        {"return_num_input_tokens": True, "return_output_ids": True},
        told={"num_input_tokens": [4], "output_ids": FOX_IDS},
    ),
    good(
        "told by words",
        {},
        {"return_num_input_tokens": "true", "return_output_ids": "false"},
        told={"num_input_tokens": [4]},
        doors=GRPC,
    ),
    # the other prompts
    good("token ids", {"input_ids": [5, IDS[b":"]]}, **BARE),
    good(
        "one token id",
        {"input_ids": [IDS[b":"]], "return_num_input_tokens": True},
        **BARE,
        told={"num_input_tokens": [1]},
    ),
    good("token ids, excluded", {"input_ids": [IDS[b":"]], "exclude_input_in_output": True}, **BARE),
    good("the outermost ids", {"input_ids": [0, VOCABULARY - 1, IDS[b":"]]}, **BARE),
    good("a chat", {"messages": CHAT}, **CHATTED),
    good("a chat, excluded", {"messages": CHAT, "exclude_input_in_output": True}, **CHATTED),
    good(
        "a chat of several turns",
        {"messages": SEVERAL_TURNS},
        **CHATTED,
    ),
    good(
        "parts of a content are joined",
        {
            "messages": '[{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]',
            "return_num_input_tokens": True,
        },
        told={"num_input_tokens": [len("\x01user\nhi\x01\x01assistant\n")]},
        **CHATTED,
    ),
    good("a content of null", {"messages": '[{"role": "assistant", "content": null}]'}, **CHATTED),
    good("template arguments", {"messages": CHAT, **sampled(chat_template_kwargs={"ending": "say:"})}, **BARE),
    good("no generation prompt", {"messages": CHAT, **sampled(add_generation_prompt=False)}, text="", prompt=""),
    good(
        "a generation prompt",
        {"messages": CHAT, **sampled(add_generation_prompt="true", continue_final_message=False)},
        **CHATTED,
    ),
    *(good(f"no tools: {tools!r}", {"messages": CHAT, "tools": tools}, **CHATTED) for tools in ("", "null", "[]")),
    good("no image", {"image": [""]}),
    # Triton's own keys
    good(
        "keys of Triton",
        {},
        {"id": "7", "binary_data_output": False, "triton_anything": 1, "priority": 0, "timeout": 0},
        doors=HTTP,
    ),
    # members of `parameters`
    good("nested", {}, {"parameters": {"max_tokens": 2, "seed": "5"}}, **QUICK, doors=HTTP),
    good("nested and beside", {}, {"parameters": {"max_tokens": 2}, "temperature": 0}, **QUICK, doors=HTTP),
    good("nested, with the tensor", sampled(max_tokens=2), {"parameters": {"max_tokens": "2"}}, **QUICK, doors=HTTP),
    good(
        "nested options and lists",
        {},
        {"parameters": {"exclude_input_in_output": True, "stop": [""], "return_output_ids": True}},
        **BARE,
        told={"output_ids": FOX_IDS},
        doors=HTTP,
    ),
    good("a list in the body", ENDLESS, {"stop_token_ids": [IDS[b" two"], 7]}, **UP_TO_TWO, doors=HTTP),
    good("one value for a list", ENDLESS, {"stop_token_ids": IDS[b" two"]}, **UP_TO_TWO, doors=HTTP),
]
