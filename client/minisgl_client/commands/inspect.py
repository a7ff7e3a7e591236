"""`minisgl inspect PATH`: what a model's folder or GGUF file holds, what it needs here, and whether it will run.

Reads the small files and the heads of the weight files, not the weights. Exit code 0 when the engine can serve it under
the settings given, 4 when it can not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl_backend.worker.inspection import Inspection

_UNSUPPORTED = 4


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `inspect` to the command line."""
    parser = commands.add_parser(
        "inspect", help="what a model holds and needs, and whether it runs", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", metavar="PATH", help="a folder, a .gguf file, a fetched name, or a hub id")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), help="of weights, activations and K/V")
    parser.add_argument("--kv-bytes", type=int, metavar="N", help="size of the KV pool (default: what is free)")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any engine setting (docs/configuration.md)"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON, for scripts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings on stdout. Raises StartError where not even the model's configuration can be read."""
    import msgspec

    from minisgl_backend.config import parse_setting, read_settings, resolve_config
    from minisgl_backend.models.locate import locate_model
    from minisgl_backend.worker.inspection import inspect_model

    given: dict[str, Any] = {"dtype": arguments.dtype, "kv_bytes": arguments.kv_bytes}
    settings = dict(parse_setting(text) for text in arguments.set)
    settings |= {key: value for key, value in given.items() if value is not None}
    config = resolve_config(read_settings(None, os.environ), settings, {"model": arguments.model})
    path = locate_model(config.model)
    found = inspect_model(config, path)
    faults = (*found.faults, *_text_faults(path))
    found = msgspec.structs.replace(found, faults=faults)
    print(msgspec.json.format(msgspec.json.encode(found)).decode() if arguments.json else as_text(found))
    return _UNSUPPORTED if faults else 0


def as_text(found: Inspection) -> str:
    """A line for each subject, and a sentence at the end."""
    needs, spec = found.needs, found.spec
    rows = [
        ("path", found.path),
        ("architecture", f"{found.architecture} ({found.models})"),
        (
            "checkpoint",
            f"{found.checkpoint}, {_mib(found.checkpoint_bytes)} in {found.num_tensors} tensors, {spec['dtype']}",
        ),
        ("parameters", f"{found.parameters / 1e6:,.1f} million"),
        ("layers", f"{spec['num_layers']}, {_layers(spec)}"),
        ("heads", f"{spec['num_heads']}, {spec['num_kv_heads']} of K/V, {spec['head_dim']} wide"),
        ("context", f"{needs.context_tokens:,} tokens, rotary: {', '.join(found.rotary)}"),
        ("end tokens", ", ".join(map(str, _list(spec["eos_token_ids"]))) or "none"),
        ("device", f"{needs.device}, {_mib(needs.free_bytes)} free"),
        ("weights", f"{_mib(needs.weight_bytes)} in {needs.dtype}"),
        ("K/V", f"{needs.kv_bytes_per_token:,} bytes a token"),
        ("KV pool", f"{_mib(needs.kv_pool_bytes)}, {needs.kv_pool_tokens:,} tokens"),
    ]
    lines = [f"{name:<13}{value}" for name, value in rows]
    lines += ["", *(f"fault        {fault}" for fault in found.faults)]
    return "\n".join([*lines, "it will not run" if found.faults else "it will run"])


def _text_faults(path: Path) -> tuple[str, ...]:
    """What keeps the engine from reading text for this model."""
    from minisgl_backend.errors import StartError
    from minisgl_backend.text.tokenizer import Tokenizer

    try:
        Tokenizer.load(path)
    except StartError as error:
        return (str(error),)
    return ()


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _layers(spec: dict[str, Any]) -> str:
    layers = _list(spec["layers"])
    windows = sorted({layer["window"] for layer in layers if layer["window"]})
    parts = [f"{spec['hidden_size']} wide"]
    if windows:
        count = sum(bool(layer["window"]) for layer in layers)
        parts.append(f"{count} with a window of {', '.join(f'{window:,}' for window in windows)}")
    if moe := spec["moe"]:
        count = sum(layer["sparse"] for layer in layers)
        parts.append(f"{count} with {moe['num_experts']} experts, {moe['top_k']} a token")
    return ", ".join(parts)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
