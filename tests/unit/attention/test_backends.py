"""Each backend against attention written out over whole sequences in fp64: any mixture of rows, pages, windows,
caps and sinks.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.attention_backends import BACKENDS, backend_of
from fakes.attention_case import AttentionCase
from minisgl_backend.attention.interface import AttentionVariant

# Decode rows far apart in length, fresh chunks, chunks with a prefix, a one-token prompt, a prefix that ends inside a
# page and one that ends at its border.
ROWS = [(0, 1), (7, 1), (300, 1), (5, 4), (0, 9), (16, 5), (31, 1), (48, 1), (0, 1), (33, 16)]

VARIANTS = {
    "plain": AttentionVariant(0.3),
    "window": AttentionVariant(0.3, window=10),
    "cap": AttentionVariant(0.3, softcap=1.5),
    "sinks": AttentionVariant(0.3, sinks=True),
    "window and cap": AttentionVariant(0.3, window=10, softcap=1.5),
    "all": AttentionVariant(0.3, window=10, softcap=1.5, sinks=True),
    "wide window": AttentionVariant(0.3, window=1000),
}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(case: AttentionCase, tolerance: float) -> None:
    for layer in range(len(case.variants)):
        torch.testing.assert_close(case.attend(layer).double(), case.expected(layer), atol=tolerance, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_mixed_rows_attend_to_their_own_positions_only(page_size: int, dtype: torch.dtype, backend: str) -> None:
    check(
        AttentionCase(ROWS, page_size, dtype, variants=list(VARIANTS.values()), backend=backend_of(backend)),
        TOLERANCES[dtype],
    )


rows = st.one_of(
    st.tuples(st.integers(0, 150), st.just(1)),
    st.tuples(st.just(0), st.integers(2, 90)),
    st.tuples(st.integers(1, 120), st.integers(2, 60)),
)
variants = st.builds(
    AttentionVariant,
    st.floats(0.05, 1.0),
    st.sampled_from([0, 1, 2, 7, 16, 31, 64, 500]),
    st.sampled_from([0.0, 0.5, 30.0]),
    st.booleans(),
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60)
@given(
    st.lists(rows, min_size=1, max_size=6),
    st.lists(variants, min_size=1, max_size=3),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([(4, 4), (4, 2), (6, 1), (5, 5)]),
    st.integers(0, 1000),
)
def test_any_rows_under_any_variants(
    backend: str,
    rows: list[tuple[int, int]],
    variants: list[AttentionVariant],
    page_size: int,
    heads: tuple[int, int],
    seed: int,
) -> None:
    case = AttentionCase(
        rows, page_size, heads=heads[0], kv_heads=heads[1], variants=variants, seed=seed, backend=backend_of(backend)
    )
    check(case, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_heads_of_any_size(dim: int, dtype: torch.dtype, backend: str) -> None:
    kinds = [
        AttentionVariant(dim**-0.5, w, cap, sinks)
        for w, cap, sinks in ((0, 0.0, False), (9, 0.0, False), (9, 20.0, True))
    ]
    case = AttentionCase(
        [(40, 1), (0, 12), (20, 7)],
        16,
        dtype,
        heads=4,
        kv_heads=2,
        dim=dim,
        variants=kinds,
        backend=backend_of(backend),
    )
    check(case, TOLERANCES[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (7, 1), (12, 4), (1, 1)])
def test_any_number_of_query_heads_shares_a_key(heads: int, kv_heads: int, backend: str) -> None:
    case = AttentionCase(
        ROWS, 16, heads=heads, kv_heads=kv_heads, variants=list(VARIANTS.values()), backend=backend_of(backend)
    )
    check(case, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str) -> None:
    """Scores of a few thousands, and sinks beside them."""
    kinds = [AttentionVariant(1000.0), AttentionVariant(1000.0, sinks=True), AttentionVariant(1000.0, softcap=500.0)]
    check(AttentionCase(ROWS, 16, variants=kinds, backend=backend_of(backend)), 2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_far_below_or_above_all_scores_is_none_or_takes_everything(backend: str) -> None:
    case = AttentionCase(ROWS, 16, variants=[VARIANTS["sinks"], VARIANTS["plain"]], backend=backend_of(backend))
    for whole in (case.keys, case.values):
        for row in whole:
            row[1] = row[0]
    case.fill()
    sinks = case.sinks[0]
    assert sinks is not None
    for none in (-1e4, -torch.inf):
        torch.testing.assert_close(case_with(case, none).attend(0), case.attend(1), atol=1e-5, rtol=0)
    assert case_with(case, 1e4).attend(0).abs().max() == 0.0


def case_with(case: AttentionCase, sink: float) -> AttentionCase:
    case.sinks[0] = torch.full((6,), sink)
    return case


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_that_are_not_declared_or_not_given_are_our_fault(backend: str) -> None:
    case = AttentionCase([(0, 4)], 16, variants=[VARIANTS["plain"], VARIANTS["sinks"]], backend=backend_of(backend))
    case.sinks.reverse()
    for layer in range(2):
        with pytest.raises(AssertionError, match=f"layer {layer}: sinks are given, or declared, but not both"):
            case.attend(layer)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_sees_what_another_row_of_the_same_step_writes_to_a_shared_page(variant: str, backend: str) -> None:
    """The rule on which the radix cache will stand: all rows write before any row attends."""
    case = AttentionCase([(0, 4), (4, 2)], 4, variants=[VARIANTS[variant]], backend=backend_of(backend))
    case.step.page_tables[1, 0] = case.step.page_tables[0, 0]  # row 1 takes its prefix from row 0's page
    case.keys[1][:, :4], case.values[1][:, :4] = case.keys[0], case.values[0]
    check(case, 1e-5)
