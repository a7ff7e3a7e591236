"""The scheduler alone: what its decisions cost, and what they are worth. No model, no device.

    python -m load.bench.scheduler            (make bench-scheduler; under a minute)
    python -m load.bench.scheduler --quick    (the same in small: a smoke test, not a measurement)

Correctness first: a workload's tokens must come out the same under every policy. Then CPU time of `plan` + `apply` in
steady states, how it grows with rows and with the tree, the tree's work at no hits, the tokens that each order saves,
what retraction is worth at equal K/V, and what long prompts do to running streams. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tqdm import tqdm

from load.bench.regime import regime
from load.bench.scheduler_policies import POLICIES, mix_rows, policy_rows, reserve_rows, run_policy
from load.bench.scheduler_steps import Case, describe, measure
from load.bench.scheduler_tree import make_requests
from load.bench.scheduler_tree import measure as measure_tree
from load.workloads.tenants import Shape, generate

Row = Mapping[str, float | str]

_ROWS = (64, 128, 256, 512)
_CACHED = (10_000, 100_000, 1_000_000)
_QUICK = Case(rows=16, waiting=50, cached_tokens=20_000, steps=30)


def main() -> None:
    """Runs everything and prints it."""
    arguments = _parser().parse_args()
    base = _QUICK if arguments.quick else Case(steps=arguments.steps)
    shape = Shape(requests=100, arrivals_s=0.2) if arguments.quick else Shape()
    check_answers(Shape(requests=60, tenants=4))
    report: dict[str, object] = {}
    tables = (
        ("plan + apply, CPU ms a step", "steady", steady_rows(base)),
        ("growth with the rows", "by_rows", growth_rows(base, quick=arguments.quick)),
        ("growth with the tree", "by_tree", growth_tree(base, quick=arguments.quick)),
        ("the tree's work at no hits, CPU", "no_hits", no_hit_rows(quick=arguments.quick)),
        (
            "orders on the multi-tenant workload, simulated device: conversations, and single questions",
            "policies",
            [*policy_rows("chat", shape, 1), *policy_rows("questions", replace(shape, turns=(1, 1)), 1)],
        ),
        (
            "4,096 tokens of K/V, worst case reserved or learned, simulated device",
            "reserve",
            reserve_rows(60 if arguments.quick else 400),
        ),
        (
            "time between tokens of 8 streams while prompts of 2,000 arrive, simulated device",
            "mixed",
            mix_rows(2 if arguments.quick else 8),
        ),
    )
    for title, name, rows in tables:
        print(f"\n{title}\n{table(rows)}")
        report[name] = rows
    print()
    print(json.dumps({"bench": "scheduler", "quick": arguments.quick, **regime(), **report}))


def check_answers(shape: Shape) -> None:
    """`simulate` compares every token with the script; a pool a tenth of what is asked for forces every way out."""
    requests = generate(shape, seed=0)
    for policy in POLICIES:
        for pool_tokens in (65_536, 4_096):
            run_policy(policy, requests, pool_tokens)


def steady_rows(base: Case) -> list[Row]:
    """The steady state that is asked of it: 256 rows, 2,000 waiting, a million tokens cached."""
    cases = [replace(base, page_size=size) for size in (16, 1)]
    cases += [replace(base, policy=policy) for policy in POLICIES if policy != base.policy]
    return _measured(cases, "steady state")


def growth_rows(base: Case, *, quick: bool) -> list[Row]:
    """Sizes doubled: no faster than linear is expected."""
    return _measured([replace(base, rows=rows) for rows in ((8, 16) if quick else _ROWS)], "rows")


def growth_tree(base: Case, *, quick: bool) -> list[Row]:
    """The cached tokens tenfold: the same cost is expected."""
    sizes = (10_000, 20_000) if quick else _CACHED
    return _measured([replace(base, page_size=page, cached_tokens=size) for page in (16, 1) for size in sizes], "tree")


def no_hit_rows(*, quick: bool) -> list[Row]:
    """Short and long prompts, pages of 16 and 1."""
    rows: list[Row] = []
    for page_size in (16, 1):
        for prompt_pages, answer_pages in ((1, 1), (8, 8), (64, 8), (512, 64)):
            number = 40 if quick else 600 if prompt_pages > 100 else 4000
            requests = make_requests(number, page_size, prompt_pages, answer_pages)
            work = measure_tree(requests, page_size, cached_pages=20_000, running=64 if not quick else 8)
            rows.append(
                {
                    "page_size": page_size,
                    "pages": prompt_pages + answer_pages,
                    "us_per_request": round(work.us / work.requests, 1),
                    "us_per_page": round(work.us / work.pages, 2),
                    "allowed_us": prompt_pages + answer_pages + 10,
                    "share_of_allowance": round(work.share_of_allowance, 2),
                    "nodes_visited": work.counts.visited_nodes,
                }
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Columns under their names."""
    lines = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _measured(cases: Sequence[Case], title: str) -> list[Row]:
    return [describe(case, measure(case)) for case in tqdm(cases, desc=title, unit="case", leave=False)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--steps", type=int, default=600, help="measured in each steady state")
    return parser


if __name__ == "__main__":
    main()
