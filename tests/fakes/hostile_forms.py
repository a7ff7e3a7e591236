"""Twenty forms of answers that no server may take: each breaks another bound, or is no form at all."""

from __future__ import annotations

from typing import Any

Form = dict[str, Any]


def costly() -> list[Form]:
    """Within every bound that can be seen beforehand, and killed as they are compiled: against SmolLM2's vocabulary
    they took 8 s of a core of a 2026 Xeon, of 2 s that are allowed, and then over 50 ms a token.
    """
    return [{"guided_regex": f"(.{{0,{most}}}|[a-z]{{0,99}}){{0,99}}z"} for most in (98, 99)]


def refused_at_once() -> list[Form]:
    """By what they say."""
    nested: Any = {"type": "integer"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested}}
    wide = {f"p{i}": {"type": "string", "maxLength": 9} for i in range(900)}
    itself = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    return [
        {"guided_regex": "(a{1,1000}){1,1000}"},
        {"guided_regex": "(" * 1500 + ")" * 1500},
        {"guided_regex": "(?=a)+"},
        {"guided_regex": r"(a|b)\1"},
        {"guided_regex": "[^"},
        {"guided_regex": "a" * 5000},
        {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
        {"guided_grammar": "root ::= root"},
        {"guided_grammar": "no grammar"},
        {"guided_json": {"enum": [f"value {i}" for i in range(20_000)]}},
        {"guided_json": "[" * 60_000},
        {"guided_json": nested},
        {"guided_json": {"type": "object", "properties": wide, "not": {}}},
        {"guided_json": itself},
        {"guided_json": {"type": "string", "pattern": "(.{1,900}x){1,200}"}},
        {"guided_json": {"$ref": "http://169.254.169.254/schema"}},
        {"guided_choice": ["x" * 70_000]},
        {"structured_outputs": {"structural_tag": {"format": {"type": "any_tokens"}}}},
    ]
