"""tritonserver's log: what is shown of it, and why a model failed."""

from __future__ import annotations

from minisgl_client.server.log import ServerLog

INFO = 'I1129 18:18:04.536266 8044 model_lifecycle.cc:472] "loading: minisgl:1"'
ENGINE = 'I1129 18:18:06.070984 8044 model.py:5] "minisgl: loading weights"'
PINNED = 'W1129 18:18:04.534392 8044 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned m"'
FAILED = (
    "E1129 18:18:06.173441 8044 model_lifecycle.cc:642] \"failed to load 'minisgl' version 1: Internal: "
    'TritonModelException: the model folder x holds no tokenizer.json\\n\\nAt:\\n  /a/model.py(6): initialize\\n"'
)
INSTANCE = (
    'E1129 18:18:06.173323 8044 backend_model.cc:692] "ERROR: Failed to create instance: TritonModelException: x"'
)
ERROR = 'E1129 18:18:06.173323 8044 http_server.cc:12] "something odd"'


def read(*lines: str, verbose: bool = False) -> tuple[ServerLog, list[str], list[str]]:
    shown: list[str] = []
    engine: list[str] = []
    log = ServerLog(shown.append, engine.append, verbose=verbose)
    for line in lines:
        log.take(line)
    return log, shown, engine


def test_only_warnings_and_errors_are_shown_with_the_lines_that_belong_to_them() -> None:
    _, shown, _ = read(INFO, "+---+", ERROR, "  its second line", INFO, "+---+")
    assert shown == [ERROR, "  its second line"]


def test_what_the_engine_tells_goes_to_the_progress() -> None:
    _, shown, engine = read(ENGINE)
    assert (shown, engine) == ([], ["loading weights"])


def test_warnings_that_every_machine_without_a_gpu_gives_are_not_shown() -> None:
    _, shown, _ = read(
        PINNED,
        'E1129 18:18:04.534602 8044 server.cc:241] "CudaDriverHelper has not been initialized."',
        "Error: Failed to initialize NVML",
        'W1129 18:18:06.174995 8044 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
    )
    assert shown == []


def test_a_verbose_log_is_shown_whole() -> None:
    lines = [INFO, ENGINE, PINNED, "Error: Failed to initialize NVML", FAILED]
    _, shown, engine = read(*lines, verbose=True)
    assert (shown, engine) == (lines, [])


def test_the_reason_of_a_failed_model_is_one_sentence_and_is_not_shown_twice() -> None:
    log, shown, _ = read(INSTANCE, FAILED)
    assert log.failure() == "the model folder x holds no tokenizer.json"
    assert shown == []


def test_another_model_that_fails_is_named() -> None:
    log, _, _ = read(FAILED.replace("'minisgl'", "'other'"))
    assert log.failure() == "model 'other': the model folder x holds no tokenizer.json"


def test_an_exception_that_is_not_ours_keeps_its_name() -> None:
    log, _, _ = read(FAILED.replace("TritonModelException: the model", "ModuleNotFoundError: No module named 'x'"))
    assert log.failure() == "ModuleNotFoundError: No module named 'x' folder x holds no tokenizer.json"


def test_a_log_without_a_failure_gives_no_reason_but_its_last_lines() -> None:
    log, _, _ = read(*[f"line {n}" for n in range(100)])
    assert log.failure() is None
    assert log.tail()[-1] == "line 99"
    assert len(log.tail()) == 60


def test_a_server_that_can_not_end_in_time_is_seen_to_give_up() -> None:
    late = 'E1129 18:18:36.173323 8044 main.cc:535] "failed to stop server: Internal - Exit timeout expired. Exiting."'
    assert not read(INFO, FAILED)[0].gave_up()
    assert read(INFO, late, INFO)[0].gave_up()
