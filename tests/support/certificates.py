"""A certificate authority and what it signs, as files and as overrides of `[security]`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

NAME = "slipstream.internal"
TOKEN = "a-token-that-only-tests-use"


def token_file(folder: Path, token: str = TOKEN) -> Path:
    """With a line end, as an editor leaves it."""
    path = folder / f"{token}.token"
    path.write_text(f"{token}\n")
    return path


class Authority:
    """One CA; every certificate that it signs is for NAME and for nothing else."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self._ca = trustme.CA()
        self.ca = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def settings(self, *, expired: bool = False) -> dict[str, str]:
        """The keys of `[security]` for a process with a certificate of its own."""
        kind = "expired" if expired else "good"
        now, day = datetime.now(UTC), timedelta(days=1)
        made = self._ca.issue_cert(NAME, not_before=now - 2 * day, not_after=now - day if expired else now + day)
        cert, key = self._folder / f"{self._name}-{kind}.crt", self._folder / f"{self._name}-{kind}.key"
        cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(self.ca), "tls_server_name": NAME}


def overrides(**keys: str) -> list[str]:
    """For `--set`."""
    return [f"security.{key}={value}" for key, value in keys.items()]
