"""Every kind of rotary embedding against transformers: frequencies, tables up to position 131,072, rotated heads.

Bounds. transformers takes frequencies and angles in fp32, we in fp64 up to cos and sin. So the reference is the less
exact side, and the bounds below are those of its rounding, with u = 2^-24, half a unit in the last place of an fp32:
- a frequency: 3 u of itself, (factor + 3) u where transformers blends two frequencies of which one is `factor` times
  the other (llama3, yarn: what the weights of the blend lose to rounding counts `factor` times);
- cos and sin beside those of transformers' own frequencies with the angle taken in fp64: the angle times that bound,
  and u for our rounding of the result;
- cos and sin beside the module's own: the angle's own rounding, u of it, comes on top, and that of the module's result.
At position 131,072 and one radian per position the last is 0.03 (default) to 0.28 (yarn by 32): what fp32 may cost.
What it does cost, seen over all positions: the module's cos is off by 0.0006 (linear) to 0.009 (llama3).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kernels.rotary import apply_rotary
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.layers.rotary import RotaryTable
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.load import rotary_table
from minisgl_backend.models.rope import RopeSpec
from minisgl_backend.models.rope_fields import read_ropes

CPU = torch.device("cpu")
ULP = 2.0**-24
HEAD_DIM = 64
CONTEXT = 131_073
POSITIONS = torch.cat(
    (torch.arange(600), torch.arange(600, CONTEXT, 97), torch.tensor([4095, 4096, 65536, CONTEXT - 1]))
)

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default_of_a_large_theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_of_gpt_oss": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn_of_deepseek": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn_of_a_given_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 16,  # all of the ramp is cut off at both ends
    },
    "yarn_of_a_small_theta": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "beta_fast": 4096.0,
        "original_max_position_embeddings": 131072,  # the slowest pair turns often: the ramp ends beyond it
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.02 * pair for pair in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + pair for pair in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 4096,
    },
    "longrope_of_a_given_factor": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "short_factor": [1.0 + 0.02 * pair for pair in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + pair for pair in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 4096,
    },
}


def config_of(kind: str) -> Any:
    """A Llama."""
    from transformers import LlamaConfig

    limit = 32768 if kind == "dynamic" else 131072
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=limit,
        rope_parameters=dict(KINDS[kind]),
    )


def as_read(config: Any, defaults: dict[str, Any] | None = None, head_dim: int = HEAD_DIM) -> tuple[RopeSpec, ...]:
    """What a folder of that config says."""
    return read_ropes(ConfigFields(json.loads(config.to_json_string()), defaults or {}), head_dim)


def frequency_bound(kind: str) -> float:
    blends = KINDS[kind]["rope_type"] in ("llama3", "yarn")
    return (3.0 + (KINDS[kind]["factor"] if blends else 0.0)) * ULP


def reference(kind: str, length: int) -> tuple[Tensor, float]:
    """transformers' frequencies, as fp64, and attention factor, at a sequence of that length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config, rope_type = config_of(kind), KINDS[kind]["rope_type"]
    if rope_type == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=length)
    return frequencies.double(), factor


@pytest.mark.parametrize("length", [100, 4096, 4097, 40000, CONTEXT])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_factor_are_those_of_transformers_at_a_sequence_as_long_as_the_limit(
    kind: str, length: int
) -> None:
    (rope,) = as_read(config_of(kind))
    expected, factor = reference(kind, length)
    got = torch.tensor(rope.frequencies(length), dtype=torch.float64)
    assert ((got - expected).abs() / expected).max() <= frequency_bound(kind)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_transformers_up_to_its_rounding_at_every_position(kind: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    (rope,) = as_read(config_of(kind))
    table = rotary_table(rope, CONTEXT, CPU)
    frequencies, factor = reference(kind, CONTEXT)
    angles = torch.outer(POSITIONS.double(), frequencies)
    bound = factor * (angles * frequency_bound(kind) + ULP)
    assert_within(table.cos[POSITIONS], angles.cos() * factor, bound)
    assert_within(table.sin[POSITIONS], angles.sin() * factor, bound)
    assert bound[600].max() < 0.002, "the bound must not hide a wrong table"

    own = torch.outer(POSITIONS.double(), torch.tensor(rope.frequencies(CONTEXT), dtype=torch.float64))
    assert_within(table.cos[POSITIONS], own.cos() * factor, torch.tensor(1.01 * ULP * factor))

    cos, sin = LlamaRotaryEmbedding(config_of(kind))(torch.zeros(1), POSITIONS[None])
    half = rope.rotary_dim // 2
    module_bound = bound + factor * (angles + 2) * ULP
    assert_within(table.cos[POSITIONS], cos[0, :, :half].double(), module_bound)
    assert_within(table.sin[POSITIONS], sin[0, :, :half].double(), module_bound)


def assert_within(got: Tensor, expected: Tensor, bound: Tensor) -> None:
    excess = ((got.double() - expected).abs() - bound).max().item()
    assert excess <= 0, f"{excess} over the bound"


def test_gemmas_two_ropes_are_those_of_transformers() -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    config = Gemma3TextConfig(
        num_hidden_layers=6, head_dim=128, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=2e4
    )
    module = Gemma3RotaryEmbedding(config)
    ropes = as_read(config, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}, 128)
    for rope, layer_type in zip(ropes, ("full_attention", "sliding_attention"), strict=True):
        expected = getattr(module, f"{layer_type}_inv_freq").double()
        got = torch.tensor(rope.frequencies(131072), dtype=torch.float64)
        assert ((got - expected).abs() / expected).max() <= 2 * ULP


def turned(table: RotaryTable, x: Tensor, positions: Tensor) -> Tensor:
    return HeadPreparation(TORCH_KERNELS, table.at(positions))(x, x)[0]


def some_heads(head_dim: int, tokens: int = 40) -> Tensor:
    return torch.randn(tokens, 3, head_dim, generator=torch.Generator().manual_seed(7))


def test_the_half_of_a_head_that_glm4_rotates_is_interleaved_as_in_transformers() -> None:
    from transformers import Glm4Config
    from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding, apply_rotary_pos_emb

    config = Glm4Config(head_dim=128, partial_rotary_factor=0.5)
    (rope,) = as_read(config, {"partial_rotary_factor": 0.5}, 128)
    assert rope.rotary_dim == 64
    positions = torch.arange(40)
    x = some_heads(128)
    table = rotary_table(RopeSpec(rope.theta, rope.rotary_dim, rope.scaling, interleaved=True), 40, CPU)
    expected, _ = apply_rotary_pos_emb(x[None], x[None], *Glm4RotaryEmbedding(config)(x, positions[None]), 2)
    torch.testing.assert_close(turned(table, x, positions), expected[0], atol=1e-5, rtol=0)


def test_the_share_of_a_head_that_phi_rotates_is_that_of_transformers() -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

    scaling = {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(48)],
        "long_factor": [2.0 + pair for pair in range(48)],
    }
    for original, limit in ((32, 40), (40, 40)):
        config = Phi3Config(
            hidden_size=512,
            num_attention_heads=4,
            max_position_embeddings=131072,
            original_max_position_embeddings=original,
            partial_rotary_factor=0.75,
            rope_scaling=dict(scaling),
        )
        (rope,) = as_read(config, {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096}, 128)
        assert rope.kind == "longrope" and rope.rotary_dim == 96 and rope.attention_factor > 1.1
        positions = torch.arange(limit)
        x = some_heads(128)
        cos, sin = Phi3RotaryEmbedding(config)(x, positions[None])
        expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, 2)
        torch.testing.assert_close(turned(rotary_table(rope, limit, CPU), x, positions), expected[0], atol=2e-5, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.integers(1, 16),
    kept=st.integers(0, 8),
    interleaved=st.booleans(),
    factor=st.sampled_from([1.0, 1.25]),
    first=st.integers(0, 100),
    second=st.integers(0, 100),
    seed=st.integers(0, 1000),
)
def test_rotations_keep_norms_compose_and_leave_the_rest_alone(
    pairs: int, kept: int, interleaved: bool, factor: float, first: int, second: int, seed: int
) -> None:
    """Norms up to the attention factor; scores of rotated q and k depend on the distance of their positions alone."""
    rope = RopeSpec(100.0, 2 * pairs, interleaved=interleaved)
    angles = torch.outer(torch.arange(202, dtype=torch.float64), torch.tensor(rope.frequencies(1), dtype=torch.float64))
    cos, sin = (factor * angles.cos()).float(), (factor * angles.sin()).float()

    def rotate(x: Tensor, position: int) -> Tensor:
        return apply_rotary(x, cos[position][None, None], sin[position][None, None], interleaved=interleaved)

    q, k = torch.randn(2, 1, 1, 2 * pairs + 2 * kept, generator=torch.Generator().manual_seed(seed))
    q, k = q[None], k[None]
    turned, rotated = rotate(q, first), slice(0, 2 * pairs)
    assert turned.dtype == q.dtype and turned.shape == q.shape and turned.data_ptr() != q.data_ptr()
    torch.testing.assert_close(turned[..., rotated].norm(), factor * q[..., rotated].norm())
    assert torch.equal(turned[..., 2 * pairs :], q[..., 2 * pairs :])
    again = rotate(turned, second)[..., rotated]
    torch.testing.assert_close(again, factor * rotate(q, first + second)[..., rotated], atol=1e-5, rtol=1e-5)
    apart = (rotate(q, first) * rotate(k, first + second)).sum()
    torch.testing.assert_close(apart, (rotate(q, 0) * rotate(k, second)).sum(), atol=1e-4, rtol=1e-4)
