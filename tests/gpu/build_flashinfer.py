"""FlashInfer for a machine with a GPU and no package registry: the kernels that the proof needs, in one small folder.

    python tests/gpu/build_flashinfer.py [OUT]     # build/flashinfer; ten minutes of one core, seconds the next time

Needs nvcc (CUDA_HOME, /usr/local/cuda), a C++ compiler, and a package registry; no GPU. OUT then holds

    site/     flashinfer's Python files, as far as they are imported, with the kernels where it looks for built ones
    wheels/   what it needs, for the GPU machine's Python
    needs     a line for each of those: distribution and module

There, put site/ on PYTHONPATH, install what is lacking of wheels/, and set FLASHINFER_WORKSPACE_BASE to a folder for
its notes and FLASHINFER_DISABLE_JIT=1: what was not built here is then refused, and not compiled without sources. The
kernels are of the family that attention/flashinfer_phases.py asks for, in bf16, without windows and caps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = json.loads((ROOT / "tests/fakes/flashinfer_signatures.json").read_text(encoding="utf-8"))["version"]
MOST_BYTES = 55 << 20

NEEDS = {
    "apache-tvm-ffi<0.2": "tvm_ffi",
    "nvidia-ml-py": "pynvml",
    "certifi": "certifi",
    "charset-normalizer": "charset_normalizer",
    "click": "click",
    "einops": "einops",
    "filelock": "filelock",
    "idna": "idna",
    "jinja2": "jinja2",
    "markupsafe": "markupsafe",
    "packaging": "packaging",
    "requests": "requests",
    "tabulate": "tabulate",
    "tqdm": "tqdm",
    "typing-extensions": "typing_extensions",
    "urllib3": "urllib3",
}
"""What is imported with flashinfer, beside torch and numpy."""

PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64")

WHOLE = (".", "attention", "cudnn", "jit", "norm", "quantization", "trace")
"""Folders of the package whose files are all brought: functions import some of them when they are called."""


def main(given: Sequence[str] | None = None) -> int:
    """Compiles, packs and tries what it has packed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build" / "flashinfer")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "flashinfer-work", help="kept, for the next time")
    parser.add_argument("--capability", default="9.0a", help="of the GPU")
    parser.add_argument("--python", default="3.12", help="version on the GPU machine")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    arguments = parser.parse_args(given)
    work, out = arguments.work.resolve(), arguments.out.resolve()
    install(work / "site")
    environment = build_environment(work, arguments.capability)
    names = kernels_here("build", arguments.head_dims, environment, work / "site")
    pack(work, out, names["files"], names["kernels"])
    download(out, arguments.python)
    loaded = kernels_here(
        "load", arguments.head_dims, load_environment(work, arguments.capability), out / "site", work / "site"
    )
    outside = [path for path in loaded["files"] if not Path(path).is_relative_to(out)]
    assert not outside, f"not packed: {outside}"
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / (1 << 20):.1f} MiB, {len(names['kernels'])} kernel libraries, flashinfer {VERSION}")
    assert size <= MOST_BYTES, f"{size:,} bytes, more than the {MOST_BYTES:,} that may be carried"
    return 0


def install(site: Path) -> None:
    """The whole package and what it needs, for the Python that runs this."""
    if not (site / f"flashinfer_python-{VERSION}.dist-info").is_dir():
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        subprocess.run([*command, f"flashinfer-python=={VERSION}", "ninja", *NEEDS], check=True)


def build_environment(work: Path, capability: str) -> dict[str, str]:
    """For FlashInfer's compiler. The driver's library, which is linked, need not be there."""
    stub = work / "stub"
    stub.mkdir(parents=True, exist_ok=True)
    soname = ["-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(stub / "libcuda.so")]
    subprocess.run(["cc", *soname], check=True)
    shutil.copy(stub / "libcuda.so", stub / "libcuda.so.1")
    return {
        **os.environ,
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
        "FLASHINFER_CUDA_ARCH_LIST": capability,
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "LIBRARY_PATH": str(stub),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(stub), os.environ.get("LD_LIBRARY_PATH")])),
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
        "PATH": os.pathsep.join([str(work / "site" / "bin"), os.environ["PATH"]]),
    }


def load_environment(work: Path, capability: str) -> dict[str, str]:
    """As on the GPU machine, where nothing is compiled. The driver's library is the empty one, and the GPU is told."""
    notes = work / "notes"
    shutil.rmtree(notes, ignore_errors=True)
    libraries = os.pathsep.join(filter(None, [str(work / "stub"), os.environ.get("LD_LIBRARY_PATH")]))
    return {
        **os.environ,
        "FLASHINFER_CUDA_ARCH_LIST": capability,
        "FLASHINFER_WORKSPACE_BASE": str(notes),
        "FLASHINFER_DISABLE_JIT": "1",
        "LD_LIBRARY_PATH": libraries,
    }


def kernels_here(
    verb: str, head_dims: Sequence[int], environment: dict[str, str], *sites: Path
) -> dict[str, list[str]]:
    """Builds, or loads, the kernels in a process that has flashinfer from the first of `sites`."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import build_flashinfer as b; b.child()"
    path = os.pathsep.join(map(str, sites))
    command = [sys.executable, "-c", code, verb, *map(str, head_dims)]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    answer: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def child() -> None:
    """Prints the files of the package that were read, and the kernels' libraries."""
    opened: set[str] = set()

    def seen(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            opened.add(os.path.realpath(arguments[0]))

    sys.addaudithook(seen)
    import flashinfer
    import torch
    from flashinfer.decode import get_batch_decode_module
    from flashinfer.jit.attention import modules
    from flashinfer.prefill import get_batch_prefill_module

    half, ints, verb, kernels = torch.bfloat16, torch.int32, sys.argv[1], []
    for head_dim in map(int, sys.argv[2:]):
        plain = (half, half, half, ints, head_dim, head_dim, 0, False, False)
        decode = modules.gen_batch_decode_module(*plain)
        chunks = modules._gen_batch_prefill_primary_module("fa2", *plain, False, False)
        for spec in (decode, chunks):
            if verb == "build":
                print("compiling", spec.name, file=sys.stderr)
                spec.build(verbose=False)
                kernels.append(str(spec.jit_library_path))
        get_batch_decode_module(*plain)
        get_batch_prefill_module("fa2", *plain, False, False)
    package = os.path.realpath(Path(flashinfer.__file__).parent)
    modules_read = {os.path.realpath(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    files = sorted(path for path in opened | modules_read if path.startswith(package + os.sep))
    print(json.dumps({"files": [f for f in files if not f.endswith(".pyc")], "kernels": kernels}))


def pack(work: Path, out: Path, files: Sequence[str], kernels: Sequence[str]) -> None:
    """files: that were read of the package."""
    shutil.rmtree(out, ignore_errors=True)
    package = (work / "site" / "flashinfer").resolve()
    wanted = {Path(path) for path in files if "/cutlass/" not in path}
    for folder in WHOLE:
        wanted |= set((package / folder).glob("*.py") if folder == "." else (package / folder).rglob("*.py"))
    for path in wanted:
        target = out / "site" / "flashinfer" / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for kernel in map(Path, kernels):
        target = out / "site" / "flashinfer" / "data" / "aot" / kernel.stem / kernel.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kernel, target)


def download(out: Path, python: str) -> None:
    """Wheels of what the package needs, and the list of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += [f"--python-version={python}", *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run([*command, "--dest", str(out / "wheels"), *NEEDS], check=True)
    lines = [f"{need.split('<')[0]} {module}\n" for need, module in NEEDS.items()]
    (out / "needs").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
