"""OpenVINO GenAI's ContinuousBatchingPipeline, in this process. Runs in its own environment.

python -m load.peers.run_openvino EXPORTED_FOLDER DTYPE STREAMS KV_BYTES
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
import openvino
import openvino_genai as genai

from load.peers.line import Prompts, Ready, Stream, run, serve

_PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}


def main(answers: TextIO) -> None:
    """Starts the pipeline and answers."""
    folder, dtype, streams, kv_bytes = sys.argv[1:]
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = int(streams)
    scheduler.cache_size = max(1, int(kv_bytes) >> 30)
    scheduler.enable_prefix_caching = True
    precision = _PRECISIONS[dtype]
    check_computes(dtype, openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def generate(prompts: Prompts, tokens: int, start: float) -> Sequence[Stream]:
        return generate_all(pipeline, prompts, tokens, start)

    settings = {**properties, "max_num_batched_tokens": scheduler.max_num_batched_tokens, "prefix_caching": True}
    serve(answers, Ready(genai.__version__, "ids", "engine", settings), generate)


def check_computes(dtype: str, capabilities: Sequence[str]) -> None:
    """The hint is only a hint: where the processor lacks `dtype` all is done in fp32, which is no row of `dtype`."""
    if dtype.upper() not in ("FP32", *capabilities):
        raise RuntimeError(f"OpenVINO has no {dtype} on this processor ({', '.join(capabilities)}); take openvino:fp32")


def generate_all(pipeline: Any, prompts: Prompts, tokens: int, start: float) -> list[Stream]:
    """All prompts at once; tokens are read after each step."""
    config = genai.GenerationConfig(do_sample=False, ignore_eos=True, max_new_tokens=tokens)
    inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    handles = [pipeline.add_request(index, ids, config) for index, ids in enumerate(inputs)]
    streams = [Stream() for _ in prompts]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for handle, stream in zip(handles, streams, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    stream.take(start, output.generated_ids)
    return streams


if __name__ == "__main__":
    run(main)
