"""Recorded decode steps against those that are not: token for token, through the runner, in fp32 and 16 bits."""

from __future__ import annotations

from functools import partial

import torch

from fakes.plans import Planner, generate
from load.bench.gpu_models import CONFIGS
from load.bench.gpu_stand import PAGE_TOKENS, Stand
from load.bench.step_gpu_runner import one_after_another, one_ahead
from minisgl_backend.device.device import open_device
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.worker.decode_graphs import graph_sizes
from minisgl_backend.worker.runner import StepRunner
from tests.gpu.checks import Failed, Found, Place, Report, equal

SAMPLED = Sampling(temperature=0.9, top_k=0, top_p=0.95, seed=7, sample_index=0, min_p=0.01)

AGREEMENT = 0.3
"""Least share of equal tokens in 16 bits: other numbers of rows may take another kernel of the library of products, a
rounding then turns one of random logits, and with it all after it. In fp32: all.
"""


def run(report: Report, place: Place) -> None:
    names = place.pick((("qwen3-0.6b", 6), ("tiny-moe", 2)), (("tiny", 1), ("tiny-moe", 1)))
    for name, layers in names:
        for dtype in place.two_dtypes:
            what = f"{name} {str(dtype).removeprefix('torch.')}"
            report.check(f"recorded = not recorded, {what}", partial(_check, place, name, layers, dtype), needs_s=5)
    if torch.float32 in place.two_dtypes:
        report.check("a context that grows to its end", partial(_check_to_the_end, place), needs_s=3)


def _check(place: Place, name: str, layers: int, dtype: torch.dtype) -> Found:
    """Rows of many lengths, greedy and sampled, more and fewer of them than any recording has."""
    lengths, new = place.pick(((1, 2, 17, 64, 150, 33, 5, 90, 16, 31, 7), 40), ((1, 6, 3), 3))
    stand = _stand(place, name, layers, dtype, rows=len(lengths), context=max(lengths) + new + PAGE_TOKENS)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, stand.spec.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    samplings = [SAMPLED if row % 3 == 2 else GREEDY for row in range(len(prompts))]

    def tokens(sizes: tuple[int, ...]) -> list[list[int]]:
        graphs = stand.graphs(sizes, tell=lambda line: None) if sizes else None
        runner = stand.runner(graphs, max_running=len(prompts), token_budget=64)
        planner = Planner(PAGE_TOKENS, stand.pool.num_pages)
        made = generate(runner.run, planner, prompts, new, chunk_tokens=16, samplings=samplings)
        if graphs is not None:
            equal(set(graphs.recorded), set(sizes), "sizes that were recorded")
            graphs.close()
        return made

    expected = tokens(())
    got = tokens(graph_sizes(len(prompts)))
    pairs = [pair for rows in zip(got, expected, strict=True) for pair in zip(*rows, strict=True)]
    share = sum(one == other for one, other in pairs) / len(pairs)
    if share < (1.0 if dtype == torch.float32 else AGREEMENT):
        raise Failed(f"{share:.3f} of the tokens are those of steps that are not recorded")
    return {"equal": round(share, 4), "tokens": len(pairs), "held_mb": round(stand.recorder.held_bytes / 1e6, 1)}


def _check_to_the_end(place: Place) -> Found:
    """Launched one ahead and one after another, to the last token that the recordings' page tables have room for."""
    prompt, new = place.pick((100, 60), (14, 4))
    results = []
    for way in (one_after_another, one_ahead):
        stand = _stand(place, "tiny", 1, torch.float32, rows=3, context=prompt + new)
        graphs = stand.graphs(graph_sizes(3), tell=lambda line: None)
        runner = stand.runner(graphs, max_running=3, token_budget=3 * prompt)
        results.append(_grow(runner, way, prompt, new, stand))
        graphs.close()
    equal(results[1], results[0], "tokens of steps launched ahead")
    return None


def _grow(runner: StepRunner, way: object, prompt: int, new: int, stand: Stand) -> list[tuple[int, ...]]:
    """Greedy tokens of three rows that start apart and end at the context's limit."""
    planner = Planner(PAGE_TOKENS, stand.pool.num_pages)
    vocab = stand.spec.vocab_size
    for slot in range(3):
        planner.admit(slot, [(slot * 31 + at * 17) % vocab for at in range(prompt)])
    plans: list[BatchPlan] = []
    for _ in range(new):
        plans.append(planner.plan([(slot, prompt) for slot in range(3)]))
        planner.apply(StepResult(plans[-1].step, (0,) * 3))  # the worker knows the tokens; a plan only counts them
    assert callable(way)
    return way(runner, plans)  # type: ignore[no-any-return]


def _stand(place: Place, name: str, layers: int, dtype: torch.dtype, *, rows: int, context: int) -> Stand:
    device = open_device("cuda" if not place.dry else "cpu", 1)
    pages = rows * -(-context // PAGE_TOKENS) + rows
    return Stand(CONFIGS[name], device, dtype, pages=pages, context_tokens=context, layers=layers)
