"""Short ways to call the public gRPC API of a scripted router, without the client package's help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from router.inference import SERVICE
from slipstream_client.v1 import inference_pb2 as pb
from tests.support.scripted_router import SECRET, Front

REPLIES: dict[str, Any] = {"Generate": pb.GenerateResponse, "Chat": pb.ChatResponse, "Tokenize": pb.TokenizeResponse,
           "ListModels": pb.ListModelsResponse, "GetLoad": pb.GetLoadResponse}


class Stub:
    """Calls of the service by their names."""

    def __init__(self, router: Front, **options: int) -> None:
        self.channel = grpc.insecure_channel(router.grpc, [(f"grpc.{key}", value) for key, value in options.items()])

    def __call__(self, name: str, message: Any, **more: Any) -> Any:
        kind = self.channel.unary_stream if name in ("Generate", "Chat") else self.channel.unary_unary
        data = message if isinstance(message, bytes) else message.SerializeToString()
        call: Any = kind(f"/{SERVICE}/{name}", None, REPLIES[name].FromString)
        return call(data, **{"timeout": 20.0, **more})

    def read(self, name: str, message: Any, **more: Any) -> list[Any]:
        return list(self(name, message, **more))


def chat(*parts: Any, **fields: Any) -> pb.ChatRequest:
    said = [pb.Part(text=part) if isinstance(part, str) else part for part in parts or (SECRET,)]
    return pb.ChatRequest(**{"messages": [pb.Message(role=pb.ROLE_USER, parts=said)], **fields})


def text(messages: list[Any], choice: int = 0) -> str:
    return "".join(delta.text for message in messages for delta in message.deltas if delta.choice == choice)


def refused(ask: Callable[[], Any], code: grpc.StatusCode) -> tuple[grpc.RpcError, dict[str, Any]]:
    """The error, and its details by their names, as google's own library reads them."""
    with pytest.raises(grpc.RpcError) as caught:
        ask()
    error: Any = caught.value
    assert error.code() is code, error
    assert SECRET not in error.details()
    status = rpc_status.from_call(error)  # raises if status and details do not agree
    found = {}
    for detail in status.details:
        kind = getattr(error_details_pb2, detail.type_url.rpartition(".")[2])
        found[kind.__name__] = kind.FromString(detail.value)
    assert found["ErrorInfo"].domain == "slipstream"
    assert found["RequestInfo"].request_id
    return error, found
