"""Plans that no scheduler made: all their pages are the scratch page, their results mean nothing.

For the warm-up, and for measuring what the largest step takes. Pure.
"""

from __future__ import annotations

import msgspec

from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import Admission, BatchPlan, PageGrant
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens

_CHUNK_TOKENS = 16
_PREFIX_TOKENS = 2048  # behind so many, kernels of a GPU deal the keys of a chunk among programs
_ONE = pack_tokens([0])
_RULES = TokenRules(0.1, 0.1, 1.1, _ONE, (0.1,), _ONE, (_ONE, _ONE * 2), 1 << 30, _ONE)
_EVERYTHING = Sampling(
    temperature=1.0,
    top_k=40,
    top_p=0.9,
    seed=0,
    sample_index=0,
    min_p=0.01,
    logprobs=1,
    prompt_logprobs=1,
    rules=_RULES,
)


def _dearest(vocab: int) -> Sampling:
    """What takes most memory of all that sampling can be asked for: penalties over the whole context, a mask of its own
    for each slot, and a distribution so flat that top_p keeps more than the best few and all tokens are sorted.

    A grammar's masks take less than the sort.
    """
    rules = msgspec.structs.replace(_RULES, allowed_ids=pack_tokens(range(vocab)))
    return msgspec.structs.replace(_EVERYTHING, temperature=100.0, top_k=0, min_p=1e-9, logprobs=20, rules=rules)


_DRAWN = Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=0, sample_index=0)
"""Of its raw logits: beside rules a GPU draws with other kernels, of copies in fp32."""

_Row = tuple[int, int, int, int]  # slot, start, length, sample


def warm_up_plans(
    max_running: int, context_tokens: int, token_budget: int, page_size: int, scratch_page: int
) -> tuple[BatchPlan, ...]:
    """Two sequences, one a step behind the other: a fresh chunk, a chunk with a prefix, a decode row. Then a chunk
    behind a long prefix.

    So every kind of row, alone and mixed, greedy, drawn and with all that sampling can be asked for but a grammar, runs
    once; one sequence when there is one slot only.
    """
    chunk = min(_CHUNK_TOKENS, (context_tokens - 1) // 2, token_budget // 2)
    life = [(0, chunk, 0), (chunk, chunk, 1), (2 * chunk, 1, 1)] if chunk else [(0, 1, 1)]
    prompt = pack_tokens([0] * max(2 * chunk, 1))
    slots = range(min(max_running, 2))
    plans = []
    for step in range(len(life) + len(slots) - 1):
        rows = [(slot, *life[step - slot]) for slot in slots if 0 <= step - slot < len(life)]
        begins = [slot for slot, start, _, _ in rows if start == 0]
        admissions = tuple(Admission(SlotId(slot), prompt, (_EVERYTHING, GREEDY)[slot]) for slot in begins)
        plans.append(_plan(step + 1, admissions, rows, _pages(context_tokens, page_size, scratch_page)))
    if chunk:
        prefix = min(_PREFIX_TOKENS, context_tokens - 1 - chunk)
        late = (Admission(SlotId(0), pack_tokens([0] * (prefix + chunk)), _DRAWN),)
        pages = _pages(context_tokens, page_size, scratch_page)
        plans.append(_plan(len(plans) + 1, late, [(0, prefix, chunk, 1)], pages))
    return tuple(plans)


def prompt_plans(
    max_running: int, context_tokens: int, token_budget: int, page_size: int, scratch_page: int
) -> tuple[BatchPlan, ...]:
    """A prompt of one token, one of two, of four, and so on up to the most tokens that a step can have: where that is
    more than a context, of several prompts.

    On a GPU: kernels have tiles by the number of tokens, and each is compiled when it is first launched. Seconds each,
    which no request should wait for.
    """
    longest = context_tokens - 1
    most = min(token_budget, max_running * longest)
    pages = _pages(context_tokens, page_size, scratch_page)
    plans = []
    for step, tokens in enumerate(sorted({*(1 << power for power in range(most.bit_length())), most} - {0}), start=1):
        whole, rest = divmod(tokens, longest)
        lengths = [longest] * whole + [rest] * (rest > 0)
        admissions = tuple(
            Admission(SlotId(slot), pack_tokens([0] * length), GREEDY) for slot, length in enumerate(lengths)
        )
        plans.append(_plan(step, admissions, [(slot, 0, length, 1) for slot, length in enumerate(lengths)], pages))
    return tuple(plans)


def largest_plan(
    max_running: int, context_tokens: int, token_budget: int, page_size: int, scratch_page: int, vocab: int
) -> BatchPlan:
    """A step as large as a plan can be: every slot at the end of its context, all decoding but one, whose chunk takes
    what is left of the budget; each asks of sampling what takes most.
    """
    sampling = _dearest(vocab)
    known = context_tokens - 1
    prompt = pack_tokens([0] * known)
    admissions = tuple(Admission(SlotId(slot), prompt, sampling) for slot in range(max_running))
    rows: list[_Row] = [(slot, known - 1, 1, 1) for slot in range(max_running - 1)]
    chunk = min(token_budget - len(rows), known)
    rows.append((max_running - 1, known - chunk, chunk, 1))
    return _plan(1, admissions, rows, _pages(context_tokens, page_size, scratch_page))


def _pages(context_tokens: int, page_size: int, scratch_page: int) -> tuple[int, ...]:
    return (scratch_page,) * -(-context_tokens // page_size)


def _plan(step: int, admissions: tuple[Admission, ...], rows: list[_Row], pages: tuple[int, ...]) -> BatchPlan:
    return BatchPlan(
        step=StepId(step),
        admissions=admissions,
        grants=tuple(PageGrant(admission.slot, pages) for admission in admissions),
        row_slots=tuple(row[0] for row in rows),
        row_starts=tuple(row[1] for row in rows),
        row_lengths=tuple(row[2] for row in rows),
        row_samples=tuple(row[3] for row in rows),
    )
