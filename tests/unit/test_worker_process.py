"""What a worker tells others about itself: its address, its weights' fingerprint, its errors on the wire."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Never
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream import errors
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.rpc import convert
from slipstream.types import FinishReason, Grid, Role, SamplingParams, StopParams
from slipstream.v1 import worker_pb2 as pb
from worker.process import advertised, main
from worker.revision import weights_revision


@pytest.mark.parametrize(("listening", "advertise", "told"), [
    ("127.0.0.1:4000", "", "127.0.0.1:4000"),
    ("[::1]:4000", "", "[::1]:4000"),
    ("0.0.0.0:4000", "10.1.2.3", "10.1.2.3:4000"),
    ("[::]:4000", "fd00::7", "[fd00::7]:4000"),
    ("[::]:4000", "[fd00::7]:9", "[fd00::7]:9"),
    ("0.0.0.0:4000", "host.example:81", "host.example:81"),
])
def test_what_is_advertised(listening: str, advertise: str, told: str) -> None:
    assert advertised(listening, advertise) == told


@pytest.mark.parametrize(("listening", "advertise"), [("0.0.0.0:1", ""), ("[::]:1", ""), ("127.0.0.1:1", "0.0.0.0"), ("x", "")])
def test_an_address_that_nobody_can_connect_to_is_refused(listening: str, advertise: str) -> None:
    with pytest.raises(ConfigError):
        advertised(listening, advertise)


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_taken_port_is_named_before_anything_is_loaded(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    def mount(*_: object) -> Never:
        raise AssertionError("it got as far as serving")

    with (socket.create_server(("127.0.0.1", 0)) as taken, patch("worker.process.Replica", side_effect=AssertionError),
          patch("slipstream.observability.logs.configure")):
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(Role.DECODE, mount, [flag, address]) == 2
    assert f"cannot listen on {address}: Address already in use" in caplog.text
    assert f"choose another {flag}," in caplog.text


def write(folder: Path, value: float, config: str = "{}") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    weights = np.zeros((512, 512), dtype=np.float32)
    weights[-1, -1] = value
    save_file({"w": weights}, folder / "model.safetensors")
    return weights_revision(folder)


def test_the_fingerprint_follows_contents_not_places(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 1.0)
    assert one == write(tmp_path / "b", 1.0)
    assert one != write(tmp_path / "c", 2.0), "the same shapes with other values are other weights"
    assert one != write(tmp_path / "d", 1.0, json.dumps({"rope_theta": 1}))


ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SlipstreamError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_a_code_and_comes_back_as_its_kind_or_a_parent(kind: type[SlipstreamError]) -> None:
    failed = convert.failed_to_pb(3, 1, kind("why", retry_after_seconds=0.0004))
    assert (failed.handle, failed.attempt, failed.message, failed.retry_after_ms) == (3, 1, "why", 1)
    back = convert.failed_from_pb(failed)
    if failed.code != pb.ERROR_CODE_INTERNAL:
        assert back.http_status // 100 == kind.http_status // 100 or failed.code == pb.ERROR_CODE_BUSY
    assert back.message == "why"


@pytest.mark.parametrize("kind", [
    errors.InvalidRequestError, errors.BusyError, errors.UnavailableError, errors.DeadlineError, errors.CancelledError,
    errors.LeaseExpiredError, errors.IncompatibleError, errors.InternalError, errors.ContextLengthError])
def test_errors_with_a_code_of_their_own_survive_the_wire(kind: type[SlipstreamError]) -> None:
    assert type(convert.failed_from_pb(convert.failed_to_pb(1, 0, kind("x")))) is kind


def test_requests_survive_the_wire() -> None:
    stop = StopParams(max_tokens=5, stop_token_ids=frozenset({9, 4}), ignore_eos=True)
    submit = pb.Submit()
    convert.stop_to_pb(stop, submit)
    assert convert.stop_from_pb(submit) == stop
    sampling = SamplingParams(temperature=0.5, top_p=0.25, seed=2**64 - 1)
    assert convert.sampling_from_pb(convert.sampling_to_pb(sampling)) == sampling
    assert convert.sampling_from_pb(convert.sampling_to_pb(SamplingParams(top_p=5e-324))).top_p < 1e-6, "not off"
    assert convert.image_from_pb(convert.image_to_pb(bytes(16), Grid(t=1, h=4, w=6))) == (bytes(16), Grid(t=1, h=4, w=6))
    assert [convert.role_from_pb(convert.role_to_pb(role)) for role in Role] == list(Role)
    assert [convert.finish_from_pb(convert.finish_to_pb(reason)) for reason in FinishReason] == list(FinishReason)
    assert convert.finish_from_pb(pb.FINISH_REASON_UNSPECIFIED) is None
