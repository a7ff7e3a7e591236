"""The pool's tensors and how many pages a budget gives."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.kvpool.sizing import pages_in, useful_pages


def test_bytes_per_page_are_what_the_tensors_take() -> None:
    shape = KvShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    pool = PagedKvPool(shape, num_pages=5, page_size=4, device=torch.device("cpu"))
    k, v = pool.layer(2)
    assert k.shape == v.shape == (6, 4, 2, 8), "one page more: the scratch page"
    assert pool.scratch_page == 5 == pool.num_pages
    assert shape.bytes_per_page(4) * 6 == 3 * (k.nbytes + v.nbytes)


def test_layers_do_not_share_memory() -> None:
    pool = PagedKvPool(KvShape(2, 1, 1, torch.float32), 1, 1, torch.device("cpu"))
    pool.layer(0)[0].fill_(1.0)
    assert not pool.layer(1)[0].any() and not pool.layer(0)[1].any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_on_the_cpu_takes_memory_only_where_it_is_written(dtype: torch.dtype) -> None:
    shape = KvShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype=dtype)
    before = resident_bytes()
    pool = PagedKvPool(
        shape, num_pages=(256 << 20) // shape.bytes_per_page(16), page_size=16, device=torch.device("cpu")
    )
    assert resident_bytes() - before < 32 << 20
    k, v = pool.layer(3)
    k[100].fill_(1.0)
    assert k[100].sum() == k[100].numel() and not k[99].any() and not v[100].any()
    assert resident_bytes() - before < 32 << 20


def test_a_budget_gives_whole_pages() -> None:
    assert pages_in(1000, 300, source="x") == 3


@pytest.mark.parametrize("budget", [299, 0, -5])
def test_a_budget_below_one_page_names_its_source(budget: int) -> None:
    with pytest.raises(ConfigError, match=r"at least one page of 300 bytes, but setting 'kv_bytes' leaves"):
        pages_in(budget, 300, source="setting 'kv_bytes'")


def test_useful_pages_round_each_slot_up() -> None:
    assert useful_pages(max_running=3, context_tokens=17, page_size=16) == 6
