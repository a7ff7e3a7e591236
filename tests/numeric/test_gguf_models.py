"""A model out of a GGUF file is the model out of the folder it was made of, for every architecture, packed or not.

The files are written by the gguf package under its own names (tests/fakes/gguf_model.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from fakes.family_cases import GEMMA
from fakes.forward import load, logits_of
from fakes.gguf_model import Choose, matrices_as, write_gguf
from fakes.tiny_model import make_tiny_model
from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.text.defaults import sampling_defaults
from minisgl_backend.text.tokenizer import Tokenizer

TOKENS = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0)).tolist()

CASES = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama_untied_with_biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
}


def logits(path: Path, quantization: str = "none") -> torch.Tensor:
    return logits_of(load(path, quantization=quantization), TOKENS, [30, 9, 1], 16, torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_logits_of_an_fp32_file_are_those_of_its_folder(name: str, tmp_path: Path) -> None:
    architecture, fields = CASES[name]
    folder = make_tiny_model(tmp_path / "folder", architecture, **fields)
    write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = read_model_spec(tmp_path / "model.gguf"), read_model_spec(folder)
    assert ours == theirs
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), logits(folder), atol=1e-5, rtol=0)


def test_a_llama_of_3_1_has_its_frequencies_from_the_divisors_in_the_file(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"head_dim": 64, "max_position_embeddings": 4096}
    folder = make_tiny_model(tmp_path / "folder", "LlamaForCausalLM", rope_parameters=rope, **shape)
    write_gguf(folder, tmp_path / "model.gguf", rope_factor=8.0)
    assert read_model_spec(tmp_path / "model.gguf").ropes == read_model_spec(folder).ropes
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), logits(folder), atol=1e-5, rtol=0)


def mixed(name: str, values: object) -> Kind:
    """As llama.cpp mixes types: more bits for values and the way down, so that q, k and v differ."""
    if "norm" in name or ".bias" in name:
        return Kind.F32
    if "attn_v" in name or "token_embd" in name:
        return Kind.Q8_0
    return Kind.F16 if "attn_k" in name else Kind.Q4_1


@pytest.mark.parametrize(
    ("choose", "architecture"),
    [
        (matrices_as(Kind.Q8_0), "LlamaForCausalLM"),
        (matrices_as(Kind.Q4_1), "LlamaForCausalLM"),
        (matrices_as(Kind.Q4_0), "Qwen2ForCausalLM"),
        (matrices_as(Kind.Q4_K), "LlamaForCausalLM"),
        (matrices_as(Kind.Q6_K), "Qwen2ForCausalLM"),
        (matrices_as(Kind.F16), "LlamaForCausalLM"),
        (matrices_as(Kind.BF16), "LlamaForCausalLM"),
        (mixed, "LlamaForCausalLM"),
        (mixed, "Gemma3ForCausalLM"),
    ],
    ids=["Q8_0", "Q4_1", "Q4_0", "Q4_K", "Q6_K", "F16", "BF16", "mixed", "mixed gemma"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_packed_and_unpacked_at_load_the_tokens_are_the_same(
    choose: Choose, architecture: str, tied: bool, tmp_path: Path
) -> None:
    fields = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    folder = make_tiny_model(tmp_path / "folder", architecture, **fields)
    write_gguf(folder, tmp_path / "model.gguf", choose)
    unpacked, packed = logits(tmp_path / "model.gguf"), logits(tmp_path / "model.gguf", "gguf")
    assert unpacked.isfinite().all() and unpacked.std() > 0.1
    torch.testing.assert_close(packed, unpacked, atol=2e-4, rtol=1e-4)
    assert torch.equal(packed.argmax(-1), unpacked.argmax(-1))


def test_packed_weights_stay_mapped_in_the_file_but_for_rows_that_change_places(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder", "LlamaForCausalLM")
    write_gguf(folder, tmp_path / "model.gguf", matrices_as(Kind.Q4_1))
    model = load(tmp_path / "model.gguf", quantization="gguf")
    layer = model.layers[0]  # type: ignore[attr-defined]
    down, (q, _, v) = layer.mlp.down.parts[0], layer.attention.qkv.parts
    mapped = [part.data.untyped_storage().data_ptr() for part in (down, v, model.lm_head.parts[0])]  # type: ignore[attr-defined]
    assert len(set(mapped)) == 1 and down.data.untyped_storage().nbytes() == (tmp_path / "model.gguf").stat().st_size
    assert q.data.untyped_storage().nbytes() == q.data.nbytes


def test_text_and_defaults_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder", "LlamaForCausalLM")
    write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = Tokenizer.load(tmp_path / "model.gguf"), Tokenizer.load(folder)
    text = "on the cat, 12 ½ naïve 日本\n\n  <|im_start|> and"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.all_bytes == theirs.all_bytes and ours.special_token_ids == theirs.special_token_ids
    assert (ours.eos_token_ids, ours.bos_token_id) == (theirs.eos_token_ids, theirs.bos_token_id)
    assert ours.template_source == theirs.template_source
    assert sampling_defaults(tmp_path / "model.gguf", "auto") == sampling_defaults(folder, "none")


def test_quantization_gguf_of_a_folder_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder", "LlamaForCausalLM")
    with pytest.raises(ModelUnsupported, match="no GGUF file"):
        load(folder, quantization="gguf")
