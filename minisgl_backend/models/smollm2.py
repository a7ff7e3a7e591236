"""SmolLM2-135M-Instruct: llama.cpp's file (GGUF) → a Hugging Face folder that every transformers since 4.51 loads.

Used by `minisgl fetch smollm2` only; what it writes is what a start from the GGUF file itself reads. The weights are
unpacked to float32, so they are exactly what the file says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from minisgl_backend.models.files import read_object
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.gguf_files import GGUF_FILES, GgufFiles


def convert_smollm2(gguf_file: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Writes the Hugging Face folder (which must exist) of `gguf_file`.

    progress(done, total) is called after each tensor. Needs about 0.6 GB of memory and of disk. Raises ModelUnsupported
    for a file that an engine would refuse too.
    """
    import torch
    from safetensors.torch import save_file

    from minisgl_backend.models.checkpoint import check_tensors
    from minisgl_backend.models.gguf_tensors import GgufTensors
    from minisgl_backend.models.tensors import expected_tensors

    spec = read_model_spec(gguf_file)
    source, names = GgufTensors(gguf_file, spec), expected_tensors(spec)
    check_tensors(names, source.shapes())
    weights: dict[str, torch.Tensor] = {}
    for done, name in enumerate(names, start=1):
        weights[name] = source.read(name).float().contiguous()
        progress(done, len(names))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    files = GgufFiles(gguf_file)
    for name in GGUF_FILES:
        (folder / name).write_text(files.text(name) or "", encoding="utf-8")
    config = {"model_type": "llama", **(read_object(files, "config.json") or {})}
    config["torch_dtype"] = config["dtype"]  # its name before transformers 4.56
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
