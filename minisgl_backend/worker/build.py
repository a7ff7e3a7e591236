"""From settings and a model folder to a runner that is ready for its warm-up.

The fake device builds a runner without loading torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.distributed.seat import ALONE, Seat
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.locate import cache_folder
from minisgl_backend.models.packed_index import last_packed
from minisgl_backend.models.read_ahead import read_ahead
from minisgl_backend.worker.runner import StepRunner

Progress = Callable[[str], None]
TokenBytes = Callable[[], Sequence[bytes]]

_PACKED_DTYPES = {"auto": "*", "bf16": "bfloat16", "fp32": "float32"}  # the setting → torch's name


def build_runner(
    config: EngineConfig,
    folder: Path,
    seat: Seat = ALONE,
    progress: Progress = lambda line: None,
    token_bytes: TokenBytes = tuple,
) -> StepRunner:
    """Opens the device, loads the weights (of one of several ranks, its part) and sizes the KV pool.

    seat: which rank this is. All ranks build at the same time: they wait for one another.
    progress: gets one line per stage, for the operator. Also sets the threads of torch's CPU kernels in this process.
    token_bytes: gives of each id what it adds to the text; without it no sequence can have a grammar.
    Raises StartError: a wrong setting, a model that can not run, no room for one page.
    """
    spec, context_tokens = read_model_spec(folder), context_limit(config, folder)
    if config.device == "fake":
        from minisgl_backend.worker.fake import build_fake_runner

        return build_fake_runner(config, spec)

    import_torch(config, folder, progress)
    from minisgl_backend.worker.torch_runner import build_torch_runner

    return build_torch_runner(config, spec, folder, context_tokens, progress, token_bytes, seat)


def import_torch(config: EngineConfig, folder: Path, progress: Progress) -> None:
    """Loads what a runner of this device is made of, unless it is there: seconds, in which the disk reads the weights.

    Part of build_runner; who must build in turn with others calls it before its turn.
    """
    if config.device == "fake" or "torch" in sys.modules:
        return
    progress("importing torch")
    read_ahead(folder, lambda: _packed(config, folder))
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of objects are made, none of which goes: walking them is a sixth of the time
    try:
        import minisgl_backend.worker.torch_runner  # noqa: F401
    finally:
        if collecting:
            gc.enable()


def _packed(config: EngineConfig, folder: Path) -> Path | None:
    """Where the weights of products probably come from, as far as can be told without torch; None: the checkpoint."""
    dtype = _PACKED_DTYPES.get(config.dtype)
    native = config.kernels in ("auto", "native") and config.device in ("auto", "cpu")
    if dtype is None or not native or config.quantization != "none":
        return None
    return last_packed(cache_folder(), folder, dtype)
