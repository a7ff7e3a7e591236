"""Architecture name → its family. A new architecture is one declaration in `families/` and one line here. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.models.families.gemma import GEMMA2, GEMMA3
from minisgl_backend.models.families.glm import GLM, GLM4
from minisgl_backend.models.families.gpt_oss import GPT_OSS
from minisgl_backend.models.families.llama import LLAMA
from minisgl_backend.models.families.mistral import MINISTRAL, MISTRAL
from minisgl_backend.models.families.mixtral import MIXTRAL
from minisgl_backend.models.families.olmo import OLMO2, OLMO3
from minisgl_backend.models.families.phi import PHI3
from minisgl_backend.models.families.qwen import QWEN2, QWEN3
from minisgl_backend.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from minisgl_backend.models.families.smollm3 import SMOLLM3
from minisgl_backend.models.family import Family

_FAMILIES = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    OLMO3,
    GLM,
    GLM4,
    SMOLLM3,
    QWEN2_MOE,
    QWEN3_MOE,
    MIXTRAL,
    GPT_OSS,
)

FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _FAMILIES}


def refusal(architecture: str) -> str:
    """Why an architecture outside FAMILIES will not run as it stands; empty when it is only unknown."""
    if not architecture.endswith("ForConditionalGeneration"):
        return ""
    text = architecture.removesuffix("ForConditionalGeneration") + "ForCausalLM"
    other = f"; a checkpoint of its text model alone ({text}) does" if text in FAMILIES else ""
    return f"it takes images or audio beside text, which this engine does not{other}"
