"""Safetensors: mapped, checked by name and shape, and every broken folder named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.checkpoint import Checkpoint, RandomTensors
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.load import build_decoder
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
TIED = parse_model_spec(CONFIG, {})
UNTIED = parse_model_spec({**CONFIG, "tie_word_embeddings": False}, {})
INDEX = "model.safetensors.index.json"


def tensors_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = RandomTensors(expected_tensors(spec), seed=1, dtype=dtype)
    return {name: source.read(name) for name in source.shapes()}


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    save_file(tensors, folder / name, {"format": "pt"})
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    names = list(tensors)
    weight_map = {name: f"model-{1 + (i % 2)}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        write(folder, {name: tensors[name] for name in names if weight_map[name] == file}, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def load(folder: Path, spec: ModelSpec = TIED, dtype: torch.dtype = torch.float32) -> Decoder:
    return build_decoder(spec, Checkpoint(folder), torch.device("cpu"), dtype, 32)


def mapped_file_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in fields[0].split("-"))
        if begin <= address < end:
            return fields[5] if len(fields) > 5 else ""
    return ""


def test_weights_in_the_wanted_dtype_stay_in_the_mapped_file(tmp_path: Path) -> None:
    model = load(write(tmp_path, tensors_of(TIED)))
    layer = model.layers[1]
    for weight in (model.embedding.weight, layer.attention.o.weight, layer.mlp.down.weight, model.norm.weight):
        assert mapped_file_at(weight.data_ptr()).endswith("model.safetensors")
    assert model.lm_head.weight is model.embedding.weight


def test_weights_of_another_dtype_are_converted_out_of_the_file(tmp_path: Path) -> None:
    tensors = tensors_of(TIED, torch.bfloat16)
    model = load(write(tmp_path, tensors))
    weight = model.layers[0].mlp.down.weight
    assert weight.dtype == torch.float32 and not mapped_file_at(weight.data_ptr()).endswith(".safetensors")
    assert torch.equal(weight, tensors["model.layers.0.mlp.down_proj.weight"].float())


def test_shards_are_read_through_their_index_and_only_that(tmp_path: Path) -> None:
    tensors = tensors_of(UNTIED)
    write_shards(tmp_path, tensors)
    write(tmp_path, {"adapter.weight": torch.ones(1)}, "adapter.safetensors")  # no file of the index
    shard = load_file(tmp_path / "model-1.safetensors")
    write(tmp_path, {**shard, "leftover": torch.ones(1)}, "model-1.safetensors")  # no tensor of the index
    model = load(tmp_path, UNTIED)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(model.layers[1].mlp.down.weight, tensors["model.layers.1.mlp.down_proj.weight"])
    assert mapped_file_at(model.embedding.weight.data_ptr()).endswith("model-1.safetensors")


def test_a_tied_lm_head_and_old_rotary_buffers_may_be_there(tmp_path: Path) -> None:
    extra = {"lm_head.weight": torch.ones(50, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    model = load(write(tmp_path, {**tensors_of(TIED), **extra}))
    assert model.lm_head.weight is model.embedding.weight


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    tensors = tensors_of(UNTIED)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelUnsupported, match=rf"lacks tensor '{name}'"):
        load(write(tmp_path, {n: t for n, t in tensors.items() if n != name}), UNTIED)
    with pytest.raises(ModelUnsupported, match=r"lacks tensor 'model\.embed_tokens\.weight' and 20 more of 21"):
        load(write(tmp_path, {"other": torch.ones(1)}), UNTIED)
    with pytest.raises(ModelUnsupported, match=r"lacks tensor 'lm_head\.weight'$"):
        load(write(tmp_path, tensors_of(TIED)), UNTIED)
    with pytest.raises(ModelUnsupported, match=r"does not use, the first is 'model\.layers\.0\.q_norm\.weight'"):
        load(write(tmp_path, {**tensors, "model.layers.0.q_norm.weight": torch.ones(8)}), UNTIED)
    with pytest.raises(ModelUnsupported, match=rf"'{name}' has shape \[24, 15\], config\.json asks for \[24, 16\]"):
        load(write(tmp_path, {**tensors, name: torch.ones(24, 15)}), UNTIED)


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    tensors = {**tensors_of(TIED), "model.norm.weight": torch.ones(16, dtype=torch.int8)}
    with pytest.raises(ModelUnsupported, match=r"'model\.norm\.weight' in model\.safetensors has dtype I8"):
        load(write(tmp_path, tensors))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors_of(TIED))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match=r"model-2\.safetensors is missing"):
        load(tmp_path)


def test_a_shard_without_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, tensors_of(TIED))
    weight_map["model.norm.weight"] = "model-1.safetensors"
    weight_map["model.embed_tokens.weight"] = "model-2.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelUnsupported, match=r"model-2\.safetensors does not hold tensor 'model\.embed_tokens"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -100])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    file = write(tmp_path, tensors_of(TIED)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelUnsupported, match=r"model\.safetensors is truncated"):
        load(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "weights.bin",
        "a/b.safetensors",
        pytest.param("x" * 300 + ".safetensors", id="longer than a name can be"),
    ],
)
def test_an_index_that_points_outside_or_at_a_pickle_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(ModelUnsupported, match="no safetensors file of this folder"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', pytest.param("[" * 100_000, id="deep")])
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelUnsupported, match=r"model\.safetensors\.index\.json can not be read"):
        load(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_and_never_opened(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"not even a pickle")
    with pytest.raises(ModelUnsupported, match=rf"pickled \({file}\)"):
        load(tmp_path)


def test_an_empty_folder_holds_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"holds no weights: neither model\.safetensors nor"):
        load(tmp_path)


def test_random_weights_depend_on_the_seed_and_nothing_else() -> None:
    shapes = expected_tensors(UNTIED)
    one, again, other = (RandomTensors(shapes, seed, torch.float32) for seed in (1, 1, 2))
    name = "model.layers.1.self_attn.k_proj.weight"
    one.read("lm_head.weight")  # the order of reading does not matter
    assert torch.equal(one.read(name), again.read(name)) and not torch.equal(one.read(name), other.read(name))
    assert not torch.equal(one.read(name), one.read("model.layers.0.self_attn.k_proj.weight"))
    model = build_decoder(UNTIED, one, torch.device("cpu"), torch.float32, 8)
    assert model.layers[0].mlp.gate_up.weight.shape == (48, 16)
