"""xgrammar's native part, without what its Python package loads beside it.

Where it stands in the flow: loaded on first use by the process that compiles grammars (`text/structured/nursery.py`)
and by a worker (`grammar.py`), nowhere else. `import xgrammar` loads torch, transformers and pydantic: 2 s and 270 MB.
What we need is the extension alone: 0.4 s and 50 MB. So its package is entered without running its __init__, which
does nothing but import. The version is pinned exactly; `GrammarLibrary` names all that we use of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

_RAW_BYTES = 0  # xgrammar's VocabType.RAW: the vocabulary holds the very bytes of each token


class GrammarLibrary:
    """The calls into xgrammar. They run without the GIL; objects of theirs are not thread-safe."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def vocabulary(self, token_bytes: Sequence[bytes]) -> Any:
        """token_bytes: of every id what it adds to the text; empty: no grammar ever draws it but as an end."""
        return self._core.TokenizerInfo(list(token_bytes), _RAW_BYTES, len(token_bytes), [], False)

    def compiler(self, vocabulary: Any, lazy: bool) -> Any:
        """One thread, no cache. lazy: a token mask is computed when it is first asked for, not when compiling."""
        return self._core.GrammarCompiler(vocabulary, 1, False, -1, lazy)

    def from_schema(self, schema: str) -> Any:
        """A JSON schema (as JSON) → a grammar that allows any white space between its parts."""
        return self._core.Grammar.from_json_schema(schema, True, None, None, True, None, False, False)

    def from_regex(self, pattern: str) -> Any:
        """The whole output matches."""
        return self._core.Grammar.from_regex(pattern, False)

    def from_ebnf(self, text: str) -> Any:
        """The rule to begin with is `root`."""
        return self._core.Grammar.from_ebnf(text, "root")

    def from_structural_tag(self, tag: str) -> Any:
        """tag: JSON."""
        return self._core.Grammar.from_structural_tag(tag)

    def compile(self, compiler: Any, grammar: Any) -> Any:
        return compiler.compile_grammar_ebnf(grammar)

    def dump(self, grammar: Any) -> bytes:
        return str(grammar.serialize_json()).encode()

    def load(self, dumped: bytes) -> Any:
        """The inverse of `dump`. Raises RuntimeError for anything else."""
        return self._core.Grammar.deserialize_json(dumped.decode())

    def matcher(self, compiled: Any, end_ids: Sequence[int]) -> Any:
        """end_ids: not empty; what may be drawn when the output is whole."""
        return self._core.GrammarMatcher(compiled, list(end_ids), False, -1, None)


def load_grammar_library(without_torch: bool = False) -> GrammarLibrary:
    """Raises ImportError when it is not installed.

    without_torch: for a process that never needs torch, which the library's foundation would import if it could.
    """
    if without_torch:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # "not to be found", says the import system
    if "xgrammar" not in sys.modules:
        spec = importlib.util.find_spec("xgrammar")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("xgrammar is not installed")
        package = types.ModuleType("xgrammar")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return GrammarLibrary(importlib.import_module("xgrammar.base")._core)
