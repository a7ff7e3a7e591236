"""`locate_model`: names, folders, hub ids, and one clear sentence for everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from minisgl_backend.errors import ModelNotFound
from minisgl_backend.models.locate import cache_folder, fetched_folder, locate_model


def model_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", *files):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_fetched_name_is_its_folder_in_the_cache(cache: Path) -> None:
    folder = model_folder(fetched_folder("smollm2"))
    assert folder.parent == cache
    assert locate_model("smollm2") == folder


def test_a_name_never_fetched_is_answered_with_the_command_that_fetches_it(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="minisgl fetch smollm2"):
        locate_model("smollm2")


def test_the_cache_is_the_users_cache_folder_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "minisgl"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/minisgl")


def test_a_user_without_a_home_has_a_cache_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start on a CPU asks for it: the kernels lie there."""

    def unknown(user: int) -> object:
        raise KeyError(user)

    for name in ("MINISGL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cache_folder() == Path("/.cache/minisgl")


def test_a_local_folder_is_taken_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    assert locate_model("models/mine") == tmp_path / "models" / "mine"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/no/such/folder", "'/no/such/folder' does not exist"),
        ("./missing", "'./missing' does not exist"),
        ("a/b/c", "'a/b/c' does not exist"),
        ("smolm2", "did you mean 'smollm2'"),
        ("", "is no folder"),
        ("a/..", "is no folder"),
    ],
)
def test_what_is_nothing_at_all_is_answered_without_asking_the_hub(model: str, sentence: str) -> None:
    with pytest.raises(ModelNotFound, match=sentence):
        locate_model(model)


def test_a_file_is_no_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ModelNotFound, match=r"model\.onnx' is a file; a Hugging Face folder or a \.gguf file"):
        locate_model(str(tmp_path / "model.onnx"))


def test_a_folder_without_configuration_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        locate_model(str(tmp_path))


class Hub:
    """Stands in for the hub's client: what is in its local cache, and what the network gives (None: no network)."""

    def __init__(self, local: Path | None, online: Path | None) -> None:
        self.local, self.online = local, online
        self.calls: list[bool] = []

    def snapshot_download(self, hub_id: str, *, local_files_only: bool, allow_patterns: list[str], **_: Any) -> str:
        assert not any("bin" in pattern or pattern.endswith(".py") for pattern in allow_patterns)
        self.calls.append(local_files_only)
        if local_files_only:
            if self.local is None:
                raise LocalEntryNotFoundError(f"{hub_id} is not in the cache")
            return str(self.local)
        if self.online is None:
            raise ConnectionError("no route to the hub\nand more lines")
        return str(self.online)


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hub], Hub]:
    def use(hub: Hub) -> Hub:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        return hub

    return use


def test_a_complete_download_is_used_without_the_network(tmp_path: Path, use_hub: Callable[[Hub], Hub]) -> None:
    hub = use_hub(Hub(local=model_folder(tmp_path / "m", "model.safetensors"), online=None))
    assert locate_model("org/name") == tmp_path / "m"
    assert hub.calls == [True]


INDEX = "model.safetensors.index.json"
SHARDS = '{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'


@pytest.mark.parametrize("files", [{}, {INDEX: SHARDS, "model-1-of-2.safetensors": ""}])
def test_an_interrupted_download_is_completed(
    files: dict[str, str], tmp_path: Path, use_hub: Callable[[Hub], Hub]
) -> None:
    half = model_folder(tmp_path / "half")
    for name, content in files.items():
        (half / name).write_text(content)
    hub = use_hub(Hub(local=half, online=model_folder(tmp_path / "whole")))
    assert locate_model("org/name") == tmp_path / "whole"
    assert hub.calls == [True, False]


def test_without_a_network_a_hub_id_gives_one_sentence(use_hub: Callable[[Hub], Hub]) -> None:
    use_hub(Hub(local=None, online=None))
    with pytest.raises(ModelNotFound) as caught:
        locate_model("org/name")
    assert "'org/name' is no folder here" in str(caught.value)
    assert "no route to the hub" in str(caught.value)
    assert "\n" not in str(caught.value)
