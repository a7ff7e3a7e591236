"""docs/clients.md as the tests read it: the rows of "Field by field", and the examples."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
}
"""What each endpoint needs."""


@dataclass(frozen=True)
class Row:
    """A field, and what becomes of it."""

    field: str
    sent: dict[str, Any]
    verdicts: dict[str, str]  # by endpoint: "yes…", "no effect", or the error's message
    tested: str

    def accepted(self, path: str) -> bool:
        """Else refused with the verdict."""
        return self.verdicts[path].startswith("yes") or self.verdicts[path] == "no effect"

    def body(self, path: str) -> dict[str, Any]:
        """Of the request that the row is about."""
        return {**LEAST[path], **self.sent}


def field_rows() -> list[Row]:
    """In the page's order. "the same" is the cell before."""
    text = PAGE.read_text(encoding="utf-8").split("## Field by field\n")[1]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    rows = []
    for line in lines:
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        field, sent, completions, chat, tested = cells
        verdicts = {COMPLETIONS: completions, CHAT: completions if chat == "the same" else chat}
        rows.append(Row(field.strip("`"), json.loads(sent.removeprefix("`").removesuffix("`")), verdicts, tested))
    return rows


def example(heading: str) -> str:
    """The Python of the section with this heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)
