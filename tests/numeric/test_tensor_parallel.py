"""A model dealt out to several ranks against the same model on one: logits of every family, and what it costs.

The ranks are threads here, which exchange tensors themselves, but for the last test, which has real processes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fakes.family_cases import FAMILY_CASES
from fakes.forward import load, logits_of
from fakes.rank_threads import ThreadGroup, on_ranks
from fakes.tiny_model import make_tiny_llama
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.errors import ConfigError
from minisgl_backend.llm import LLM
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.ranks import check_ranks
from minisgl_backend.text.parameters import SamplingParams

TOLERANCE = 1e-4
TOKENS = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(3)).tolist()
CUT = [41, 1, 17, 1]


def logits_on(group: RankGroup | None, folder: Path) -> torch.Tensor:
    return logits_of(load(folder, group=group), TOKENS, CUT, page_size=5, dtype=torch.float32)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_every_rank_has_the_logits_of_the_whole_model(case: str, tmp_path: Path) -> None:
    """Of four ranks two have the same KV head; of a model that does not take four, the refusal names what it takes."""
    folder = FAMILY_CASES[case].write(tmp_path)
    spec, whole = read_model_spec(folder), logits_on(None, folder)
    for ranks in (2, 4):
        try:
            check_ranks(spec, ranks)
        except ConfigError as error:
            assert ranks == 4 and "this model takes 1, 2" in str(error)
            continue
        for logits in on_ranks(ranks, lambda group: logits_on(group, folder)):
            assert (logits - whole).abs().max() < TOLERANCE
            assert torch.equal(logits.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("vocab", [320, 321, 325])
def test_ids_of_nobody_are_in_no_row_of_logits(tmp_path: Path, vocab: int) -> None:
    """Padding rows of the head would give zeros, and win wherever all other logits are negative (case TP-06)."""
    folder = make_tiny_llama(tmp_path, vocab=vocab)
    whole = logits_on(None, folder)
    for ranks in (2, 4):
        for logits in on_ranks(ranks, lambda group: logits_on(group, folder)):
            assert logits.shape == (len(TOKENS), vocab) and logits.is_contiguous()
            assert (logits - whole).abs().max() < TOLERANCE


@pytest.mark.parametrize("layers", [2, 28])
def test_a_forward_adds_up_twice_a_layer_and_once_for_the_embedding(tmp_path: Path, layers: int) -> None:
    folder = make_tiny_llama(tmp_path, num_hidden_layers=layers)

    def calls(group: RankGroup) -> dict[str, int]:
        assert isinstance(group, ThreadGroup)
        model = load(folder, group=group)
        logits_of(model, TOKENS, [len(TOKENS)], page_size=16, dtype=torch.float32)
        return dict(group.calls)

    assert on_ranks(2, calls) == [{"add_up": 2 * layers + 1, "join_columns": 1}] * 2


def test_a_model_that_does_not_divide_is_refused_with_the_degrees_that_do(tmp_path: Path) -> None:
    """SmolLM2-135M's heads (case TP-05)."""
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 96}
    spec = read_model_spec(make_tiny_llama(tmp_path, **shape))
    for ranks in (2, 4, 6):
        with pytest.raises(ConfigError, match=rf"'tensor_parallel' is {ranks}, but 9 query heads .* takes 1, 3$"):
            check_ranks(spec, ranks)
    check_ranks(spec, 3)
    with pytest.raises(
        ConfigError, match=r"the intermediate_size of 97 can not be dealt out evenly; this model takes 1$"
    ):
        check_ranks(replace(spec, intermediate_size=97), 3)
    with pytest.raises(ConfigError, match="6 KV heads can not be dealt out evenly; this model takes 1, 2, 3"):
        check_ranks(replace(spec, num_heads=12, num_kv_heads=6), 4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_not_dealt_out_and_the_refusal_says_so(tmp_path: Path, quantization: str) -> None:
    spec = read_model_spec(make_tiny_llama(tmp_path))
    with pytest.raises(ConfigError, match="'tensor_parallel' is 2, but 'quantization' is"):
        check_ranks(spec, 2, quantization)  # type: ignore[arg-type]


ASKED = (
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.7, seed=9, top_k=20, n=3, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=3, structured_outputs={"regex": "[ab ]{20,25}"}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kernels"), [(2, "auto"), (4, "torch")], ids=["shared memory", "gloo"])
def test_an_engine_of_several_processes_gives_the_answers_of_one(tmp_path: Path, ranks: int, kernels: str) -> None:
    """Greedy, seeded, several answers, logprobs, a form; twice, so that the second time prompts are in the cache."""
    folder = make_tiny_llama(tmp_path)
    settings = {"model": folder, "device": "cpu", "dtype": "fp32", "context_tokens": 256, "kernels": kernels}
    answers = []
    for tensor_parallel in (1, ranks):
        with LLM(**settings, executor="process", tensor_parallel=tensor_parallel) as llm:
            for _ in range(2):
                answers.append([answer.samples for answer in llm.generate(["the cat and the hat"] * 5, list(ASKED))])
    alone = [[(sample.text, sample.token_ids) for sample in samples] for samples in answers[0]]
    for other in answers[1:]:
        assert [[(sample.text, sample.token_ids) for sample in samples] for samples in other] == alone
