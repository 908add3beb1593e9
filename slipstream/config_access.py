"""The sections of the configuration that say who may talk to whom; knows no connection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """[security]: who may talk to our processes over gRPC (docs/security.md); without it, whoever reaches their ports. The
    files have to lie on every node."""

    token_file: str = ""
    """File with the token that all processes of the deployment share: 16 printable characters or more, without spaces."""
    tls_cert: str = ""
    """PEM file with this node's certificate and its chain. All three of `tls_cert`, `tls_key` and `tls_ca`, or none."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    tls_ca: str = ""
    """PEM file with the authorities that may sign the certificates of peers, servers and clients alike."""
    tls_server_name: str = ""
    """The name in the certificates of all processes; empty: each has the address at which it is reached."""
