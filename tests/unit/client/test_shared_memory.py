"""What a killed tritonserver leaves in /dev/shm is removed, and nobody else's."""

from __future__ import annotations

from pathlib import Path

from minisgl_client.server.shared_memory import backend_option, new_prefix, remove_regions


def test_a_servers_regions_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    own, other = new_prefix(), new_prefix()
    assert own != other and own in backend_option(own)
    kept = [f"{other}a", "triton_python_backend_shm_region_b"]
    for name in (f"{own}a", f"{own}b", *kept):
        (tmp_path / name).touch()
    remove_regions(own, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    remove_regions(own, tmp_path)  # a second time finds nothing
