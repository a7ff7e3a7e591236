"""`minisgl gateway` as a process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from load.serving import stop
from minisgl_client.gateway.heads import MAX_HEAD_BYTES

pytestmark = pytest.mark.slow
NOBODY = "127.0.0.1:1"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """As it tells it, with nobody behind it."""
    command = [str(Path(sys.executable).with_name("minisgl")), "gateway", "--port", "0", "--url", NOBODY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process.stderr.readline().split()[3].removeprefix("http://").removesuffix("/v1")
        finally:
            stop(process)


def test_whoever_reads_its_address_can_connect(address: str) -> None:
    connection = HTTPConnection(address, timeout=PATIENCE_S)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 503
    connection.close()


def test_it_answers_to_nobody_elses_name_where_it_has_no_keys(address: str) -> None:
    for host, status in (("localhost", 200), (address, 200), ("evil.example", 403)):
        connection = HTTPConnection(address, timeout=PATIENCE_S)
        connection.request("GET", "/v1/models", headers={"Host": host})
        assert connection.getresponse().status == status, host
        connection.close()


def test_a_head_without_an_end_does_not_fill_its_memory(address: str) -> None:
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(b"GET / HTTP/1.1\r\nx-a: ")
        with pytest.raises(ConnectionError):
            for _ in range(1000):  # what two sockets hold is some megabytes
                client.sendall(b"a" * MAX_HEAD_BYTES)
