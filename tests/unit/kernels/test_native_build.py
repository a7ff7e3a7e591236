"""The library of native kernels: built once, again for what was edited, by one process at a time, for this machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakes.attention_backends import native_library, printed_by
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.native import build as building
from minisgl_backend.kernels.native import levels
from minisgl_backend.kernels.native.build import BuildFailed, CompilerMissing, build_sources
from minisgl_backend.kernels.native.levels import LEVELS, best_level, levels_of
from minisgl_backend.kernels.native.library import load_library, open_library

AVX2 = LEVELS[-1]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two sources, of which one includes a header that includes another. Nothing of torch, so compiling is quick."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "deep.h").write_text("#define NUMBER 7\n")
    (folder / "near.h").write_text('#include "deep.h"\n')
    (folder / "with.cpp").write_text('#include "near.h"\nextern "C" int with() { return NUMBER; }\n')
    (folder / "without.cpp").write_text('extern "C" int without() { return 1; }\n')
    return folder


def objects_in(cache: Path) -> set[str]:
    return {file.name.split("-")[0] for file in (cache / "native/objects").iterdir()}


def built(sources: Path, cache: Path) -> tuple[Path, list[str]]:
    """The library, and what was told."""
    lines: list[str] = []
    return build_sources(sources, AVX2, cache, lines.append), lines


@pytest.mark.slow
def test_a_library_is_built_once_and_an_edit_compiles_only_what_it_reaches(sources: Path, tmp_path: Path) -> None:
    first, lines = built(sources, tmp_path)
    assert len(lines) == 2 and lines[0] == "compiling kernels for avx2, once" and first.is_file()
    assert built(sources, tmp_path) == (first, [])

    before = {file.name for file in (tmp_path / "native/objects").iterdir()}
    (sources / "deep.h").write_text("#define NUMBER 8\n")
    second, lines = built(sources, tmp_path)
    added = {file.name for file in (tmp_path / "native/objects").iterdir()} - before
    assert second != first and lines and [name.split("-")[0] for name in added] == ["with"]


@pytest.mark.slow
def test_two_builders_at_once_build_once(sources: Path, tmp_path: Path) -> None:
    meet = threading.Barrier(2)

    def builder() -> tuple[Path, list[str]]:
        meet.wait(30)
        return built(sources, tmp_path)

    with ThreadPoolExecutor(2) as pool:
        (one, lines), (other, other_lines) = (future.result() for future in [pool.submit(builder) for _ in range(2)])
    told = sorted(line.partition(" ")[0] for line in (*lines, *other_lines))
    assert one == other and told in (["compiled", "compiling"], ["compiled", "compiling", "waiting"])


@pytest.mark.slow
def test_who_waits_for_another_builder_says_so(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool, (tmp_path / "native/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits = threading.Event()

        def tell(line: str) -> None:
            lines.append(line)
            waits.set()

        building_one = pool.submit(build_sources, sources, AVX2, tmp_path, tell)
        assert waits.wait(60)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert building_one.result(60).is_file()
    assert lines[0] == "waiting for another process, which compiles kernels" and len(lines) == 3


def test_a_source_that_does_not_compile_is_told_in_the_compilers_words_and_leaves_nothing(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "with.cpp").write_text("int wrong( {\n")
    with pytest.raises(BuildFailed, match=r"with\.cpp.*error"):
        built(sources, tmp_path)
    assert not list((tmp_path / "native").glob("*.so"))
    assert all(file.suffix == ".o" and file.stat().st_size for file in (tmp_path / "native/objects").iterdir())


@pytest.mark.slow
def test_what_was_not_used_for_long_is_removed_by_the_next_build(sources: Path, tmp_path: Path) -> None:
    first, _ = built(sources, tmp_path)
    for file in (first, *(tmp_path / "native/objects").iterdir()):
        os.utime(file, (0, 0))
    (sources / "deep.h").write_text("#define NUMBER 8\n")
    second, _ = built(sources, tmp_path)
    assert second.is_file() and not first.exists()
    assert len(list((tmp_path / "native/objects").iterdir())) == 2, "the one that was used again, and the new one"


def test_without_a_compiler_torch_is_used_and_a_line_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("minisgl_backend.kernels.native.library.best_level", lambda: AVX2)
    lines: list[str] = []
    assert open_library(tmp_path, lines.append) is None
    assert lines == ["no no-such-compiler here: our kernels can not be built; torch's are used, several times slower"]


def test_a_cache_folder_that_can_not_be_written_is_no_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("minisgl_backend.kernels.native.library.best_level", lambda: AVX2)
    (tmp_path / "file").touch()
    lines: list[str] = []
    assert open_library(tmp_path / "file", lines.append) is None
    assert len(lines) == 1 and "Not a directory" in lines[0] and "torch's are used" in lines[0]


@pytest.mark.slow
def test_a_library_may_be_used_by_others_than_who_built_it(sources: Path, tmp_path: Path) -> None:
    library, _ = built(sources, tmp_path)
    assert library.stat().st_mode & 0o777 == 0o755


@pytest.mark.slow
def test_without_a_compiler_a_library_of_the_same_sources_is_used(
    monkeypatch: pytest.MonkeyPatch, sources: Path, tmp_path: Path
) -> None:
    first, _ = built(sources, tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert built(sources, tmp_path) == (first, [])
    (sources / "without.cpp").write_text("")
    with pytest.raises(CompilerMissing):
        built(sources, tmp_path)


@pytest.mark.slow
def test_where_nothing_can_be_written_a_library_of_another_compiler_is_used(sources: Path, tmp_path: Path) -> None:
    first, _ = built(sources, tmp_path)
    other = first.rename(first.with_name(f"{first.stem.rpartition('-')[0]}-9.9.so"))
    shutil.rmtree(objects := tmp_path / "native/objects")
    objects.write_text("a file is in the way")
    assert built(sources, tmp_path) == (other, [])
    (sources / "without.cpp").write_text("")
    with pytest.raises(OSError, match="objects"):
        built(sources, tmp_path)


def test_a_compiler_that_does_not_know_the_instructions_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, sources: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$1" in -dump*) echo 4.0;; *) exit 1;; esac\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(CompilerMissing, match=r"old 4\.0 does not know the instructions of avx2"):
        built(sources, tmp_path)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "one that fails", "of the machine, and a file for a cache"])
def test_the_step_of_the_set_up_never_fails_but_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, compiler: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "file").touch()
    (failing := tmp_path / "failing").write_text(
        '#!/bin/sh\ncase "$*" in -dump*) echo 4.0;; *-E*) ;; *) exit 7;; esac\n'
    )
    failing.chmod(0o755)
    monkeypatch.setattr(building, "best_level", lambda: AVX2)
    monkeypatch.setattr(sys, "argv", ["build", str(tmp_path / ("file" if "file" in compiler else "cache"))])
    if "file" not in compiler:
        monkeypatch.setenv("CXX", str(failing) if "fails" in compiler else compiler)
    assert building.main() == 0
    assert "no kernels of our own; the engine runs on torch alone, several times slower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", []),
        ("fpu sse4_2 avx", []),
        ("avx2 fma f16c", ["avx2"]),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni", ["avx2"]),  # Cascade Lake: no bf16
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16", ["avx512", "avx2"]),
        (
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8",
            ["amx", "avx512", "avx2"],
        ),
    ],
)
def test_a_processor_has_the_levels_whose_instructions_it_names(flags: str, names: list[str]) -> None:
    assert [level.name for level in levels_of(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")] == names


def test_the_level_is_the_best_one_or_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "levels_here", lambda: LEVELS[1:])
    monkeypatch.delenv(levels.LEVEL_VARIABLE, raising=False)
    assert best_level() is LEVELS[1]
    monkeypatch.setenv(levels.LEVEL_VARIABLE, "avx2")
    assert best_level() is AVX2
    monkeypatch.setenv(levels.LEVEL_VARIABLE, "none")
    lines: list[str] = []
    assert best_level() is None and open_library(Path("/nowhere"), lines.append) is None
    assert lines == ["MINISGL_CPU_LEVEL is none: torch's are used, several times slower"]
    for wrong in ("amx", "sse"):
        monkeypatch.setenv(levels.LEVEL_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"MINISGL_CPU_LEVEL is '{wrong}'; this machine has avx512, avx2, none"):
            best_level()


@pytest.mark.slow
def test_the_process_has_one_openmp_runtime() -> None:
    """Two would each bring as many threads as there are cores."""
    script = (
        "import torch\n"
        "from fakes.attention_backends import native_library\n"
        "library = native_library()\n"
        "torch.randn(500, 500) @ torch.randn(500, 500)\n"
        "library.ops.add(torch.randn(500, 500), torch.randn(500, 500))\n"
        "maps = [line.split()[-1] for line in open('/proc/self/maps') if '.so' in line]\n"
        "print(len({name for name in maps if any(omp in name for omp in ('libgomp', 'libiomp', 'libomp'))}))\n"
    )
    assert printed_by(script) == "1"


def test_a_process_keeps_the_library_that_it_has_loaded_of_a_level() -> None:
    library = native_library()
    assert load_library(library.level, Path("/of/other/sources.so")) is library


def test_the_sources_are_shipped_beside_the_code() -> None:
    assert (building.SOURCES / "launch.h").is_file() and len(list(building.SOURCES.glob("*.cpp"))) > 5
