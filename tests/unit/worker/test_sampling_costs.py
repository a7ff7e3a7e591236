"""What a step costs in operations and bytes: plain rows run what they ran before rules and logprobs were built, and a
row that asks for something adds work for itself alone. Counted, not timed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.plans import Planner
from fakes.random_model import write_random_llama
from minisgl_backend.config import resolve_config
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.sampling import sampler
from minisgl_backend.sampling.draw import draw_tokens
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.rules import RuleBook
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.scratch_plans import largest_plan
from minisgl_backend.worker.torch_runner import TorchRunner

VOCAB = 320
VIEWS = ("lift_fresh", "to.dtype_layout", "select", "slice", "unsqueeze", "resolve_")  # move no bytes on a CPU

DRAW = ["max.dim", "isfinite.default", "where.ScalarOther"]
STORE = ["index.Tensor", "clamp.default", "to.dtype", "index_put_.default"]
PLAIN = DRAW + STORE
"""After the forward, for any number of greedy rows; the first version of the engine ran these and no others."""


class Ops(TorchDispatchMode):
    """Writes down every operation with the bytes of what it reads and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if not name.startswith(VIEWS):
            self.seen.append((name, _bytes(args) + _bytes(result)))
        return result


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


class Watched:
    """A model that says when there are logits."""

    def __init__(self, model: Any, then: Callable[[], None]) -> None:
        self._model = model
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *inputs: Any) -> Tensor:
        logits = self._model.forward(*inputs)
        self._then()
        return logits

    def head(self, hidden: Tensor) -> Tensor:
        logits = self._model.head(hidden)
        self._then()
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random"), vocab_size=VOCAB)


@pytest.fixture
def runner(folder: Path) -> Iterator[TorchRunner]:
    runner = build_runner(resolve_config({"device": "cpu", "max_running": 65, "threads": 1}), folder)
    assert isinstance(runner, TorchRunner)
    yield runner
    runner.close()


def decode(runner: TorchRunner, samplings: list[Sampling]) -> list[tuple[str, int]]:
    """The operations behind the forward of a step in which every sequence decodes."""
    planner = Planner(16, runner.num_pages)
    planner._step = runner._last_step
    for slot, sampling in enumerate(samplings):
        planner.admit(slot, [5, 6, 7], sampling)
    rows = [(slot, 99) for slot in range(len(samplings))]
    planner.apply(runner.run(planner.plan(rows)))
    model, ops = runner._model, Ops()
    runner._model = Watched(model, ops.seen.clear)  # type: ignore[assignment]
    with ops:
        planner.apply(runner.run(planner.plan(rows)))
    runner._model = model
    return ops.seen


RULES = TokenRules(
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    bias_ids=pack_tokens([3]),
    biases=(1.0,),
    allowed_ids=pack_tokens(range(100)),
    bad_words=(pack_tokens([5]), pack_tokens([6, 7])),
    min_tokens=9,
    held_ids=pack_tokens([2]),
)
FEATURES = {
    "rules": Sampling(0.0, 0, 1.0, 1, 0, rules=RULES),
    "penalties": Sampling(0.0, 0, 1.0, 1, 0, rules=TokenRules(presence_penalty=0.5)),
    "logprobs": Sampling(0.0, 0, 1.0, 1, 0, logprobs=5),
    "min_p": Sampling(1.0, 0, 1.0, 1, 0, min_p=0.1),
    "all": Sampling(1.0, 9, 0.9, 1, 0, 0.1, logprobs=5, rules=RULES),
}


def test_plain_greedy_rows_run_what_they_ran_before_there_were_features(runner: TorchRunner) -> None:
    seen = decode(runner, [GREEDY] * 64)
    names = [name for name, _ in seen]
    assert names[0].endswith("best_of_rows.default") or names[0] == PLAIN[0], (
        "one pass over the logits, ours or torch's"
    )
    assert names[1:] == PLAIN[1:]
    logits, best, tokens, table = 64 * VOCAB * 4, 64 * 4, 64 * 8, 65 * 128 * 4
    expected = [
        logits + best + tokens,
        best + 64,
        64 + 2 * tokens,
        3 * tokens,
        2 * tokens,
        tokens + 64 * 4,
        2 * table + 2 * tokens + 64 * 4,
    ]
    assert [size for _, size in seen] == expected


@pytest.mark.parametrize("feature", FEATURES)
def test_one_row_that_asks_adds_work_for_itself_alone(feature: str, runner: TorchRunner) -> None:
    """Beside 64 plain rows it adds what it adds beside 8: in operations, and in bytes to within a few per row, since
    what is drawn is put among the tokens of all.
    """
    added = {}
    for plain in (8, 64):
        with_it = decode(runner, [FEATURES[feature], *[GREEDY] * plain])
        without = decode(runner, [GREEDY, *[GREEDY] * plain])
        operations = Counter(name for name, _ in with_it)
        operations.subtract(name for name, _ in without)
        assert min(operations.values()) >= 0 < operations.total()
        added[plain] = operations, _work(with_it) - _work(without)
    assert added[8][0] == added[64][0]
    assert abs(added[64][1] - added[8][1]) <= 200 * 56, f"{added[8][1]} and {added[64][1]} bytes"


def _work(seen: list[tuple[str, int]]) -> int:
    """Bytes, but of an index only those that it gives: what it takes from is not walked."""
    return sum(size for name, size in seen if not name.startswith(("index.Tensor", "index_put_")))


def test_a_step_without_prompt_logprobs_has_logits_of_sampled_rows_alone_and_one_with_them_takes_blocks(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[int] = []
    model = runner._model
    original = type(model).head

    def watch(self: Any, hidden: Tensor) -> Tensor:
        heads.append(len(hidden))
        return original(self, hidden)

    monkeypatch.setattr(type(model), "head", watch)
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", 16 * VOCAB)
    planner = Planner(16, runner.num_pages)
    planner.admit(0, list(range(5, 45)))
    planner.admit(1, list(range(5, 45)), Sampling(0.0, 0, 1.0, 0, 0, prompt_logprobs=0))
    runner.run(planner.plan([(0, 99)]))
    assert heads == [1]
    heads.clear()
    runner.run(planner.plan([(1, 99)]))
    assert heads == [16, 16, 7, 1]


FULL = {
    "plain": GREEDY,
    "drawn": Sampling(100.0, 0, 1.0, 1, 0),
    "filtered": Sampling(1.0, 9, 0.9, 1, 0, 0.1),
    "flat": Sampling(100.0, 0, 0.99, 1, 0),
    "logprobs": Sampling(0.0, 0, 1.0, 1, 0, logprobs=20, prompt_logprobs=20),
    "penalties": Sampling(0.0, 0, 1.0, 1, 0, rules=TokenRules(0.5, 0.5, 1.2)),
    "allowed": Sampling(0.0, 0, 1.0, 1, 0, rules=TokenRules(allowed_ids=pack_tokens(range(1500)))),
    "all": Sampling(100.0, 0, 0.99, 1, 0, 0.0, logprobs=20, rules=TokenRules(0.5, 0.5, 1.2)),
}
"""Asked for by every slot at the end of its context."""


@pytest.fixture(scope="module", params=[100, 3000])
def wide(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """More tokens than the sampler looks at before it sorts them all; a context of fewer, and of more."""
    folder = tmp_path_factory.mktemp("wide")
    return write_random_llama(folder, vocab_size=1600, max_position_embeddings=request.param)


@pytest.mark.slow
@pytest.mark.parametrize("asked", FULL)
def test_whatever_all_slots_ask_for_takes_no_more_memory_than_the_step_by_which_the_pool_was_sized(
    asked: str, wide: Path
) -> None:
    settings = {"device": "cpu", "max_running": 6, "threads": 1, "token_budget": 64, "kv_bytes": 1 << 24}
    peaks = []
    for sampling in (None, FULL[asked]):
        runner = build_runner(resolve_config(settings), wide)
        assert isinstance(runner, TorchRunner)
        plan = largest_plan(*runner._scratch_shape(), vocab=1600)
        if sampling is not None:
            own = tuple(msgspec.structs.replace(one, sampling=sampling) for one in plan.admissions)
            plan = msgspec.structs.replace(plan, admissions=own)
        held = Held()
        runner._model = Watched(runner._model, held.begin)  # type: ignore[assignment]
        with held:
            runner.run(plan)
        peaks.append(held.peak_bytes)
        runner.close()
    assert peaks[1] <= peaks[0]


class Held(TorchDispatchMode):
    """The most bytes that results of operations held at a time, beyond what they held at the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._bytes = 0
        self._live: set[int] = set()

    def begin(self) -> None:
        self.peak_bytes = self._bytes = 0
        self._live.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._live.add(key)
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        if key in self._live:
            self._live.remove(key)
            self._bytes -= size


def test_what_penalties_work_on_is_cut_by_the_tokens_of_a_row_where_they_are_more_than_its_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, context, vocab, most = 12, 512, 12, 3 * 512
    chance = np.random.default_rng(4)
    tokens = torch.from_numpy(chance.integers(0, vocab, (slots, context), dtype=np.int32))
    starts, positions = np.full(slots, 5), np.arange(context - slots, context)
    book = RuleBook(tokens, starts, vocab)
    for slot in range(slots):
        book.put(slot, TokenRules(presence_penalty=0.5, frequency_penalty=0.01 * slot, repetition_penalty=1.2))
    logits = torch.from_numpy(chance.normal(size=(slots, vocab)).astype(np.float32))
    rules = book.of(np.arange(slots), positions)
    whole = draw_tokens(logits, SamplingColumns.greedy(slots), positions, rules)
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", most)
    with Largest() as seen:
        assert draw_tokens(logits, SamplingColumns.greedy(slots), positions, rules).equal(whole)
    assert 2 * (context - slots) < seen.elements <= most


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not str(func).startswith("aten.slice"):  # a view
            self.elements = max(self.elements, result.numel())
        return result
