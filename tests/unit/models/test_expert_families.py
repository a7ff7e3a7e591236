"""The families with experts: which layers have them, what is refused, and how their tensors come into the stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.kernels.moe import ExpertActivation
from minisgl_backend.layers.moe import SparseMlp
from minisgl_backend.models.checkpoint import RandomTensors
from minisgl_backend.models.experts import build_sparse_mlp
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.quantization import check_quantization
from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors
from minisgl_backend.models.weights import Weights

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
QWEN = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
CPU = torch.device("cpu")


def parse(architecture: str, **fields: Any) -> ModelSpec:
    return parse_model_spec({"architectures": [architecture], **SHAPE, **fields}, {})


def sparse(spec: ModelSpec) -> list[bool]:
    return [layer.sparse for layer in spec.layers]


@pytest.mark.parametrize("architecture", QWEN)
def test_experts_of_qwen_are_in_every_nth_layer_but_those_that_are_named(architecture: str) -> None:
    assert sparse(parse(architecture)) == [True] * 4
    assert sparse(parse(architecture, decoder_sparse_step=2)) == [False, True, False, True]
    assert sparse(parse(architecture, mlp_only_layers=[0, 3])) == [False, True, True, False]
    assert sparse(parse(architecture, decoder_sparse_step=2, mlp_only_layers=[1])) == [False, False, False, True]


def test_the_number_of_experts_of_qwen3_has_two_names() -> None:
    for fields in ({"num_experts": 16}, {"num_local_experts": 16}, {"num_experts": 16, "num_local_experts": 16}):
        moe = parse("Qwen3MoeForCausalLM", **fields).moe
        assert moe is not None and moe.num_experts == 16


def test_windows_of_qwen2_with_experts_are_in_every_other_layer_before_a_certain_one() -> None:
    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert [layer.window for layer in parse("Qwen2MoeForCausalLM", **fields).layers] == [8, 0, 8, 0]
    assert [layer.window for layer in parse("Qwen2MoeForCausalLM", sliding_window=8).layers] == [0] * 4


def test_weights_of_the_chosen_add_up_to_one_where_the_family_or_its_config_says_so() -> None:
    def renormalises(architecture: str, **fields: Any) -> bool:
        moe = parse(architecture, **fields).moe
        return moe is not None and moe.renormalise

    assert [renormalises(name) for name in QWEN] == [False, False]
    assert [renormalises(name, norm_topk_prob=True) for name in QWEN] == [True, True]
    assert renormalises("MixtralForCausalLM") and renormalises("GptOssForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8, got 9"),
        ("Qwen2MoeForCausalLM", {"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, -1]}, "mlp_only_layers must be a list of integers of at least"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of integers"),
        ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        ("GptOssForCausalLM", {"swiglu_limit": 0}, "swiglu_limit must be a positive number, got 0"),
        ("GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4'; use an unqu"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(architecture: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        parse(architecture, **fields)


def test_experts_are_not_quantised_without_a_word() -> None:
    with pytest.raises(ModelUnsupported, match="'quantization' is 'int8', but MixtralForCausalLM has experts"):
        check_quantization("int8", parse("MixtralForCausalLM"), gguf=False)


class Held:
    """Tensors that are there already: reading allocates nothing, as with a mapped file."""

    def __init__(self, spec: ModelSpec) -> None:
        source = RandomTensors(expected_tensors(spec), 0, torch.float32)
        self._tensors = {name: source.read(name) for name in source.shapes() if name.startswith("model.layers.1.")}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def build(spec: ModelSpec, source: Held) -> SparseMlp:
    assert spec.moe is not None
    names = FAMILIES[spec.architecture].names
    return build_sparse_mlp(spec.moe, spec, names, Weights(source, CPU, torch.float32), "model.layers.1")


def test_three_tensors_an_expert_are_stacked_gate_before_up() -> None:
    spec = parse("MixtralForCausalLM", num_local_experts=3)
    source = Held(spec)
    stack = build(spec, source).experts
    for expert in range(3):
        at = f"model.layers.1.block_sparse_moe.experts.{expert}"
        gate, down, up = (source.read(f"{at}.w{number}.weight") for number in (1, 2, 3))
        assert torch.equal(stack.gate_up[expert], torch.cat((gate, up))) and torch.equal(stack.down[expert], down)


def test_gate_and_up_of_gpt_oss_take_turns_in_one_tensor_and_are_put_side_by_side() -> None:
    spec = parse("GptOssForCausalLM", num_local_experts=4)
    source, at = Held(spec), "model.layers.1.mlp.experts"
    mlp = build(spec, source)
    stack, both = mlp.experts, source.read(f"{at}.gate_up_proj")
    bias = source.read(f"{at}.gate_up_proj_bias")
    assert both.shape == (4, 32, 96) and stack.gate_up_bias is not None and stack.down_bias is not None
    assert torch.equal(stack.gate_up[:, :48], both[:, :, 0::2].mT) and torch.equal(
        stack.gate_up[:, 48:], both[:, :, 1::2].mT
    )
    assert torch.equal(stack.gate_up_bias[:, :48], bias[:, 0::2]) and torch.equal(
        stack.gate_up_bias[:, 48:], bias[:, 1::2]
    )
    assert torch.equal(stack.down, source.read(f"{at}.down_proj").mT)
    assert torch.equal(stack.down_bias, source.read(f"{at}.down_proj_bias"))
    assert mlp.activation == ExpertActivation("clamped_swiglu", 1.702, 7.0)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_stacking_makes_the_stack_and_nothing_else_as_large_as_one_matrix(architecture: str) -> None:
    spec = parse(architecture, num_local_experts=8, intermediate_size=256)
    source = Held(spec)
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
        stack = build(spec, source).experts
    made = sorted(event.cpu_memory_usage for event in profile.function_events if event.cpu_memory_usage > 0)
    assert set(made[-2:]) == {stack.gate_up.nbytes, stack.down.nbytes}
    assert made[-3] < stack.down[0].nbytes
