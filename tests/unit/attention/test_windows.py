"""A token under a window of n sees itself and the n - 1 tokens before it, as in transformers, wherever chunks and pages
begin.
"""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig
from transformers.masking_utils import create_sliding_window_causal_mask

from fakes.attention_backends import BACKENDS, backend_of
from fakes.attention_case import AttentionCase
from minisgl_backend.attention.interface import AttentionVariant

WINDOW = 32
LAYERS = [
    AttentionVariant(0.3, window=WINDOW),
    AttentionVariant(0.3, window=WINDOW, softcap=3.0),
    AttentionVariant(0.3, window=WINDOW, sinks=True),
    AttentionVariant(0.3),
]


def check(case: AttentionCase) -> None:
    for layer in range(len(LAYERS)):
        torch.testing.assert_close(case.attend(layer).double(), case.expected(layer), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", [31, 32, 33, 100])
@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_a_chunk_may_begin_anywhere(prompt: int, page_size: int, backend: str) -> None:
    """All borders at once, a row for each: what is before it is in the pool. The last row is a decode row."""
    check(
        AttentionCase(
            [(border, prompt - border) for border in range(prompt)],
            page_size,
            variants=LAYERS,
            backend=backend_of(backend),
        )
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_decode_row_may_be_anywhere(page_size: int, backend: str) -> None:
    check(AttentionCase([(start, 1) for start in range(100)], page_size, variants=LAYERS, backend=backend_of(backend)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared_tokens", [16, 32, 48, 96])
def test_rows_that_find_their_prefix_in_the_cache_see_its_end_through_the_window(
    shared_tokens: int, backend: str
) -> None:
    """Decode rows and chunks, of which the window begins before, in and behind the shared pages."""
    rows = [(100, 1), *[(shared_tokens, length) for length in (1, 2, 15, 16, 17, 40, 90)]]
    case = AttentionCase(rows, 16, variants=LAYERS, backend=backend_of(backend))
    case.step.page_tables[1:, : shared_tokens // 16] = case.step.page_tables[0, : shared_tokens // 16]
    for whole in (case.keys, case.values):
        for row in whole[1:]:
            row[:, :shared_tokens] = whole[0][:, :shared_tokens]
    check(case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_the_window_has_left_are_not_read(backend: str) -> None:
    """They could be given to somebody else."""
    case = AttentionCase([(100, 1), (90, 7), (100, 40)], 16, variants=LAYERS[:-1], backend=backend_of(backend))
    expected = [case.attend(layer) for layer in range(len(LAYERS) - 1)]
    for layer in range(len(LAYERS) - 1):
        for store in case.pool.layer(layer):
            store[case.step.page_tables[:, :3].flatten()] = torch.nan  # positions 0 … 47; row 1 sees 59 and up
        assert torch.equal(case.attend(layer), expected[layer])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [31, 32, 33, 100])
def test_the_window_is_that_of_transformers(tokens: int, backend: str) -> None:
    """Values are unit vectors, so what comes out of equal scores says whom each token saw."""
    config = MistralConfig(sliding_window=WINDOW, attn_implementation="eager")
    given = create_sliding_window_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, tokens, 8),
        attention_mask=torch.ones(1, tokens, dtype=torch.long),
        cache=None,
        position_ids=torch.arange(tokens)[None],
    )
    dim = -(-tokens // 16) * 16
    case = AttentionCase(
        [(0, tokens)], 16, heads=1, kv_heads=1, dim=dim, variants=LAYERS[:2], backend=backend_of(backend)
    )
    case.queries.zero_()
    case.values[0][:] = torch.eye(tokens, dim)[None, :, None]
    for layer in range(2):
        assert torch.equal(case.attend(layer)[:, :tokens] > 0, given[0, 0] == 0)
