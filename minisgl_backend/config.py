"""The engine's settings: one frozen record, resolved once from `1/model.json`, the environment and the command line.

Where it stands in the flow: read by whoever starts an engine (Triton's stub, `LLM`, a test), handed to the engine
host, and from there unchanged to the scheduler and the workers. The reasons behind the defaults are in
docs/configuration.md.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from minisgl_backend.errors import ConfigError

SETTINGS_VARIABLE = "MINISGL_SETTINGS"
"""Environment variable: a JSON object of settings that win over `1/model.json`."""

Quantization = Literal["none", "int8", "int4", "gguf"]
"""How the weights of linear layers are kept."""

ATTENTION = ("auto", "native", "torch", "triton", "flashinfer")
"""Values of the setting `attention`."""

PHASES = ("triton", "flashinfer")
"""Those that a GPU can have for prompt chunks and for decode rows each."""

MAX_CPU = 8191
"""Largest number of a CPU in the setting `cpu_cores`: what Linux can be built for."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Field names are the keys of `1/model.json` and of `--set`."""

    model: str = "smollm2"  # a name of `minisgl fetch`, a Hugging Face folder, a .gguf file, or a hub id
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of weights and activations
    quantization: Quantization = "none"  # of the linear layers' weights at load; gguf: as they lie in the GGUF file
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:N"; "fake" computes no model (for load tests of the path)
    kernels: Literal["auto", "native", "triton", "torch"] = "auto"  # our own for a CPU, for a GPU; auto: where they run
    attention: str = "auto"  # backend: of ATTENTION, or two of PHASES as in "flashinfer,triton": prompts, decode rows
    decode_graphs: bool = True  # decode steps are recorded once per number of rows and replayed, where they can be
    page_size: int = 16  # tokens per KV page
    token_budget: int = 1024  # tokens computed in one step, prompt chunks and decode rows together
    max_running: int = 64  # sequences that hold a slot (rows of a step)
    queue_limit: int = 1024  # requests waiting for a slot; open are at most so many and max_running, else UNAVAILABLE
    policy: Literal["fcfs", "lpm", "dfs-weight", "priority"] = "fcfs"  # who of the waiting is admitted next
    preempt: bool = False  # policy "priority" only: who is more urgent takes slot and pages from who is less
    prefix_cache: bool = True  # keep K/V of prompts and outputs for later prompts that begin alike
    reserve: Literal["learned", "full"] = "learned"  # pages kept for running sequences; full: for the worst case
    mixed: bool = True  # decode rows and prompt chunks in one step; False: prompts first, in steps of their own
    overlap: bool = True  # plan the next step while one runs; False: depth 0, the reference
    target_itl_ms: float = 0.0  # time between two tokens of a stream that prompts of others may cause; 0: no target
    context_tokens: int = 0  # prompt + output of one sequence; 0: the model's own limit
    kv_bytes: int = 0  # size of the KV pool; 0: by gpu_memory_utilization on a GPU, by free memory on a CPU
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV together
    threads: int = 0  # of the worker's math library; 0: by the machine (device/placement.py)
    cpu_cores: str = ""  # CPUs the worker is pinned to, as in "0-3,8"; empty: the kernel places it
    generation_config: Literal["auto", "none"] = "auto"  # the model's own defaults of sampling, or vLLM's alone
    allow_client_template: bool = False  # a chat may bring its own template: code of strangers, in a sandbox
    allow_control_tokens: bool = False  # control tokens that a chat's messages spell out are taken as such
    reasoning_parser: str = "auto"  # of parse_output: "auto" (by the model's chat template), "none", or a name
    tool_parser: str = "auto"  # the same, of tool calls
    show_prompts_in_engine_view: bool = False  # begins of cached texts stand in the view of the engine, for all to read
    lease_s: float = 10.0  # how long the engine outlives its last holder
    executor: Literal["process", "inline"] = "process"  # where scheduler and worker run; inline: in the host
    max_restarts: int = 5  # restarts in a row without a finished request before the engine stays down
    tensor_parallel: int = 1  # ranks among which the model is dealt out, each a worker process
    resume_on_restart: bool = False  # requests that outlive a death of the engine go on; else they get UNAVAILABLE
    end_server_with_stub: bool = False  # a tritonserver whose stub of ours is lost is killed: something starts it again
    step_limit_s: float = 300.0  # a step that takes longer hangs: the engine is started again; 0: it may take any time
    step_trace: str = ""  # file for a timeline of the steps, overwritten; empty: none
    fake_step_ms: float = 0.0  # device "fake" only: time a step takes


_RANGES: dict[str, tuple[float, float]] = {
    "page_size": (1, 1024),
    "token_budget": (1, 1 << 20),
    "max_running": (1, 4096),
    "queue_limit": (0, 1 << 20),
    "target_itl_ms": (0.0, 60_000.0),
    "context_tokens": (0, 1 << 24),
    "kv_bytes": (0, 1 << 50),
    "gpu_memory_utilization": (0.05, 1.0),
    "threads": (0, 1024),
    "lease_s": (0.0, 86400.0),
    "max_restarts": (0, 1_000_000),
    "tensor_parallel": (1, 64),
    "step_limit_s": (0.0, 86400.0),
    "fake_step_ms": (0.0, 60_000.0),
}


PARSERS: dict[str, tuple[str, ...]] = {
    "reasoning_parser": ("think",),
    "tool_parser": ("hermes", "llama3", "mistral"),
}
"""Setting → the names it takes beside "auto" and "none": the parsers of `text/parsers/`."""


def resolve_config(*layers: Mapping[str, Any]) -> EngineConfig:
    """Merges the layers, later ones first, and checks every value.

    Raises ConfigError for an unknown key (naming the nearest known one), a wrong type or a value out of range.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    for key in merged:
        if key not in EngineConfig.__struct_fields__:
            raise ConfigError(f"unknown setting {key!r}{nearest(key, EngineConfig.__struct_fields__)}")
    try:
        config = msgspec.convert(merged, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"setting has a wrong value: {error}") from None
    for key, (low, high) in _RANGES.items():
        if not low <= getattr(config, key) <= high:
            raise ConfigError(f"setting {key!r} must be from {low:g} to {high:g}, got {getattr(config, key)!r}")
    for key, names in PARSERS.items():
        if (name := getattr(config, key)) not in ("auto", "none", *names):
            raise ConfigError(f"setting {key!r} must be one of auto, none, {', '.join(names)}, got {name!r}")
    _check_together(config)
    return config


def _check_together(config: EngineConfig) -> None:
    """Raises ConfigError for values that do not fit each other."""
    need = config.max_running + config.page_size
    if config.token_budget < need:
        raise ConfigError(
            f"setting 'token_budget' must be at least max_running + page_size = {need}, got {config.token_budget}"
        )
    if config.preempt and config.policy != "priority":
        raise ConfigError(f"setting 'preempt' needs 'policy' to be \"priority\", it is {config.policy!r}")
    parse_attention(config.attention)
    parse_cpu_cores(config.cpu_cores)
    if config.cpu_cores and config.executor != "process":
        raise ConfigError(f"setting 'cpu_cores' needs 'executor' to be \"process\", it is {config.executor!r}")
    if config.tensor_parallel > 1 and config.executor != "process":
        raise ConfigError(
            f"setting 'tensor_parallel' needs 'executor' to be \"process\" when it is {config.tensor_parallel}, "
            f"it is {config.executor!r}"
        )
    if config.step_limit_s not in (0.0, EngineConfig().step_limit_s) and config.executor != "process":
        raise ConfigError(
            f"setting 'step_limit_s' needs 'executor' to be \"process\", it is {config.executor!r}, and nobody can end "
            "the thread of a worker"
        )
    if config.target_itl_ms and not config.mixed:
        raise ConfigError("setting 'target_itl_ms' needs 'mixed': without it each prompt stops all running streams")


def parse_attention(text: str) -> tuple[str, str]:
    """The setting `attention` → the backend of prompt chunks, that of decode rows: "auto" → auto, auto.

    Raises ConfigError for what is neither one of ATTENTION nor two of PHASES.
    """
    names = tuple(text.split(","))
    if len(names) == 1 and text in ATTENTION:
        return text, text
    if len(names) == 2 and all(name in PHASES for name in names):
        return names[0], names[1]
    raise ConfigError(
        f"setting 'attention' must be one of {', '.join(ATTENTION)}, or two of {' and '.join(PHASES)} as in "
        f'"flashinfer,triton" (prompts, decode rows), got {text!r}'
    )


def parse_cpu_cores(text: str) -> tuple[int, ...]:
    """The setting `cpu_cores` → CPUs in ascending order: "0-3,8" → 0, 1, 2, 3, 8; "" → none.

    Raises ConfigError for what is no such list.
    """
    found: set[int] = set()
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= MAX_CPU:
            raise ConfigError(
                "setting 'cpu_cores' must be empty or a list of CPUs from 0 to "
                f'{MAX_CPU} and ranges of them, as in "0-3,8", got {text!r}'
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def read_settings(model_json: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of `1/model.json`, under those of the environment variable MINISGL_SETTINGS.

    Raises ConfigError for a file that can not be read and for what is no JSON object.
    """
    merged: dict[str, Any] = {}
    if model_json is not None and model_json.is_file():
        try:
            text = model_json.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{model_json} can not be read: {error}") from None
        merged.update(_json_object(text, str(model_json)))
    if environment.get(SETTINGS_VARIABLE):
        merged.update(_json_object(environment[SETTINGS_VARIABLE], SETTINGS_VARIABLE))
    return merged


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` of the command line → (key, value). The value is read as JSON, else taken as a string; that of a
    setting that is text may also be a number.
    """
    key, separator, raw = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set takes key=value, got {text!r}")
    try:
        value = json.loads(raw)
    except json.JSONDecodeError:
        return key, raw
    is_text = EngineConfig.__annotations__.get(key) == "str"
    return key, raw if is_text and type(value) in (int, float) else value


def nearest(word: str, known: tuple[str, ...]) -> str:
    """A hint for a message: `; did you mean 'page_size'?`, or the list of what is known."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _json_object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source} must hold a JSON object")
    return value
