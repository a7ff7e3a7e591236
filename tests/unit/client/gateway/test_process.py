"""`minisgl gateway` as a process."""

from __future__ import annotations

import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from load.serving import stop

NOBODY = "127.0.0.1:1"


@pytest.mark.slow
def test_whoever_reads_its_address_can_connect() -> None:
    command = [str(Path(sys.executable).with_name("minisgl")), "gateway", "--port", "0", "--url", NOBODY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = process.stderr.readline().split()[3].removeprefix("http://").removesuffix("/v1")
            connection = HTTPConnection(address, timeout=60)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 503
            connection.close()
        finally:
            stop(process)
