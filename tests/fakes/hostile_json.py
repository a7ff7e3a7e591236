"""Parameter objects as text, from a seed: plausible ones, and ones written to break a validator."""

from __future__ import annotations

import json
from random import Random

from minisgl_backend.text.parameters import _ELSEWHERE, _OFF, READERS

_KEYS = [
    *READERS,
    *READERS,
    *READERS,
    *_OFF,
    *_ELSEWHERE,
    "tool_choice",
    "",
    "\ud800",
    "k" * 300,
    "naïve",
]

_PLAIN = ["0", "1", "5", "0.5", "-1", "2", "16", "true", "false", "null", '"1"', '"0.7"', '"true"', '"False"', '"32"']

_ODD = [
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "5e-324", "-0.0", "-0", "1E5", "0.1e-400"),
    *("2147483647", "2147483648", "-2147483648", "-2147483649", "9223372036854775807", "9223372036854775808"),
    *("9" * 39, "9" * 41, "9" * 4000, "9" * 5000, "-" + "9" * 400, "0." + "3" * 500, "1" + "0" * 400 + ".5"),
    *('""', '" "', '" 1 "', '"1_0"', '"0x10"', '"1e400"', '"nan"', '"inf"', '"-"', '"+1"', '"1."', '".5"', '"."'),
    *('"\u0665"', '"²"', '"１２"', '"1\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"9999999999999999999999"', '"[1,2]"'),
    *('"[1,"', '"[]"', '"{}"', '"null"', '"' + "1" * 5000 + '"', '"' + "x" * 5000 + '"', '"{{ messages }}"'),
    *("[]", "[1]", "[1,2,3]", "[-1]", "[null]", "[true]", '["a"]', '[""]', "[1.0]", "[1e999]", "[[1]]", "[2147483648]"),
    *("{}", '{"a":1}', '{"a":{"b":[1,"c"]}}', '{"a":1,"a":2}', '{"messages":1}', '{"\\ud800":1}', '{"":null}'),
    *("[" * 500 + "]" * 500, '{"a":' * 300 + "1" + "}" * 300, "[" * 995 + "]" * 995, "[" * 100_000),
    *("", "'a'", "nul", "+1", "01", ".5", "1.", "[1", '"open', "{,}", "[1,]", "\ufeff1"),
    json.dumps(list(range(300))),
]

_DIGITS = "0123456789" * 3 + ".eE+-_ x٣"


_FITTING = {
    "max_tokens": ["1", "16", '"5"', "2147483647", "5.0"],
    "temperature": ["0", "0.7", '"1e-5"', "100", "-0.0", "5e-324"],
    "top_k": ["-1", "0", '"1"', "40", "2147483647"],
    "top_p": ["1", '".9"', "1e-9", "0.5", "5e-324"],
    "seed": ["0", "null", '"9223372036854775807"', "7"],
    "ignore_eos": ["true", '"False"', "1", "0"],
    "stop_token_ids": ["[]", "[1, 2, 1]", '"[3,2]"', "[0]", "[383]", "[384]", "[2147483647]"],
    "n": ["1", "2", '"3"', "128", "129"],
    "min_tokens": ["0", "1", '"16"', "17"],
    "min_p": ["0", "0.3", '"1"'],
    "presence_penalty": ["0", "-2", '"2.0"', "0.5"],
    "frequency_penalty": ["-0.0", "2", "-1.5"],
    "repetition_penalty": ["1", '"1.1"', "0.01", "100"],
    "logit_bias": ["{}", '{"5": -100}', '{"383": 100, "0": "1e-3"}', '{"384": 0}', '"{\\"7\\": 1}"'],
    "bad_words": ['""', '"fox"', '["the", " quick"]', '[""]', '["\u00e9", "x"]', '[" "]', '"<|im_end|>"'],
    "allowed_token_ids": ["[65]", "[2]", "[0, 383, 65]", "[]", '"[5,6]"'],
    "stop": ['"END"', '["a", "ab", "\u00e9"]', "[]", '""', '["\n\n"]'],
    "stop_words": ['"x"', '["y", ""]'],
    "include_stop_str_in_output": ["true", '"false"'],
    "logprobs": ["0", "20", "true", "false", '"5"', "21", "-1"],
    "prompt_logprobs": ["0", "1", "20"],
    "skip_special_tokens": ["true", "false"],
    "spaces_between_special_tokens": ["true", "false"],
    "truncate_prompt_tokens": ["-1", "1", "2", '"5"', "0"],
    "echo": ["true", "false"],
    "return_token_ids": ["true", '"0"'],
    "priority": ["0", '"0"', "0.0", "1", "-2147483648"],
    "deadline_ms": ["0", "null", "0.0001", "1500", '"1.5"'],
    "add_generation_prompt": ["true", '"1"', "false"],
    "chat_template_kwargs": ["{}", "null", '{"a": 1}', '{"messages": []}'],
    "chat_template": ["null", '"{{ messages[0].content }}"', '"{% for %}"', '""'],
}
"""Values that fit, and some that nearly do."""


def hostile_object(random: Random) -> str:
    """The text of one object of a few members: two in three are plausible; the others are anything, or no JSON."""
    if random.random() < 0.67:
        keys = random.sample([*_FITTING, *_FITTING], random.randint(1, 4))
        members = [
            f'"{key}": {random.choice(_FITTING[key]) if random.random() < 0.9 else _value(random)}' for key in keys
        ]
    else:
        members = [f"{_key(random)}: {_value(random)}" for _ in range(random.randint(0, 3))]
    text = "{" + ", ".join(members) + "}"
    if random.random() < 0.02:
        cut = random.randrange(len(text))
        text = random.choice([text[:cut], text[cut:], f"[{text}]", text + text, text.replace(":", " ", 1)])
    return text


def _key(random: Random) -> str:
    key = random.choice(_KEYS)
    if key and random.random() < 0.05:  # a near miss
        at = random.randrange(len(key))
        key = random.choice([key[:at] + key[at + 1 :], key.upper(), key[:at] + "_" + key[at:], key + " "])
    return json.dumps(key, ensure_ascii=random.random() < 0.5 or not key.isascii())


def _value(random: Random) -> str:
    choice = random.random()
    if choice < 0.55:
        return random.choice(_PLAIN)
    if choice < 0.7:
        return random.choice(_ODD)
    if choice < 0.8:
        return str(random.randint(-(2 ** random.randint(1, 80)), 2 ** random.randint(1, 80)))
    if choice < 0.9:
        return repr(random.uniform(-2, 2) * 10.0 ** random.randint(-320, 308))
    return json.dumps("".join(random.choices(_DIGITS, k=random.randint(0, 8))))
