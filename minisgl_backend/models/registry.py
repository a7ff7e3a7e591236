"""Architecture name → its family. A new architecture is one declaration in `families/` and one line here. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.models.families.llama import LLAMA
from minisgl_backend.models.family import Family

FAMILIES: Mapping[str, Family] = {family.architecture: family for family in (LLAMA,)}
