"""What a step trace says in numbers: `python -m load.step_trace FILE`.

Reads what the setting `step_trace` wrote (minisgl_backend/actors/step_trace.py). The last line is JSON.

A worker is idle between two steps when the first has ended, the second has not begun, and the scheduler had still
something to do when it applied the first: the time the engine waits for itself.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Of all engine groups in the file."""

    steps: int
    busy_s: float  # in steps
    idle_s: float  # after steps that left something to do
    idle_share: float  # of the two together
    early_share: float  # of those steps: the next plan was with the worker before they ended
    gap_ms: float  # medians; this one: between the end of such a step and the begin of the next
    step_ms: float
    plan_ms: float
    apply_ms: float
    report_ms: float


def read_trace(file: Path) -> list[Event]:
    """The spans, in order of their begin. A last line that a kill has cut off is left out."""
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    events = [json.loads(line.removesuffix(",")) for line in lines if line.endswith("},")]
    return sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))


def groups_of(spans: list[Event]) -> list[list[Event]]:
    """The spans of each engine group: its steps count from 1, so a plan of step 1 begins a new one."""
    groups: list[list[Event]] = []
    for span in spans:
        if not groups or (span["name"] == "plan" and span["args"]["step"] == 1):
            groups.append([])
        groups[-1].append(span)
    return groups


def named(spans: list[Event], name: str) -> dict[int, Event]:
    """Spans of that name by their step."""
    return {span["args"]["step"]: span for span in spans if span["name"] == name}


def end_of(span: Event) -> float:
    """When it ended, in µs."""
    return float(span["ts"] + span["dur"])


def summarise(spans: list[Event]) -> Summary:
    """Raises ValueError when there is no step in it."""
    early, gaps_us = 0, []
    for group in groups_of(spans):
        steps, applied = named(group, "step"), named(group, "apply")
        for number, step in steps.items():
            if number + 1 in steps and number in applied and applied[number]["args"]["more_to_do"]:
                early += min(step["args"]["next_plan_here"], 1)
                gaps_us.append(max(0.0, steps[number + 1]["ts"] - end_of(step)))
    idle_us, gap_ms = sum(gaps_us), statistics.median(gaps_us) / 1e3 if gaps_us else 0.0
    busy_us = sum(span["dur"] for span in spans if span["name"] == "step")
    count = sum(span["name"] == "step" for span in spans)
    if not count:
        raise ValueError("no step in this trace")
    share = idle_us / (idle_us + busy_us)
    medians = (_median_ms(spans, name) for name in ("step", "plan", "apply", "report"))
    return Summary(count, busy_us / 1e6, idle_us / 1e6, share, early / max(len(gaps_us), 1), gap_ms, *medians)


def _median_ms(spans: list[Event], name: str) -> float:
    times = [span["dur"] / 1e3 for span in spans if span["name"] == name]
    return statistics.median(times) if times else 0.0


def main() -> None:
    """Prints a summary of the file named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m load.step_trace FILE")
    try:
        summary = summarise(read_trace(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"{summary.steps} steps, {summary.step_ms:.2f} ms each (median)")
    print(f"the worker was idle between steps {summary.idle_share:.1%} of the time, {summary.gap_ms:.2f} ms (median)")
    print(f"the next plan was there before a step ended: {summary.early_share:.1%}")
    print(f"scheduler: plan {summary.plan_ms:.3f} ms, apply {summary.apply_ms:.3f}, report {summary.report_ms:.3f}")
    print(json.dumps(asdict(summary)))


if __name__ == "__main__":
    main()
