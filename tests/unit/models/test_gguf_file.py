"""The head of a GGUF file: read as the gguf package reads it, and refused by name when it is not what we run."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.llama_cpp import write_tiny_gguf
from minisgl_backend.errors import ModelNotFound, ModelUnsupported
from minisgl_backend.models.files import open_files
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.gguf_file import GgufFile
from minisgl_backend.models.locate import locate_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def written(path: Path, add: Callable[[gguf.GGUFWriter], Any], architecture: str = "llama") -> Path:
    """A file with nothing in it but what `add` puts there."""
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_places_of_tensors_are_those_of_the_gguf_package(tiny: Path) -> None:
    theirs, ours = gguf.GGUFReader(tiny), GgufFile(tiny)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset, mine.size) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist())) and mine.type.name == tensor.tensor_type.name
    assert len(ours.tensors) == len(theirs.tensors)


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        for bits in (8, 16, 32, 64):
            getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
            getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
        writer.add_float32("f32", 0.5)
        writer.add_float64("f64", 0.1)
        writer.add_bool("yes", True)
        writer.add_array("words", ["a", "", "Ġé"])
        writer.add_array("numbers", [1, -2, 3])

    metadata = GgufFile(written(tmp_path / "values.gguf", add)).metadata
    assert {f"u{bits}": 2**bits - 1 for bits in (8, 16, 32, 64)}.items() <= metadata.items()
    assert {f"i{bits}": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)}.items() <= metadata.items()
    assert (metadata["f32"], metadata["f64"], metadata["yes"]) == (0.5, 0.1, True)
    assert (metadata["words"], metadata["numbers"]) == (["a", "", "Ġé"], [1, -2, 3])


def test_a_file_that_ends_too_early_is_refused_wherever_it_ends(tiny: Path, tmp_path: Path) -> None:
    whole, cut = tiny.read_bytes(), tmp_path / "cut.gguf"
    for length in (*range(0, 400), *range(400, len(whole), 997), len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelUnsupported, match=r"cut\.gguf .*(truncated|no GGUF file)"):
            GgufFile(cut)


@given(place=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_damaged_head_is_refused_or_read_and_never_breaks(tiny: Path, place: int, value: int) -> None:
    data = bytearray(tiny.read_bytes())
    data[place] = value
    damaged = tiny.parent / "damaged.gguf"
    damaged.write_bytes(data)
    try:
        GgufFile(damaged)
    except ModelUnsupported as error:
        assert "damaged.gguf" in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.eos_token_id", "2"),
        ("tokenizer.ggml.eot_token_id", [2]),
        ("tokenizer.ggml.unknown_token_id", -1),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.token_type", ["normal"]),
        ("tokenizer.ggml.merges", [0.5]),
        ("tokenizer.ggml.scores", ["low"]),
        ("tokenizer.chat_template", ["a"]),
        ("split.count", "many"),
        ("llama.context_length", float("inf")),
        ("llama.embedding_length", "wide"),
        ("llama.attention.head_count", [4, 4]),
        ("llama.rope.dimension_count", "all"),
        ("llama.rope.freq_base", [1.0]),
    ],
)
def test_metadata_of_the_wrong_type_is_named(key: str, value: Any, tmp_path: Path) -> None:
    """A list of heads, one for each layer, is real: OpenELM and pruned models have it."""

    def add(writer: gguf.GGUFWriter) -> None:
        kinds = {str: writer.add_string, list: writer.add_array, int: writer.add_int32, float: writer.add_float32}
        kinds[type(value)](key, value)
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))

    with pytest.raises(ModelUnsupported, match=rf"wrong\.gguf: {re.escape(key)} must be a"):
        read_model_spec(written(tmp_path / "wrong.gguf", add))


def test_a_list_of_token_types_that_is_too_long_is_refused_with_the_vocabulary(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a"])
        writer.add_token_types([1, 3, 3])

    with pytest.raises(ModelUnsupported, match="token_type has 3 entries for 1 tokens"):
        open_files(written(tmp_path / "types.gguf", add)).text("tokenizer.json")


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "empty.gguf", lambda writer: writer.add_tensor("x", np.zeros((0, 8), np.float32)))
    with pytest.raises(ModelUnsupported, match=r"rows of 'x' \[0, 8\] are no whole F32 blocks"):
        GgufFile(path)


def test_a_tensor_that_begins_between_two_values_is_refused(tmp_path: Path) -> None:
    """It would be read where the system can not map it."""
    path = written(tmp_path / "odd.gguf", lambda writer: writer.add_tensor("x", np.zeros((4, 8), np.float32)))
    data = path.read_bytes()
    at = data.index(b"x", 24) + 1 + 4 + 2 * 8 + 4  # behind the name: dimensions, their sizes, the type
    path.write_bytes(data[:at] + struct.pack("<Q", 1) + data[at + 8 :] + bytes(32))
    with pytest.raises(ModelUnsupported, match=r"tensor 'x' begins at no multiple of 32"):
        GgufFile(path)


def test_a_file_of_another_version_or_byte_order_is_refused(tiny: Path, tmp_path: Path) -> None:
    data, other = tiny.read_bytes(), tmp_path / "other.gguf"
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        other.write_bytes(data[:4] + version + data[8:])
        with pytest.raises(ModelUnsupported, match="GGUF version"):
            GgufFile(other)


def test_a_tensor_of_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGMLQuantizationType.IQ4_NL
        writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 18), np.uint8), raw_dtype=kind)

    with pytest.raises(ModelUnsupported, match=r"'blk\.0\.ffn_up\.weight' has type IQ4_NL; F32, F16, Q4_0"):
        GgufFile(written(tmp_path / "iq.gguf", add))


def test_an_architecture_that_is_not_declared_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "other.gguf", lambda writer: None, architecture="mamba")
    with pytest.raises(ModelUnsupported, match=r"architecture 'mamba' is not supported as GGUF; llama, qwen2"):
        read_model_spec(path)


def test_one_of_several_files_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "part.gguf", lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ModelUnsupported, match="one of several files"):
        read_model_spec(path)


def test_a_file_with_a_vocabulary_alone_holds_no_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "vocab.gguf", lambda writer: writer.add_token_list(["a"]))
    with pytest.raises(ModelUnsupported, match="holds no weights"):
        read_model_spec(path)


def test_a_file_a_folder_with_one_and_only_one_are_found(tiny: Path, tmp_path: Path) -> None:
    inside = tmp_path / "model.gguf"
    inside.write_bytes(tiny.read_bytes())
    assert locate_model(str(inside)) == locate_model(str(tmp_path)) == inside
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="holds 2 GGUF files: name one"):
        locate_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate_model(str(tmp_path)) == tmp_path, "a Hugging Face folder may have GGUF files beside"


def test_a_file_stands_for_the_small_files_of_a_folder_and_no_others(tiny: Path) -> None:
    files = open_files(tiny)
    assert all(files.text(name) for name in ("config.json", "generation_config.json", "tokenizer.json"))
    assert files.text("chat_template.jinja") is None and files.text("special_tokens_map.json") is None
