"""The benchmark of the path: whose CPU time is whose, what is compared with what, and that the answers are the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from load.bench.path import (
    Seen,
    check_same_answers,
    cpu_by_process,
    lines_of,
    measure,
    parse_arguments,
    process_name,
    row,
    settings,
)
from load.bench.peer_cases import Case
from load.bench.peer_process import Round, Runner, Usage, start
from load.bench.peer_report import sample
from load.peers.line import Stream

FAKE = Path(__file__).parents[2] / "fakes" / "fake_peer.py"
PATIENCE_S = 60.0


def fake(mode: str, name: str) -> Runner:
    return Runner(name, (sys.executable, str(FAKE), mode))


def seen(times_s: list[float], tokens: list[int], cpu_s: dict[str, float], answer: tuple[int, ...]) -> Seen:
    stream = Stream(times_s, tokens, [0] * sum(tokens))
    return Seen(sample(Round((stream,), 2.0, Usage(1.0, 0.5, 1.0))), cpu_s, (answer,))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/x/bin/tritonserver --model-repository /m", "tritonserver"),
        ("/b/triton_python_backend_stub /m/minisgl/1/model.py triton_shm 1 2", "stub"),
        ("/b/triton_python_backend_stub /m/summarise/1/model.py triton_shm 1 2", "rest"),
        ("python -P -m minisgl_backend.actors.host /run 7", "host"),
        ("python -P -m minisgl_backend.actors.child scheduler /run 8", "scheduler"),
        ("python -P -m minisgl_backend.actors.child worker-0 /run 8", "worker-0"),
        ("python /x/bin/minisgl serve", "rest"),
        ("", "rest"),
    ],
)
def test_each_process_is_told_by_its_command_line(command: str, name: str) -> None:
    assert process_name(command.split()) == name


def test_ratios_are_of_rounds_that_ran_side_by_side_and_answers_that_part_are_counted() -> None:
    alone = [seen([0.1, 0.2, 0.3], [1, 1, 1], {"client": 1.0}, (1, 2, 3)), seen([0.1, 0.4], [1, 1], {}, (1, 2))]
    through = [seen([0.2, 0.6], [2, 1], {"stub": 3.0}, (1, 2, 3)), seen([0.2, 0.8], [1, 1], {"stub": 1.0}, (1, 9))]
    found = row(1, {"llm": alone, "triton": through})
    assert found["tokens_per_s_ratio"] == [0.5, 0.5, 0.5]
    assert found["itl_p95_ratio"] == pytest.approx([3.0, 2.0, 4.0])
    assert found["triton"]["tokens_per_piece"] == [1.25, 1.0, 1.5]
    assert found["triton"]["cpu_s_per_1000_tokens"] == {"stub": [2.0, 1.0, 3.0]}
    assert found["llm"]["cpu_s_per_1000_tokens"] == {"client": [0.5, 0.0, 1.0]}
    assert found["same_answers"] == 0.5
    assert "stub 2.000" in lines_of(found) and json.dumps(found)


def test_paths_that_give_other_tokens_are_not_measured(tmp_path: Path) -> None:
    with (
        start(fake("good", "llm"), tmp_path, PATIENCE_S) as alone,
        start(fake("rounding", "triton"), tmp_path, PATIENCE_S) as through,
    ):
        check_same_answers({"llm": alone, "triton": through}, [[40]])
        with pytest.raises(AssertionError, match="disagree"):
            check_same_answers({"llm": alone, "triton": through}, [[1]])


def test_the_paths_take_turns_and_the_warm_up_is_not_counted(tmp_path: Path) -> None:
    with (
        start(fake("good", "llm"), tmp_path, PATIENCE_S) as alone,
        start(fake("good", "triton"), tmp_path, PATIENCE_S) as through,
    ):
        rounds = measure({"llm": alone, "triton": through}, range(100, 120), Case(0, 4, 3, 2), 2)
        assert set(cpu_by_process(alone)) == {"client", "rest"}
    assert [len(values) for values in rounds.values()] == [2, 2]
    assert row(2, rounds)["same_answers"] == 1.0


def test_settings_of_the_command_line_reach_both_engines() -> None:
    arguments = parse_arguments(
        ["--device", "fake", "--fake-step-ms", "2", "--streams", "1,8", "--set", "overlap=false"]
    )
    made = settings(arguments)
    assert made["fake_step_ms"] == 2.0 and made["max_running"] == 8 and made["overlap"] is False
    assert "fake_step_ms" not in settings(parse_arguments([])), "a real device takes no such setting"


@pytest.mark.parametrize("given", [["--repeats", "0"], ["--output", "1"], ["--streams", "0"]])
def test_a_command_line_that_can_not_be_measured_is_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(given)
