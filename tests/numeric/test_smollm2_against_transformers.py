"""The real small model: our greedy text is transformers' own, alone, sixteen at once, and with chunked prompts.

The reference is one forward pass of transformers over prompt + our answer: at each place its best token must be ours.
By induction that is what its greedy `generate` would have written. A place where its two best logits are closer than
1e-4 is left out: rounding decides there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minisgl_backend.llm import LLM
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.parameters import SamplingParams

pytestmark = pytest.mark.slow

NEW_TOKENS = int(os.environ.get("MINISGL_TEST_NEW_TOKENS", "20"))  # 64 takes three minutes on two old cores
NEAR_TIE = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (5, 12, 30, 64, 100, 150, 600)  # tokens of the prompts

_STORY = (
    "The old lighthouse stood at the edge of the bay. Every evening at 19:45 the keeper, whose name was Åsa, climbed "
    "its 217 steps and lit the lamp; the ships far out could then see the rocks. One night in 1893 a storm came up so "
    'quickly that nobody was prepared.\n\n\t"Hold the rope!" cried the captain — 但是没有人听见。 '
    "def f(x): return x**2\n"
)


@pytest.fixture(scope="module")
def reference() -> Iterator[tuple[Any, Any]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = locate_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield AutoTokenizer.from_pretrained(folder), model


@pytest.fixture(scope="module")
def prompts(reference: tuple[Any, Any]) -> list[str]:
    """Texts whose token counts are LENGTHS, give or take the joints of decoding."""
    tokenizer, _ = reference
    story = tokenizer(_STORY * 12)["input_ids"]
    return [tokenizer.decode(story[7 * start : 7 * start + length]) for start, length in enumerate(LENGTHS)]


def check(reference: tuple[Any, Any], prompt: str, answer: tuple[int, ...]) -> None:
    tokenizer, model = reference
    ids = tokenizer(prompt)["input_ids"]
    assert len(answer) == NEW_TOKENS
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *answer[:-1]]]), logits_to_keep=NEW_TOKENS).logits[0]
    best = torch.topk(logits, 2)
    for place, token in enumerate(answer):
        first, second = best.values[place].tolist()
        if first - second >= NEAR_TIE:
            assert best.indices[place, 0] == token, f"token {place} of the answer to a prompt of {len(ids)} tokens"


def test_greedy_text_is_that_of_transformers_alone_together_at_depth_0_and_chunked_with_overlap(
    reference: tuple[Any, Any], prompts: list[str]
) -> None:
    with LLM("smollm2", dtype="fp32", kv_bytes=512 << 20, max_running=16, token_budget=1024, overlap=False) as llm:
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        for prompt, completion in zip(prompts, alone, strict=True):
            check(reference, prompt, completion.token_ids)
        together = llm.generate([*prompts, *prompts[:6], *prompts[:3]], GREEDY, progress=False)
    with LLM("smollm2", dtype="fp32", kv_bytes=512 << 20, max_running=16, token_budget=80) as llm:
        chunked = llm.generate(prompts, GREEDY, progress=False)
    expected = {one.prompt: one.token_ids for one in alone}
    for one in (*together, *chunked):
        if one.token_ids != expected[one.prompt]:  # then a near tie went the other way: the reference decides
            check(reference, one.prompt, one.token_ids)
