"""What `make bench-scheduler` counts, which does not depend on the machine; that it runs; that its checks bite."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from statistics import quantiles

import pytest

from load.bench.scheduler import check_answers
from load.bench.scheduler_policies import POLICIES, run_mix, run_policy, run_reserve, waits_s
from load.bench.scheduler_steps import Case, measure
from load.bench.scheduler_tree import make_requests
from load.bench.scheduler_tree import measure as measure_tree
from load.bench.simulated import Device, simulate
from load.workloads.tenants import STOP_TOKEN, Shape, distinct_tokens, generate
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("turns", [(1, 4), (1, 1)])
def test_lpm_and_dfs_weight_compute_fewer_prompt_tokens_than_fcfs(turns: tuple[int, int]) -> None:
    requests = generate(Shape(turns=turns), 1)
    computed = {policy: run_policy(policy, requests).prompt_tokens for policy in POLICIES}
    assert computed["lpm"] < 0.8 * computed["fcfs"]
    assert computed["dfs-weight"] < 0.9 * computed["fcfs"]
    assert all(tokens >= distinct_tokens(requests) for tokens in computed.values())


def test_urgent_requests_wait_less_under_priority() -> None:
    requests = generate(Shape(turns=(1, 1)), 1)
    waits = {policy: run_policy(policy, requests).ttft_s(priority=0) for policy in ("fcfs", "priority")}
    assert sum(waits["priority"]) < 0.8 * sum(waits["fcfs"])


def test_learned_room_runs_half_as_many_again_as_the_worst_case_at_equal_kv() -> None:
    full, learned = run_reserve("full", 120), run_reserve("learned", 120)
    assert learned.mean_running >= 1.5 * full.mean_running
    assert learned.output_tokens == full.output_tokens
    assert learned.output_tokens / learned.seconds >= 1.4 * full.output_tokens / full.seconds
    assert full.prompt_tokens == full.offered_tokens, "the worst case retracts nobody"


def test_mixed_batches_cut_the_longest_waits_of_streams_to_a_third() -> None:
    waits = {mix: waits_s(run_mix(mix, 6)[0]) for mix in ("mixed", "either-or")}
    p99 = {mix: quantiles(values, n=100)[-1] for mix, values in waits.items()}
    assert p99["either-or"] >= 3 * p99["mixed"]


def test_under_a_target_nineteen_of_twenty_waits_of_streams_are_within_it() -> None:
    outcome, target_s = run_mix("target", 6)
    assert quantiles(waits_s(outcome), n=20)[-1] <= target_s
    assert outcome.output_tokens == 8 * 600 + 6, "all streams and prompts came to their end"


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_tree_that_never_helps_visits_no_node_and_splits_none(page_size: int) -> None:
    """So its work is a fixed number of dict look-ups for a request, and a few array operations for a page."""
    work = measure_tree(make_requests(400, page_size, 6, 3), page_size, cached_pages=500, running=8)
    assert (work.counts.visited_nodes, work.counts.splits, work.counts.matched_pages) == (0, 0, 0)
    assert work.counts.matches == work.requests == 200
    assert work.counts.evicted_pages == pytest.approx(work.counts.inserted_pages, abs=8 * 9)


def test_a_steady_state_is_what_its_case_says() -> None:
    case = Case(rows=16, waiting=20, cached_tokens=20_000, steps=40)
    costs = measure(case)
    assert len(costs.both) == 40
    assert min(costs.rows) >= case.rows - 2, "slots stand empty while others wait"
    assert costs.cached_tokens >= case.cached_tokens


class FaultyDevice(Device):
    """In its ninth step the first row's token is another one than the script says."""

    another = STOP_TOKEN

    def run(self, plan: BatchPlan) -> tuple[StepResult, float]:
        result, seconds = super().run(plan)
        if self.steps == 9:
            result = StepResult(result.step, (self.another, *result.tokens[1:]))
        return result, seconds


@pytest.mark.parametrize("another", [STOP_TOKEN, 7])
def test_an_answer_that_ends_early_or_is_wrong_stops_the_benchmark(another: int) -> None:
    device = FaultyDevice(generate(Shape(requests=20, tenants=3), 0))
    device.another = another
    with pytest.raises(AssertionError, match="lost or repeated"):
        simulate(Scheduler(Limits(8, 512, 16, 1000, 4096)), device)


def test_answers_are_checked_under_every_policy_and_pressure() -> None:
    check_answers(replace(Shape(), requests=30, tenants=3))


@pytest.mark.slow
def test_the_whole_benchmark_runs_and_ends_with_a_line_of_json() -> None:
    command = [sys.executable, "-m", "load.bench.scheduler", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["bench"] == "scheduler" and last["commit"] is not None and last["machine"]
    assert {row["policy"] for row in last["policies"]} == set(POLICIES)
    assert all(last[name] for name in ("steady", "by_rows", "by_tree", "no_hits", "reserve", "mixed"))
