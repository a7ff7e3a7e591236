"""What an order of admission saves, what retraction and mixed batches are worth: whole workloads, a simulated device.

Where it stands in the flow: one part of `load/bench/scheduler.py`. Nothing here depends on the speed of this machine:
the clock is the device's (`simulated.Price`), and the counts are exact.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import quantiles
from typing import Literal, get_args

from load.bench.simulated import Device, Outcome, Price, simulate
from load.workloads import independent, tenants
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.order import Policy
from minisgl_backend.scheduler.scheduler import Scheduler

POLICIES: tuple[Policy, ...] = get_args(Policy)
Reserve = Literal["full", "learned"]

MIXES = ("mixed", "either-or", "target")

_PAGE = 16
_OLD_CPU = Price(step_s=0.06, row_s=0.015, token_s=0.0045, spread=0.05)  # like SmolLM2 on two old cores
_STREAMS = 8
TARGET_STEPS = 3.0  # the target of `target`, in decode steps
TENANTS_POOL_TOKENS = 16_384  # what the running need, and some of the tenants' prefixes: 45,000 tokens in all
RETRACTION_POOL_TOKENS = 4096


def run_policy(policy: Policy, requests: list[tenants.Request], pool_tokens: int = TENANTS_POOL_TOKENS) -> Outcome:
    """The multi-tenant workload under one order."""
    limits = Limits(
        max_running=32,
        token_budget=1024,
        page_size=_PAGE,
        num_pages=pool_tokens // _PAGE,
        context_tokens=4096,
        policy=policy,
    )
    return simulate(Scheduler(limits), Device(requests))


def policy_rows(workload: str, shape: tenants.Shape, seed: int) -> list[dict[str, float | str]]:
    """One row per policy, on the same workload. `least_tokens` is what a cache without bounds would compute."""
    requests = tenants.generate(shape, seed)
    least = tenants.distinct_tokens(requests)
    rows: list[dict[str, float | str]] = []
    for policy in POLICIES:
        outcome = run_policy(policy, requests)
        late = outcome.ttft_s()
        urgent = outcome.ttft_s(priority=0)
        rows.append(
            {
                "workload": workload,
                "policy": policy,
                "prefill_tokens": outcome.prompt_tokens,
                "least_tokens": least,
                "offered_tokens": outcome.offered_tokens,
                "saved": round(1.0 - outcome.prompt_tokens / outcome.offered_tokens, 3),
                "seconds": round(outcome.seconds, 2),
                "ttft_median_s": round(outcome.median_ttft_s, 3),
                "ttft_longest_s": round(late[-1], 3),
                "urgent_ttft_median_s": round(urgent[len(urgent) // 2], 3),
            }
        )
    return rows


def run_reserve(reserve: Reserve, requests: int, seed: int = 0) -> Outcome:
    """Prompts of 128, up to 512 new tokens of which 1 … 512 come, in 4,096 tokens of K/V, all there at once."""
    limits = Limits(
        max_running=32,
        token_budget=512,
        page_size=_PAGE,
        num_pages=RETRACTION_POOL_TOKENS // _PAGE,
        context_tokens=1024,
        reserve=reserve,
    )
    return simulate(Scheduler(limits), Device(independent.generate(requests, 128, 512, (1, 512), seed)))


def reserve_rows(requests: int) -> list[dict[str, float | str]]:
    """The worst case reserved, and room learned, on the same requests."""
    rows: list[dict[str, float | str]] = []
    for reserve in get_args(Reserve):
        outcome = run_reserve(reserve, requests)
        computed_again = outcome.prompt_tokens - outcome.offered_tokens
        rows.append(
            {
                "reserve": reserve,
                "mean_running": round(outcome.mean_running, 2),
                "output_tokens_per_s": round(outcome.output_tokens / outcome.seconds, 1),
                "steps": outcome.steps,
                "computed_again_tokens": computed_again,
                "ttft_median_s": round(outcome.median_ttft_s, 3),
            }
        )
    return rows


def run_mix(mix: str, prompts: int) -> tuple[Outcome, float]:
    """Eight streams run while prompts of 2,000 tokens arrive; the outcome, and the target in seconds."""
    target_s = TARGET_STEPS * (_OLD_CPU.step_s + _STREAMS * _OLD_CPU.row_s)
    limits = Limits(
        max_running=16,
        token_budget=256,
        page_size=_PAGE,
        num_pages=1024,
        context_tokens=4096,
        mixed=mix != "either-or",
        target_itl_ms=1000 * target_s if mix == "target" else 0.0,
    )
    every_s = 15.0
    requests = independent.streams_and_prompts(_STREAMS, 100 * prompts, prompts, 2000, every_s, seed=0)
    return simulate(Scheduler(limits), Device(requests, _OLD_CPU)), target_s


def waits_s(outcome: Outcome) -> list[float]:
    """Seconds between two tokens of a stream, from the first long prompt's arrival to the last one's token."""
    streams, arriving = outcome.lives[:_STREAMS], outcome.lives[_STREAMS:]
    begin, end = arriving[0].arrived_s, arriving[-1].first_s
    return [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.times_s)
        if later > begin and earlier < end
    ]


def mix_rows(prompts: int) -> list[dict[str, float | str]]:
    """The same streams and prompts with mixed batches, without, and with a target."""
    rows: list[dict[str, float | str]] = []
    for mix in MIXES:
        outcome, target_s = run_mix(mix, prompts)
        percentiles = quantiles(waits_s(outcome), n=100, method="inclusive")
        ttft_s = sorted(life.first_s - life.arrived_s for life in outcome.lives[_STREAMS:])
        rows.append(
            {
                "batches": mix,
                "target_ms": round(1000 * target_s) if mix == "target" else "none",
                "itl_p50_ms": round(1000 * percentiles[49]),
                "itl_p95_ms": round(1000 * percentiles[94]),
                "itl_p99_ms": round(1000 * percentiles[98]),
                "prompt_ttft_ms": round(1000 * ttft_s[len(ttft_s) // 2]),
            }
        )
    return rows
