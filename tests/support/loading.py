"""Moves what one engine has cached of a prompt into the cache of another, as a decode and a prefill replica do."""

from __future__ import annotations

import dataclasses

from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.types import RequestId
from tests.support.engine_driver import copy_state


def load(source: Engine, target: Engine, asked: GenerationRequest) -> int:
    """How many tokens of the prompt are cached at the target now because the source had them; 0: nothing was lent."""
    asked = dataclasses.replace(asked, id=RequestId(name=f"{asked.id.name}~load"))
    lent = source.lend(asked)
    source.check_integrity()
    if lent is None:
        return 0
    landing = target.borrow(asked, lent.have_tokens)
    if landing is not None:
        copy_state(source, lent.blocks, lent.state_slot, target, landing, lent.have_tokens)
        assert target.keep(asked.id) <= lent.have_tokens
    assert source.abort(asked.id)
    source.check_integrity()
    target.check_integrity()
    return lent.have_tokens if landing is not None else 0
