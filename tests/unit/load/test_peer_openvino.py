"""What OpenVINO is asked to compute in; against modules that stand where its own do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from load.bench.peer_process import EngineBroke, Runner, start

PATIENCE_S = 60.0
OPENVINO = """
class Core:
    def get_property(self, device, name):
        return {("CPU", "OPTIMIZATION_CAPABILITIES"): FOUND}[device, name]
"""
GENAI = """
__version__ = "1"

class SchedulerConfig:
    max_num_batched_tokens = 256

class ContinuousBatchingPipeline:
    def __init__(self, *_): ...
"""
DRIVER = """
import runpy, sys
sys.path.insert(0, FOLDER)
runpy.run_module("load.peers.run_openvino", run_name="__main__", alter_sys=True)
"""


def openvino(folder: Path, capabilities: list[str], dtype: str) -> Runner:
    (folder / "openvino.py").write_text(OPENVINO.replace("FOUND", repr(capabilities)))
    (folder / "openvino_genai.py").write_text(GENAI)
    driver = DRIVER.replace("FOLDER", repr(str(folder)))
    return Runner(f"openvino:{dtype}", (sys.executable, "-c", driver, str(folder), dtype, "2", str(1 << 30)))


def test_a_dtype_that_openvino_would_silently_replace_is_refused(tmp_path: Path) -> None:
    broken = openvino(tmp_path, ["FP32", "INT8"], "bf16")
    with pytest.raises(EngineBroke, match="no bf16 on this processor"), start(broken, tmp_path, PATIENCE_S):
        pass


@pytest.mark.parametrize(("capabilities", "dtype"), [(["FP32", "INT8"], "fp32"), (["FP32", "BF16"], "bf16")])
def test_a_dtype_of_the_processor_is_taken(capabilities: list[str], dtype: str, tmp_path: Path) -> None:
    with start(openvino(tmp_path, capabilities, dtype), tmp_path, PATIENCE_S) as engine:
        assert engine.ready.settings["INFERENCE_PRECISION_HINT"] == {"fp32": "f32", "bf16": "bf16"}[dtype]
