"""A client of Slipstream's gRPC API, sync and asyncio. Needs grpcio and protobuf, and nothing of the server."""

__version__ = "0.1.0"
