"""OpenVINO GenAI: packages from the index, and our model exported in fp32 (other precisions are made at its start)."""

from __future__ import annotations

from load.peers.environment import Environment, install
from minisgl_backend.models.locate import locate_model

PACKAGES = (
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "transformers==5.5.4",
    "torch==2.13.0",
)
UNWANTED = ("torchvision",)  # built for another torch: transformers then fails to import
TASK = ("--task", "text-generation-with-past", "--weight-format", "fp32")


def steps(environment: Environment, model: str) -> None:
    """Everything, or what is missing of it."""
    environment.make(PACKAGES, UNWANTED)
    target = environment.model(model, "fp32")

    def export() -> None:
        source = str(locate_model(model))
        with environment.fresh(target) as folder:
            command = str(environment.python.with_name("optimum-cli"))
            environment.run(command, "export", "openvino", "--model", source, *TASK, str(folder))

    environment.once(f"export-{target.name}", " ".join((*PACKAGES, *TASK)), export)


if __name__ == "__main__":
    install("openvino", steps)
