"""What tells weights from others in a file of the same name, size and times; and which bytes are read ahead."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fakes.gguf_model import write_gguf
from fakes.random_model import write_random_llama
from minisgl_backend.models.packed_file import open_packed, packed_path
from minisgl_backend.models.packed_index import last_packed
from minisgl_backend.models.read_ahead import parts_to_read, read_ahead
from minisgl_backend.models.weight_files import tensor_places, weights_id

SHAPE, DTYPE = (3, 5, 16), torch.float32
PACKED = ("model.layers.0.mlp.gate_proj.weight|model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight")


@pytest.fixture(params=["folder", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = write_random_llama(tmp_path / "model", rms_norm_eps=1e-5)
    if request.param == "folder":
        return folder
    write_gguf(folder, tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def file_of(model: Path) -> Path:
    return model if model.is_file() else model / "model.safetensors"


def packed(cache: Path, model: Path, names: tuple[str, ...] = PACKED) -> Path:
    path = packed_path(cache, model, DTYPE, "none")
    with open_packed(path) as store:
        for name in names:
            store.take(name, SHAPE, DTYPE, lambda into: None)
    return path


def test_a_change_of_any_tensor_is_another_identity_though_name_size_and_times_are_the_same(model: Path) -> None:
    file, before = file_of(model), weights_id(model)
    whole, state = file.read_bytes(), file.stat()
    places = tensor_places(file)
    assert len(places) > 15 and weights_id(model) == before
    for name, place in places.items():
        negated = bytes(byte ^ 0x80 for byte in whole[place.start : place.stop])
        file.write_bytes(whole[: place.start] + negated + whole[place.stop :])
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert weights_id(model) != before, name
    file.write_bytes(whole)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert weights_id(model) == before


def test_each_tensor_lies_where_the_file_says(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = file_of(write_random_llama(tmp_path / "model"))
    whole, tensors = file.read_bytes(), load_file(file)
    places = tensor_places(file)
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        assert whole[place.start : place.stop] == tensors[name].numpy().tobytes(), name


@pytest.mark.parametrize("content", [b"", b"short", bytes(100), b"\xff" * 100, b"\x04" + bytes(7) + b"null"])
def test_a_broken_file_has_an_identity_too(tmp_path: Path, content: bytes) -> None:
    ids = set()
    for last in (b"1", b"2"):
        (tmp_path / "model.safetensors").write_bytes(content + last)
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
        assert tensor_places(tmp_path / "model.safetensors") == {}
        ids.add(weights_id(tmp_path))
    assert len(ids) == 2


def test_without_packed_weights_all_of_the_checkpoint_is_read_ahead(model: Path) -> None:
    file = file_of(model)
    assert parts_to_read(model, None) == [(file, range(file.stat().st_size))]


def test_beside_packed_weights_only_the_tensors_that_are_not_in_them_are_read_ahead(
    model: Path, tmp_path: Path
) -> None:
    path = packed(tmp_path, model)
    parts = parts_to_read(model, path)
    assert parts[0] == (path, range(path.stat().st_size))
    if model.is_file():
        assert parts[1:] == []
        return
    gone = {name for product in PACKED for name in product.split("|")}
    places = tensor_places(file_of(model))
    assert gone < places.keys()
    assert parts[1:] == [(file_of(model), place) for name, place in places.items() if name not in gone]


def test_beside_a_broken_file_all_is_read_ahead_for_it_is_packed_again(model: Path, tmp_path: Path) -> None:
    path, file = packed(tmp_path, model), file_of(model)
    path.write_bytes(path.read_bytes()[:-1])
    assert parts_to_read(model, path) == [(file, range(file.stat().st_size))]


def test_the_packed_weights_of_a_dtype_are_found_and_of_any_those_opened_last(tmp_path: Path) -> None:
    model = write_random_llama(tmp_path / "model")
    assert last_packed(tmp_path, model, "*") is None
    paths = []
    for seconds_ago, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        paths.append(packed_path(tmp_path, model, dtype, "none"))
        with open_packed(paths[-1]) as store:
            store.take("one", SHAPE, DTYPE, lambda into: None)
        os.utime(paths[-1], (then := time.time() - seconds_ago, then))
    assert last_packed(tmp_path, model, "*") == last_packed(tmp_path, model, "float32") == paths[0]
    assert last_packed(tmp_path, model, "bfloat16") == paths[1] and last_packed(tmp_path, model, "float16") is None
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert last_packed(tmp_path, model, "*") is None, "of other weights"


def test_weights_are_read_ahead_when_there_are_any_and_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, size, advice: asked.append((begin, size)))
    (tmp_path / "broken.safetensors").symlink_to(tmp_path / "nowhere")
    assert read_ahead(tmp_path) is None, "whoever loads it will say what is wrong"
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    for free_bytes, expected in ((2000, [(0, 1000)]), (1999, [])):
        asked.clear()
        monkeypatch.setattr("minisgl_backend.models.read_ahead.free_memory_bytes", lambda free=free_bytes: free)
        thread = read_ahead(tmp_path)
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive() and asked == expected
