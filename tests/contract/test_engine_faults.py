"""What the engine refuses at once, and faults that must end no more than their own request; on the toy model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError, ContextLengthError, InternalError, InvalidRequestError, SlipstreamError
from slipstream.types import Grid, MropeState, RequestId
from tests.support.engine_driver import Recorder, assert_empty, request, run
from tests.support.toy_engine import expected, image_prompt, make, picture, text
from tests.support.toy_model import IMAGE, VOCAB

# Faults --------------------------------------------------------------------------------------------------------------


def test_a_failing_step_fails_its_requests_and_the_engine_lives() -> None:
    bad = 59
    engine, _ = make(fail_on=bad, max_batch_tokens=12, max_running=3)
    good = [token for token in text(1, 10) if token != bad]
    engine.submit(request("bad", [1, 2, bad], 4))
    engine.submit(request("with", good, 1))
    engine.submit(request("later", good, 1))
    engine.reserve(request("reserved", good, 4))
    result = engine.step()
    assert {id.name for id, _ in result.failures} == {"bad", "with"}
    assert all(isinstance(error, InternalError) and "told to fail" in error.message for _, error in result.failures)
    assert result.events == ()
    engine.check_integrity()
    assert run(engine).tokens == {"later": expected(good, 1)}
    assert engine.abort(RequestId(name="reserved"))
    assert_empty(engine)


@pytest.mark.parametrize("method", ["begin", "allocated", "layer_done"])
def test_a_failing_publisher_fails_its_own_request_only(method: str) -> None:
    class Broken(Recorder):
        def __getattribute__(self, name: str) -> object:
            if name == method:
                raise OSError("the peer is gone")
            return super().__getattribute__(name)

    engine, _ = make()
    engine.submit(request("broken", text(1, 5), 2), (), Broken())
    engine.submit(request("fine", text(2, 5), 2))
    found = run(engine)
    assert set(found.failures) == {"broken"}
    assert found.tokens == {"fine": expected(text(2, 5), 2)}
    assert_empty(engine)


def test_images_that_cannot_be_encoded_fail_their_own_request_only() -> None:
    engine, model = make()

    def broken(pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        raise ValueError("no such picture")

    model.encode_images = broken  # type: ignore[method-assign]
    grids = [Grid(t=1, h=4, w=4)]
    tokens, pixels, _ = image_prompt(5, grids, [2, 3])
    engine.submit(request("image", tokens, 2, grids=grids), pixels)
    engine.submit(request("fine", text(2, 5), 2))
    found = run(engine)
    assert set(found.failures) == {"image"}
    assert found.tokens == {"fine": expected(text(2, 5), 2)}
    assert_empty(engine)


def test_logits_that_are_not_numbers_fail_their_own_request_only() -> None:
    engine, model = make()
    forward = model.forward

    def spoiled(*args: object, **more: object) -> torch.Tensor:
        logits = forward(*args, **more)  # type: ignore[arg-type]
        logits[0] = torch.nan
        return logits

    model.forward = spoiled  # type: ignore[method-assign]
    engine.submit(request("spoiled", text(1, 5), 1))
    engine.submit(request("fine", text(2, 5), 1))
    found = run(engine)
    assert "not finite" in found.failures["spoiled"].message
    assert found.tokens == {"fine": expected(text(2, 5), 1)}
    assert_empty(engine)


# What is refused at once ---------------------------------------------------------------------------------------------


GRID = Grid(t=1, h=4, w=4)


@pytest.mark.parametrize(("change", "error", "match"), [
    ({"tokens": []}, InvalidRequestError, "empty"),
    ({"tokens": [1, VOCAB]}, InvalidRequestError, f"{VOCAB} is not in the vocabulary"),
    ({"tokens": [-1, 1]}, InvalidRequestError, "-1 is not in the vocabulary"),
    ({"tokens": [1] * 400}, ContextLengthError, "400 tokens"),
    ({"tokens": [1] * 300, "max_tokens": 50}, ContextLengthError, "lower max_tokens"),
    ({"max_tokens": 0}, InvalidRequestError, "max_tokens"),
    ({"temperature": float("nan")}, InvalidRequestError, "temperature"),
    ({"temperature": float("inf")}, InvalidRequestError, "temperature"),
    ({"temperature": -0.1}, InvalidRequestError, "temperature"),
    ({"top_p": 0.0}, InvalidRequestError, "top_p"),
    ({"top_p": float("nan")}, InvalidRequestError, "top_p"),
    ({"tokens": [1, IMAGE, IMAGE, IMAGE], "grids": [GRID]}, InvalidRequestError, "holds 3 .* need 4"),
    ({"tokens": [1, IMAGE, IMAGE, IMAGE, IMAGE]}, InvalidRequestError, "holds 4 .* need 0"),
    ({"tokens": [1], "grids": [GRID]}, InvalidRequestError, "holds 0 .* need 4"),
])
def test_impossible_requests_are_refused(change: dict[str, object], error: type[SlipstreamError], match: str) -> None:
    engine, _ = make(kv_cache_tokens=320)
    fields = {"tokens": [1, 2, 3], "max_tokens": 4} | change
    pixels = [picture(1, 4, 4)] if "grids" in change else []
    with pytest.raises(error, match=match):
        engine.submit(request("r", **fields), pixels)  # type: ignore[arg-type]
    assert_empty(engine)
    if "grids" not in change and IMAGE not in fields["tokens"]:  # type: ignore[operator]
        with pytest.raises(error, match=match):
            engine.reserve(request("r", **fields))  # type: ignore[arg-type]
    engine.submit(request("r", [1, 2, 3], 1))
    assert run(engine).tokens == {"r": expected([1, 2, 3], 1)}


def test_images_that_disagree_with_their_grids_are_refused() -> None:
    engine, _ = make()
    tokens = [1, IMAGE, IMAGE, IMAGE, IMAGE, 2]
    for pixels, match in [([], "1 image grids and 0 images"), ([picture(1, 4, 6)], "needs uint8"),
                          ([picture(1, 4, 4).astype(np.float32)], "needs uint8")]:
        with pytest.raises(InvalidRequestError, match=match):
            engine.submit(request("r", tokens, grids=[GRID]), pixels)
    text_only, _ = make(vision=False)
    with pytest.raises(InvalidRequestError, match="text-only"):
        text_only.submit(request("r", tokens, grids=[GRID]), [picture(1, 4, 4)])
    assert_empty(engine)


def test_an_id_in_use_is_refused() -> None:
    engine, _ = make()
    engine.submit(request("r", [1, 2]))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.submit(request("r", [1, 2]))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.reserve(request("r", [1, 2]))


def test_commit_needs_a_reservation_that_goes_on() -> None:
    engine, _ = make()
    mrope = MropeState(delta=0, last_position=(1, 1, 1))
    with pytest.raises(InternalError, match="not known"):
        engine.commit(RequestId(name="r"), first_tokens=[1], mrope=mrope)
    engine.submit(request("waiting", [1, 2]))
    with pytest.raises(InternalError, match="waiting, not reserved"):
        engine.commit(RequestId(name="waiting"), first_tokens=[1], mrope=mrope)
    engine.abort(RequestId(name="waiting"))
    engine.reserve(request("r", [1, 2], 4, stop=[9]))
    with pytest.raises(InvalidRequestError, match="2 first tokens for 1 choices"):
        engine.commit(RequestId(name="r"), first_tokens=[1, 2], mrope=mrope)
    with pytest.raises(InternalError, match="nothing to decode"):
        engine.commit(RequestId(name="r"), first_tokens=[9], mrope=mrope)
    engine.abort(RequestId(name="r"))
    assert_empty(engine)


def test_a_pool_without_a_whole_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        make(kv_cache_tokens=3)
    with pytest.raises(ConfigError, match="max_running"):
        make(max_running=65)
