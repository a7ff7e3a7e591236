"""These run in Triton's interpreter, which must be chosen before anything imports Triton: in a process of their own.

tests/unit/kernels/test_triton_*.py start it. By hand: TRITON_INTERPRET=1 pytest tests/unit/kernels/interpreted
"""

from __future__ import annotations

import os

import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
torch.set_num_threads(1)
