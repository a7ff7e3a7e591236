"""Loads the sharded model of `test_peak_of_loading` in a process of its own and prints its peak of memory as JSON."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from pathlib import Path
from typing import cast

import torch

from minisgl_backend.config import Quantization
from minisgl_backend.device.host_peak import HostPeak
from minisgl_backend.models.checkpoint import Checkpoint
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.load import build_decoder
from minisgl_backend.models.size import weight_bytes

SPEC = parse_model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    {},
)
_M_MMAP_THRESHOLD = -3  # malloc.h: what is larger gets pages of its own, which go back when it is freed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("method")
    given = parser.parse_args()
    torch.set_num_threads(1)  # small pieces of work: beside other processes several threads wait for one another
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)

    def load() -> Decoder:
        dtype, method = getattr(torch, given.dtype), cast(Quantization, given.method)
        return build_decoder(SPEC, Checkpoint(given.folder), torch.device("cpu"), dtype, 32, method)

    load()  # brings in the code of the libraries, up to 14 MiB, which differs from processor to processor
    gc.collect()
    libc.malloc_trim(0)
    peak = HostPeak()
    model = load()
    print(json.dumps({"taken": peak.bytes(), "weights": weight_bytes(model)}))


if __name__ == "__main__":
    main()
