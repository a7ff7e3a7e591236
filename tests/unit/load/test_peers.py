"""The peer benchmark: its command line, its prompts, its numbers, and how it drives a process that is no peer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from load.bench.peer_cases import Case, make_prompts, parse_cases
from load.bench.peer_checks import Agreement, beginnings, check_all, common_prefix, next_tokens
from load.bench.peer_process import EngineBroke, Round, Runner, Usage, start
from load.bench.peer_report import ratios, row, sample, spread
from load.bench.peers import measure, parse_arguments, parse_engines, rows_of
from load.peers.environment import CanNotInstall, Environment
from load.peers.line import Stream

FAKE = Path(__file__).parents[2] / "fakes" / "fake_peer.py"
WORDS = range(100, 120)
PATIENCE_S = 60.0


def fake(mode: str, name: str = "fake:fp32") -> Runner:
    return Runner(name, (sys.executable, str(FAKE), mode))


def a_round(times_s: list[list[float]], cpu_s: float = 2.0, machine_s: float = 3.0) -> Round:
    streams = tuple(Stream(times, [1] * len(times), list(range(len(times)))) for times in times_s)
    return Round(streams, 2.0, Usage(cpu_s, 0.5, machine_s))


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_case_names_its_tokens_and_one_or_several_numbers_of_streams() -> None:
    assert parse_cases(["128/64@1,4", "512+32/16@32"]) == [
        Case(0, 128, 64, 1),
        Case(0, 128, 64, 4),
        Case(512, 32, 16, 32),
    ]
    assert [str(case) for case in parse_cases(["128/64@1", "512+32/16@32"])] == ["128/64@1", "512+32/16@32"]


@pytest.mark.parametrize("text", ["", "128", "128/64", "128/64@", "128/0@1", "0/4@1", "128/64@0", "a/b@c", "512+/16@1"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="case"):
        parse_cases([text])


def test_ours_come_first_and_an_engine_without_a_dtype_gets_the_common_one() -> None:
    assert parse_engines("openvino,llm:bf16,triton", "fp32") == ["llm:bf16", "triton:fp32", "openvino:fp32"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("llm,sglang", "none of"),
        ("llm,openvino:int3", "no dtype"),
        ("openvino", "at least one"),
        ("llm,llm:fp32", "twice"),
    ],
)
def test_engines_that_can_not_be_compared_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_engines(text, "fp32")


def test_a_bad_command_line_ends_with_a_usage_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--cases", "x"], ["--engines", "x"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            parse_arguments(arguments)
        assert "usage:" in capsys.readouterr().err


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompts_have_their_exact_length_and_share_what_they_are_to_share() -> None:
    case = Case(12, 20, 8, 5)
    prompts = make_prompts(WORDS, case, "round 0")
    assert [len(prompt) for prompt in prompts] == [32] * 5
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 1
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 5


def test_each_round_has_prompts_of_its_own_and_every_run_the_same_ones() -> None:
    case = Case(12, 20, 8, 5)
    assert make_prompts(WORDS, case, "round 0") == make_prompts(WORDS, case, "round 0")
    first, second = make_prompts(WORDS, case, "round 0"), make_prompts(WORDS, case, "round 1")
    assert first[0][:12] != second[0][:12], "an old prefix would be found in a cache"


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_round_is_as_long_as_its_slowest_stream() -> None:
    found = sample(a_round([[0.1, 0.2, 0.3], [0.5, 1.0, 2.0]]))
    assert found.tokens_per_s == pytest.approx(6 / 2.0)
    assert found.ttft_ms == pytest.approx(300)
    assert 900 < found.itl_p95_ms <= 1000
    assert found.tokens_per_piece == 1.0


def test_cores_that_others_kept_busy_are_told_and_never_negative() -> None:
    assert sample(a_round([[0.1, 0.2]], cpu_s=2.0, machine_s=3.0)).others_cores == pytest.approx(0.5)
    assert sample(a_round([[0.1, 0.2]], cpu_s=2.0, machine_s=1.9)).others_cores == 0.0


def test_an_answer_of_one_piece_has_no_gap() -> None:
    assert sample(a_round([[0.1]])).itl_p95_ms == 0.0


def test_ratios_pair_the_rounds_that_ran_side_by_side() -> None:
    base = sample(a_round([[0.1, 0.2]]))
    ours = [replace(base, tokens_per_s=rate) for rate in (10.0, 5.0)]  # the machine was slow in the second round
    theirs = [replace(base, tokens_per_s=rate) for rate in (20.0, 10.0)]
    assert ratios(ours, theirs) == spread([0.5, 0.5])
    found = row("b:fp32", "1/1@1", theirs, {"llm:fp32": ours})
    assert found["llm:fp32 over this"] == [0.5, 0.5, 0.5]
    assert found["tokens_per_s"] == [15.0, 10.0, 20.0]


def test_answers_agree_up_to_their_first_difference() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4], [9], [1, 2])] == [3, 2, 0, 2]


def test_beginnings_are_cut_along_our_answers() -> None:
    assert beginnings([[1], [2]], [[5, 6, 7, 8, 9], [3]]) == (
        [[1], [1, 5, 6, 7, 8], [2]],
        [[5, 6, 7, 8], [9], [3]],
    )


def test_what_follows_another_token_is_not_compared() -> None:
    assert next_tokens([[1, 2, 3, 4]], [[1, 2, 9, 9]]) == 2 / 3
    assert next_tokens([[1, 2, 3, 4], [5]], [[1, 2, 3, 4], [5]]) == 1.0
    assert next_tokens([[1, 2, 3, 4]], [[9, 2, 3, 4]]) == 0.0


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_answers_and_all_that_it_started_ends_with_the_block(tmp_path: Path) -> None:
    with start(fake("good"), tmp_path, PATIENCE_S) as engine:
        done = engine.generate([[5], [7]], 3)
        assert [stream.token_ids for stream in done.streams] == [[6, 7, 8], [8, 9, 10]]
        assert engine.ready.settings == {"mode": "good"}
        pids = [process.pid for process in engine.processes()]
        assert set(engine.ready.pids) < set(pids)
        assert engine.peak_bytes() > 1 << 20
        assert done.usage.cpu_s >= 0 and done.usage.machine_cpu_s >= 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_an_engine_prints_is_no_answer(tmp_path: Path) -> None:
    with start(fake("chatty"), tmp_path, PATIENCE_S) as engine:
        assert engine.generate([[5]], 2).streams[0].token_ids == [6, 7]
    assert "not an answer" in (tmp_path / "fake-fp32.log").read_text()


@pytest.mark.parametrize(
    ("mode", "why"), [("broken", "no such model"), ("illegal", "instruction that this processor does not have")]
)
def test_an_engine_that_does_not_start_is_told_with_its_reason(mode: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(EngineBroke, match=why), start(fake(mode), tmp_path, PATIENCE_S):
        pass


def test_an_engine_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(EngineBroke, match="said nothing"), start(fake("silent"), tmp_path, 0.2):
        pass


def test_an_answer_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    with start(fake("short"), tmp_path, PATIENCE_S) as engine, pytest.raises(EngineBroke, match=r"\[2\] tokens"):
        engine.generate([[5]], 3)


def test_engines_take_turns_and_the_one_that_disagrees_is_left_out(tmp_path: Path) -> None:
    case = Case(0, 4, 3, 2)
    with (
        start(fake("good", "llm:fp32"), tmp_path, PATIENCE_S) as ours,
        start(fake("good", "openvino:fp32"), tmp_path, PATIENCE_S) as peer,
        start(fake("short", "openvino:bf16"), tmp_path, PATIENCE_S) as short,
    ):
        engines, refused = {"llm:fp32": ours, "openvino:fp32": peer, "openvino:bf16": short}, {}
        agreed = check_all(engines, [[1], [2]], 0.75, refused)
        assert list(engines) == ["llm:fp32", "openvino:fp32"] and list(refused) == ["openvino:bf16"]
        assert agreed == dict.fromkeys(["llm:fp32", "openvino:fp32"], Agreement((32, 32), 1.0))
        samples = measure(engines, [case], WORDS, 2)
    assert [len(values) for values in samples.values()] == [2, 2]
    rows = list(rows_of(samples, [case]))
    assert [one["engine"] for one in rows] == ["llm:fp32", "openvino:fp32"]
    assert "llm:fp32 over this" in rows[1] and "llm:fp32 over this" not in rows[0]


@pytest.mark.parametrize(("mode", "share"), [("rounding", round(28 / 29, 3)), ("nonsense", 0.0)])
def test_rounding_is_told_from_nonsense(mode: str, share: float, tmp_path: Path) -> None:
    with (
        start(fake("good", "llm:fp32"), tmp_path, PATIENCE_S) as ours,
        start(fake(mode, "openvino:bf16"), tmp_path, PATIENCE_S) as peer,
    ):
        engines, refused = {"llm:fp32": ours, "openvino:bf16": peer}, {}
        agreed = check_all(engines, [[1]], 0.75, refused)["openvino:bf16"]
    assert agreed.next_tokens == share
    assert agreed.prefixes[0] < 32, "in both the answers part early"
    assert list(refused) == (["openvino:bf16"] if mode == "nonsense" else [])


def test_no_peer_takes_the_place_of_ours_when_ours_breaks(tmp_path: Path) -> None:
    with (
        start(fake("short", "llm:fp32"), tmp_path, PATIENCE_S) as ours,
        start(fake("good", "openvino:fp32"), tmp_path, PATIENCE_S) as peer,
        pytest.raises(EngineBroke, match="nothing to hold the others beside"),
    ):
        check_all({"llm:fp32": ours, "openvino:fp32": peer}, [[1]], 0.75, {})


# ── environments ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_is_done_once_until_something_else_is_wanted(tmp_path: Path) -> None:
    environment, done = Environment(tmp_path / "peer"), []
    for wanted in ("1", "1", "2"):
        environment.once("step", wanted, lambda wanted=wanted: done.append(wanted))
    assert done == ["1", "2"]


def test_a_step_that_broke_is_done_again(tmp_path: Path) -> None:
    environment, tries = Environment(tmp_path / "peer"), []

    def act() -> None:
        tries.append(1)
        environment.run(sys.executable, "-c", "raise SystemExit('no such package')" if len(tries) == 1 else "")

    with pytest.raises(CanNotInstall, match="no such package"):
        environment.once("step", "1", act)
    environment.once("step", "1", act)
    assert len(tries) == 2


def test_a_target_is_there_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "models" / "one"
    with pytest.raises(RuntimeError), Environment(tmp_path).fresh(target) as partial:
        partial.mkdir()
        raise RuntimeError
    assert not target.exists()
    with Environment(tmp_path).fresh(target) as partial:
        partial.mkdir()
    assert target.is_dir()


def test_an_environment_made_anew_is_rid_of_the_unwanted_packages_again(tmp_path: Path) -> None:
    ran: list[str] = []

    class Recorded(Environment):
        def run(self, *command: str) -> None:
            ran.append(" ".join(command[3:]))

    environment = Recorded(tmp_path / "peer")
    for packages in (["a==1"], ["a==1"], ["a==2"]):
        environment.make(packages, ["b"])
    assert [line.partition(" ")[2] for line in ran if "install" in line] == [
        "install a==1",
        "uninstall --yes b",
        "install a==2",
        "uninstall --yes b",
    ]
