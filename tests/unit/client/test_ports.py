"""Ports are checked before anything slow begins."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from minisgl_client.server.errors import ServeError
from minisgl_client.server.ports import claim_ports

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def test_zero_becomes_a_free_port_and_each_another_one() -> None:
    ports = claim_ports(HOST, {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0})
    assert list(ports) == ["--http-port", "--grpc-port", "--metrics-port"]
    assert len(set(ports.values())) == 3
    assert claim_ports(HOST, ports) == ports  # free again


def test_a_port_in_use_is_named_with_its_option(taken: int) -> None:
    with pytest.raises(ServeError, match=rf"port {taken} \(--grpc-port\) is in use"):
        claim_ports(HOST, {"--http-port": 0, "--grpc-port": taken})


def test_one_port_for_two_services_is_refused() -> None:
    (free,) = claim_ports(HOST, {"--http-port": 0}).values()
    with pytest.raises(ServeError, match=rf"port {free} \(--grpc-port\) is in use"):
        claim_ports(HOST, {"--http-port": free, "--grpc-port": free})


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "..."])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ServeError, match="no address of this machine"):
        claim_ports(host, {"--http-port": 0})
