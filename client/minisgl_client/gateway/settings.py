"""What an operator says of the gateway, resolved once. Keys come from the environment or a file: a command line can be
read by every user of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minisgl_backend.errors import ConfigError

KEYS_VARIABLE = "MINISGL_API_KEYS"
"""Keys, apart by commas or blanks."""

DEFAULT_PORT = 9000
BACKLOG = 2048  # connections that wait to be taken
MAX_BODY_BYTES = 8 << 20  # the engine takes 4 MiB of messages, 1 MiB of tools and 1 MiB of parameters


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Of one gateway."""

    url: str = "127.0.0.1:8001"  # Triton's gRPC
    metrics_url: str = ""  # Triton's, which are told at /metrics; empty: they are not
    model: str = "minisgl"  # its name in Triton
    served_name: str = ""  # its name in the API; empty: the same
    api_keys: tuple[str, ...] = ()  # one of them must come with each request of the API; none: all may ask
    hosts: tuple[str, ...] | None = None  # names it answers to, beside localhost and addresses; None: to all
    origins: tuple[str, ...] = ()  # whose pages may ask from a browser; "*": all
    max_body_bytes: int = MAX_BODY_BYTES
    timeout_s: float | None = None  # for a whole answer
    body_s: float = 60.0  # until the body of a request is whole
    engine_view: bool = True  # /engine tells what the engine does

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.model


def read_api_keys(file: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the file (one a line, lines that begin with # are comments) and of the environment.

    Raises ConfigError. No key is ever part of a message.
    """
    keys = environment.get(KEYS_VARIABLE, "").replace(",", " ").split()
    if KEYS_VARIABLE in environment and not keys:
        raise ConfigError(f"{KEYS_VARIABLE} is set and holds no key: unset it to serve without keys")
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of API keys can not be read: {error}") from None
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"the file of API keys {str(file)!r} holds no key")
        keys += found
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError("an API key must be made of printable ASCII characters without blanks")
    return tuple(dict.fromkeys(keys))
