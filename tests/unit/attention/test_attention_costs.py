"""What attention costs, counted and not timed: plain layers run what they ran before there were variants, a window
costs what it holds, masks are made once a step, and long contexts take no more memory than short ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fakes.attention_case import AttentionCase
from fakes.attention_ops import ops_of_attend, ops_of_begin
from minisgl_backend.attention import torch_backend
from minisgl_backend.attention.interface import AttentionVariant
from minisgl_backend.kernels import blocked_attention

WRITE = ["index_copy_", "index_copy_", "empty_like"]
GATHER = ["index_select", "index_select"]
PRODUCT = "scaled_dot_product_attention"
DECODE = ["index", *GATHER, PRODUCT, "index_copy_"]
FRESH = [PRODUCT, "copy_"]
PREFIXED = [*GATHER, PRODUCT, "copy_"]
"""Of a group of decode rows, and of each chunk: the first version of the engine ran these and no others."""

HEADS, PLACE_BYTES = 6, 2 * 2 * 16 * 4  # of an AttentionCase: k and v, kv heads, dim, fp32
MASKS = {"full", "ones", "zeros", "arange", "triu", "triu_", "tril", "tril_"}
"""What masks are made of."""

PLAIN = AttentionVariant(0.3)
CAPPED = AttentionVariant(0.3, softcap=20.0, sinks=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(40, 1), (20, 1)], DECODE),
        ([(0, 9)], FRESH),
        ([(20, 5)], PREFIXED),
        ([(40, 1), (0, 9), (20, 5), (900, 1)], [*DECODE, *DECODE, *FRESH, *PREFIXED]),
    ],
)
def test_plain_layers_run_what_they_ran_before_there_were_variants(
    rows: list[tuple[int, int]], expected: list[str]
) -> None:
    """Whatever the layers beside them are."""
    for others in ([], [replace(PLAIN, window=8), CAPPED]):
        case = AttentionCase(rows, 16, variants=[PLAIN, *others])
        assert ops_of_attend(case, 0).names == [*WRITE, *expected]


def test_plain_decode_rows_beside_a_window_that_holds_all_of_them_run_the_same() -> None:
    case = AttentionCase([(40, 1), (20, 1)], 16, variants=[replace(PLAIN, window=64)])
    assert ops_of_attend(case, 0).names == [*WRITE, *DECODE]


@pytest.mark.parametrize("variant", [PLAIN, CAPPED], ids=["products", "blocks"])
def test_a_window_of_4096_costs_at_100_000_tokens_what_it_costs_at_4096(variant: AttentionVariant) -> None:
    windowed = [replace(variant, window=4096)]
    ends = 4096, 4113, 100_001  # the last two windows begin at the second place of a page
    least, short, long = (ops_of_attend(AttentionCase([(end - 1, 1)], 16, variants=windowed), 0) for end in ends)
    assert least.gathered_bytes == 4096 * PLACE_BYTES
    assert long.gathered_bytes == short.gathered_bytes == (4096 + 16) * PLACE_BYTES
    assert (long.names, long.made_bytes, long.pairs) == (short.names, short.made_bytes, short.pairs)
    assert long.pairs <= HEADS * (4096 + 16)
    everything = ops_of_attend(AttentionCase([(100_000, 1)], 16, variants=[variant]), 0)
    assert everything.gathered_bytes >= 100_001 * PLACE_BYTES, "the count sees what is gathered"


def test_rows_far_apart_in_length_are_one_group_under_a_window() -> None:
    case = AttentionCase([(100, 1), (3000, 1), (700, 1)], 16, variants=[replace(PLAIN, window=64)])
    ops = ops_of_attend(case, 0)
    assert ops.names.count(PRODUCT) == 1
    assert ops.gathered_bytes <= 3 * (64 + 16) * PLACE_BYTES


@pytest.mark.parametrize("variant", [PLAIN, CAPPED], ids=["products", "blocks"])
@pytest.mark.parametrize("start", [0, 30_000])
def test_a_chunk_gathers_what_its_window_holds(variant: AttentionVariant, start: int) -> None:
    ops = ops_of_attend(AttentionCase([(start, 500)], 16, variants=[replace(variant, window=128)]), 0)
    assert ops.gathered_bytes <= (500 + 128 + 2 * 16) * PLACE_BYTES


@pytest.mark.parametrize("start", [0, 30_000])
def test_a_chunk_multiplies_little_more_than_its_window_holds(start: int) -> None:
    ops = ops_of_attend(AttentionCase([(start, 1024)], 16, variants=[replace(PLAIN, window=128)]), 0)
    assert ops.pairs <= HEADS * 1024 * (128 + 64)


def test_a_step_makes_its_masks_once_for_each_distinct_window_however_many_layers_there_are() -> None:
    kinds = [PLAIN, replace(PLAIN, window=8), replace(CAPPED, window=8), replace(PLAIN, window=24)]
    rows = [(40, 1), (20, 1), (0, 90), (50, 90)]
    few, many = (AttentionCase(rows, 16, variants=kinds * times) for times in (1, 6))
    assert ops_of_begin(few).names == ops_of_begin(many).names
    for layer in range(len(kinds)):
        assert not MASKS & {*ops_of_attend(many, layer).names}


def peak_bytes(case: AttentionCase) -> int:
    """Most that one layer's attention holds at once beyond what is there before, products included."""
    with torch.inference_mode():
        attention = torch_backend.TorchAttention(case.pool, case.variants).begin(case.step)
        inputs = case.queries, case.new(case.keys, 0), case.new(case.values, 0), case.sinks[0]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            attention.attend(0, *inputs)
    held = most = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 3000])
def test_what_blocks_take_is_bounded_and_does_not_grow_with_the_context(
    dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 1 << 20
    monkeypatch.setitem(torch_backend._GATHER_BYTES, "cpu", bound)
    monkeypatch.setitem(blocked_attention._SCORE_BYTES, "cpu", bound // 8)
    variants = [replace(CAPPED, window=window)]
    peaks = {
        name: peak_bytes(AttentionCase(rows, 16, dtype, variants=variants))
        for name, rows in {"chunk": [(2000, 200)], "far chunk": [(8000, 200)], "decode": [(9000, 1)] * 4}.items()
    }
    state = 200 * 6 * 16 * 4  # of the chunk's queries, in fp32
    assert peaks["far chunk"] <= bound + 6 * state
    assert abs(peaks["far chunk"] - peaks["chunk"]) <= bound // 16
    assert peaks["decode"] <= bound


def test_a_plain_chunk_without_a_prefix_and_decode_rows_that_fill_their_pages_have_no_mask() -> None:
    """The fused product is told that it is causal, and skips half of it."""
    case = AttentionCase([(0, 40), (31, 1), (31, 1)], 16, variants=[PLAIN])
    (view,) = torch_backend.TorchAttention(case.pool, case.variants).begin(case.step).views.values()
    assert [part.mask for chunk in view.chunks for part in chunk.parts] == [None]
    assert [group.mask for group in view.groups] == [None]
