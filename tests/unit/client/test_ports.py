"""Ports are checked before anything slow begins."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from minisgl_client.server.errors import ServeError
from minisgl_client.server.ports import claimed_ports

HOST = "127.0.0.1"
IP_LOCAL_PORT_RANGE = 51  # linux/in.h: from which a socket that binds to port 0 is given one


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def test_zero_becomes_a_free_port_and_each_another_one() -> None:
    with claimed_ports(HOST, {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0}) as ports:
        assert list(ports) == ["--http-port", "--grpc-port", "--metrics-port"]
        assert len(set(ports.values())) == 3
    with claimed_ports(HOST, ports) as again:
        assert again == ports


def test_a_claimed_port_is_the_servers_and_nobodys_who_takes_any_free_one() -> None:
    with claimed_ports(HOST, {"--http-port": 0}) as ports, socket.socket() as other, socket.socket() as server:
        (port,) = ports.values()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
        except OSError:
            pytest.skip("Linux before 6.3 can not be told which ports a socket may be given")
        with pytest.raises(OSError, match="in use"):
            other.bind((HOST, 0))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, port))
        server.listen()
        with socket.create_connection((HOST, port)):
            server.accept()[0].close()


def test_a_port_in_use_is_named_with_its_option(taken: int) -> None:
    with (
        pytest.raises(ServeError, match=rf"port {taken} \(--grpc-port\) is in use"),
        claimed_ports(HOST, {"--http-port": 0, "--grpc-port": taken}),
    ):
        pass


def test_one_port_for_two_services_is_refused() -> None:
    with claimed_ports(HOST, {"--http-port": 0}) as ports:
        (free,) = ports.values()
    with (
        pytest.raises(ServeError, match=rf"port {free} \(--grpc-port\) is in use"),
        claimed_ports(HOST, {"--http-port": free, "--grpc-port": free}),
    ):
        pass


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "..."])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with (
        pytest.raises(ServeError, match="no address of this machine"),
        claimed_ports(host, {"--http-port": 0}),
    ):
        pass
