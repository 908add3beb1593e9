"""API keys: who may use the router, and how much. Knows no HTTP beyond the header's text.

The file is TOML, a table for each client; it holds no key, only what SHA-256 makes of it:

    [keys.alice]
    sha256 = "..."               # printf %s "$KEY" | sha256sum
    weight = 2.0                 # share among those that wait
    max_in_flight = 8            # 0, the default of all limits: none
    requests_per_minute = 600
    tokens_per_minute = 200000
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.admission import ANYBODY, Client
from slipstream import typed
from slipstream.errors import AuthenticationError, ConfigError

_LIMITS = ("max_in_flight", "requests_per_minute", "tokens_per_minute")


class Keys:
    """Whose key is whose. Without a file everybody may come."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        """`clients`: by the SHA-256 of their keys, in hex."""
        self._clients = dict(clients)

    @property
    def wanted(self) -> bool:
        """False: everybody may come."""
        return bool(self._clients)

    def accepts(self, authorization: str) -> bool:
        """Whether this header is somebody's."""
        try:
            self.client(authorization)
        except AuthenticationError:
            return False
        return True

    def client(self, authorization: str | None) -> Client:
        """Who sent this `Authorization` header. Raises AuthenticationError."""
        if not self._clients:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("this router wants an API key: send `Authorization: Bearer KEY`")
        # A digest is looked up, not the key: how long that takes says nothing about a key.
        found = self._clients.get(hashlib.sha256(key.strip().encode()).hexdigest())
        if found is None:
            raise AuthenticationError("this router does not know the API key that was sent")
        return found


def load(path: str) -> Keys:
    """`path` empty: no keys. Raises ConfigError naming the file and what is wrong with it."""
    if not path:
        return Keys({})
    try:
        tables = tomllib.loads(Path(path).read_text()).get("keys")
    except (OSError, ValueError) as error:
        raise ConfigError(f"router.keys_file: cannot read {path}: {error}", field="router.keys_file") from error
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"router.keys_file: {path} holds no [keys.NAME]; without a key nobody could send a request",
                          field="router.keys_file")
    found: dict[str, Client] = {}
    for name, table in tables.items():
        digest, client = _client(path, name, table)
        if digest in found:
            raise ConfigError(f"{path}: keys.{name} and keys.{found[digest].name} have the same key", field="router.keys_file")
        found[digest] = client
    return Keys(found)


def _client(path: str, name: str, table: Any) -> tuple[str, Client]:
    fields = dict(table) if isinstance(table, dict) else {}
    digest = fields.pop("sha256", None)
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise ConfigError(f'{path}: keys.{name} needs sha256 = "64 hex digits", the digest of its key',
                          field="router.keys_file")
    if "name" in fields:
        raise ConfigError(f"{path}: keys.{name}.name: a client is called as its table is", field="router.keys_file")
    client: Client = typed.build(Client, fields | {"name": name}, f"keys.{name}", path)
    if bad := [key for key in _LIMITS if getattr(client, key) < 0]:
        raise ConfigError(f"{path}: keys.{name}.{bad[0]} must be at least 0", field="router.keys_file")
    if not 0 < client.weight < math.inf:
        raise ConfigError(f"{path}: keys.{name}.weight must be above 0", field="router.keys_file")
    return digest.lower(), client
