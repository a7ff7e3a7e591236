"""The timeline of the steps: what it shows of depth 0 and of overlap, inline and in processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from load.step_trace import Event, end_of, named, read_trace, summarise
from minisgl_backend.actors.step_trace import StepTrace
from minisgl_backend.config import resolve_config
from minisgl_backend.errors import ConfigError, StartError
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

STEPS = 50


def trace_of(tiny_llama: Path, file: Path, *, overlap: bool, executor: Literal["inline", "process"]) -> list[Event]:
    settings = {"device": "fake", "executor": executor, "overlap": overlap, "fake_step_ms": 20.0}
    with LLM(tiny_llama, step_trace=str(file), **settings) as llm:
        (answer,) = llm.generate("the cat", SamplingParams(max_tokens=STEPS, ignore_eos=True))
        assert answer.num_output_tokens == STEPS
    return read_trace(file)


EXECUTORS = pytest.mark.parametrize("executor", ["inline", pytest.param("process", marks=pytest.mark.slow)])


@EXECUTORS
def test_with_overlap_the_next_plan_is_received_before_the_present_step_ends(
    tiny_llama: Path, tmp_path: Path, executor: Literal["inline", "process"]
) -> None:
    spans = trace_of(tiny_llama, tmp_path / "trace.json", overlap=True, executor=executor)
    steps, plans = named(spans, "step"), named(spans, "plan")
    assert list(steps) == list(plans) == list(range(1, STEPS + 1))
    handed_over = [end_of(plans[number + 1]) < end_of(steps[number]) for number in range(1, STEPS)]
    received = [steps[number]["args"]["next_plan_here"] == 1 for number in range(1, STEPS)]
    # All of them, but where everything else runs too a step may find its scheduler asleep. At depth 0 it is none.
    assert sum(handed_over) >= STEPS * 0.5
    assert sum(received) >= STEPS * 0.5
    assert summarise(spans).early_share == pytest.approx(sum(received) / (STEPS - 1))


@EXECUTORS
def test_at_depth_0_no_plan_is_made_while_a_step_runs(
    tiny_llama: Path, tmp_path: Path, executor: Literal["inline", "process"]
) -> None:
    spans = trace_of(tiny_llama, tmp_path / "trace.json", overlap=False, executor=executor)
    steps, plans = named(spans, "step"), named(spans, "plan")
    assert all(plans[number + 1]["ts"] > end_of(steps[number]) for number in range(1, STEPS))
    assert summarise(spans).early_share == 0
    assert summarise(spans).idle_s > 0


def test_the_file_is_chromes_json_array_but_for_its_end_and_names_the_tracks(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("what an engine before has left")
    trace_of(tiny_llama, file, overlap=True, executor="inline")
    events = json.loads(file.read_text().rstrip().removesuffix(",") + "]")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == {0: "scheduler", 1: "worker-0"}
    assert {event["name"] for event in events if event["ph"] == "X"} == {"apply", "plan", "report", "step"}
    assert all(event["dur"] >= 0 and event["tid"] in tracks for event in events if event["ph"] == "X")


def test_a_file_that_can_not_be_written_is_refused_at_the_start_by_the_name_of_the_setting(
    tiny_llama: Path, tmp_path: Path
) -> None:
    for file in (tmp_path / "nowhere" / "trace.json", tmp_path):
        with pytest.raises(StartError, match=r"'step_trace'.*can not be written") as caught:
            LLM(tiny_llama, device="fake", executor="inline", step_trace=str(file))
        assert caught.value.exit_code == ConfigError.exit_code


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_trace"):
        resolve_config({"step_trace": 1})


def test_a_trace_that_has_grown_too_large_ends_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minisgl_backend.actors.step_trace._LARGEST_BYTES", 1000)
    file = tmp_path / "trace.json"
    file.write_text("[\n")
    trace = StepTrace(file, "scheduler", 0)
    for step in range(100):
        trace.span("plan", step, step + 0.5, step=step)
        trace.flush()
    trace.close()
    assert 500 < file.stat().st_size <= 1002
    assert caplog.text.count("the step trace ends") == 1


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(Path("/dev/full"), "worker-0", 1)
    trace.span("step", 1.0, 2.0, step=1)
    trace.flush()
    trace.span("step", 2.0, 3.0, step=2)
    trace.close()
    assert caplog.text.count("the step trace ends") == 1


def test_a_summary_is_printed_with_json_last_and_an_empty_trace_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    trace_of(tiny_llama, file, overlap=False, executor="inline")
    command = [sys.executable, "-m", "load.step_trace"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == STEPS
    file.write_text("[\n")
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "no step in this trace")
