"""A model of `model_repository`, loaded as Triton loads it, between a fake stub and a fake engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fakes.engine_link import FakeLink
from fakes.triton_stub import FakeRequest, FakeSender, FakeStub, request
from minisgl_backend.serving import pbtxt

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
MODEL = REPOSITORY / "minisgl"


def initialize_args(repository: Path = MODEL, parameters: dict[str, str] | None = None) -> dict[str, str]:
    """What Triton gives to `initialize` of the model in this folder, with more parameters than its config.pbtxt."""
    file = repository / "config.pbtxt"
    text = file.read_text() if file.is_file() else "decoupled: true"
    given = {**pbtxt.parameters(text), **(parameters or {})}
    config = {
        "model_transaction_policy": {"decoupled": "decoupled: true" in text},
        "parameters": {key: {"string_value": value} for key, value in given.items()},
    }
    return {
        "model_config": json.dumps(config),
        "model_name": repository.name if file.is_file() else "minisgl",
        "model_repository": str(repository),
        "model_version": "1",
    }


@contextmanager
def loaded_module(stub: FakeStub, model: Path = MODEL) -> Iterator[ModuleType]:
    """The module, with the stub in the place where it imports Triton's."""
    before = sys.modules.get("triton_python_backend_utils")
    sys.modules["triton_python_backend_utils"] = stub  # type: ignore[assignment]
    try:
        spec = importlib.util.spec_from_file_location("minisgl_triton_model", model / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        if before is None:
            del sys.modules["triton_python_backend_utils"]
        else:
            sys.modules["triton_python_backend_utils"] = before


class Rig:
    """An initialised model with its fakes."""

    def __init__(self, module: ModuleType, stub: FakeStub, args: dict[str, str] | None = None) -> None:
        self.stub = stub
        self.link = FakeLink()
        self.model: Any = module.TritonPythonModel()
        self.model.open_link = self.link.open
        self._args = args or initialize_args()

    def start(self) -> Rig:
        self.model.initialize(self._args)
        return self

    def ask(self, *args: Any, **fields: Any) -> FakeSender:
        """One `execute` call with one request; its sender."""
        asked = request(self.stub, *args, **fields)
        assert self.execute(asked) is None
        return asked.sender

    def execute(self, *requests: FakeRequest) -> Any:
        return self.model.execute(list(requests))

    def finalize(self) -> None:
        self.model.finalize()


@contextmanager
def running_model(model: Path = MODEL) -> Iterator[Rig]:
    """A model that is started, and at the end finalized and checked: no violation, one FINAL each is the test's."""
    args = initialize_args(model)
    decoupled = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]
    stub = FakeStub(model.name, decoupled=decoupled)
    with loaded_module(stub, model) as module:
        rig = Rig(module, stub, args).start()
        try:
            yield rig
        finally:
            rig.finalize()
        assert not stub.violations
