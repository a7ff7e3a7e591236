"""Before the numeric tests: transformers is loaded (seconds, not to be counted on one test), and torch gets one thread:
more cost time on small products, above all beside other processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _reference_loaded_on_one_thread() -> Iterator[None]:
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
