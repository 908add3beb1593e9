"""Architecture name -> loaded model, with its capabilities checked against what the checkpoint declares. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels import dispatch
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.batch import ForwardBatch, LayerCache
from slipstream.layers.parallel import Communicator
from slipstream.models import qwen, weights
from slipstream.models.qwen import CausalLM


class LanguageModel(Protocol):
    """What the engine runs."""

    kernels: Kernels

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None = None, *,
                hidden: Tensor | None = None) -> Tensor | None:
        """Logits of `batch.logit_rows`, [R, vocab] float32, on tensor rank 0 of the last stage; `on_layer(i)` when layer i has
        written its caches; `hidden` of the stage before."""


@runtime_checkable
class VisionModel(Protocol):
    """A model that takes images implements this; one that does not refuses them."""

    def encode_images(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """uint8 [H, W, 3] images -> one [tokens, (1 + L) * hidden] each: the embedding, then L deepstack features."""


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def architectures() -> dict[str, type[CausalLM]]:
    """Every architecture that can be served, by its name in config.json."""
    return {kind.__name__: kind for kind in (
        qwen.Qwen2ForCausalLM, qwen.Qwen3ForCausalLM, qwen.Qwen3MoeForCausalLM, qwen.Qwen3NextForCausalLM,
        qwen.Qwen2VLForConditionalGeneration, qwen.Qwen2_5_VLForConditionalGeneration, qwen.Qwen3VLForConditionalGeneration,
        qwen.Qwen3VLMoeForConditionalGeneration,
        qwen.Qwen3_5ForCausalLM, qwen.Qwen3_5ForConditionalGeneration,
        qwen.Qwen3_5MoeForCausalLM, qwen.Qwen3_5MoeForConditionalGeneration)}


def dtype_of(name: str) -> torch.dtype:
    """Raises ConfigError for an unknown name."""
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, comm: Communicator | None = None,
         progress: weights.Progress | None = None, kernels: str = "reference") -> CausalLM:
    """Build and load the checkpoint's model, or the part of it that the rank of `comm` holds.

    `progress(done, total)` counts tensors; `kernels` names a backend of kernels.dispatch. Raises CheckpointError for an unknown
    architecture, for a capability that the class lacks and for a bad weight.
    """
    known = architectures()
    if checkpoint.architecture not in known:
        raise CheckpointError(f"{checkpoint.path} is a {checkpoint.architecture}; known: {', '.join(sorted(known))}")
    kind = known[checkpoint.architecture]
    _check_capabilities(kind, checkpoint)
    table = dispatch.choose(kernels)
    with torch.device("meta"):
        whole = kind(checkpoint, table)
        model = whole if comm is None else kind(checkpoint, table, comm)
    weights.load_into(model, whole, checkpoint.path, dtype=dtype, device=device, quantization=checkpoint.quantization,
                      progress=progress,
                      rename=lambda name: _rename(name, isinstance(model, VisionModel), checkpoint))
    return model.to(device).eval()


def _check_capabilities(kind: type[CausalLM], checkpoint: Checkpoint) -> None:
    """What the checkpoint declares, its class must do; found before any weight is read."""
    lacks = []
    if checkpoint.vision is not None and not issubclass(kind, VisionModel):
        lacks.append("a vision tower (the class has no encode_images)")
    if checkpoint.vision is not None and checkpoint.rope.mrope_section is None:
        lacks.append("pictures without M-RoPE (rope_parameters has no mrope_section)")
    if checkpoint.vision is not None and checkpoint.vision.deepstack and not kind.takes_deepstack:
        lacks.append("deepstack features (vision_config.deepstack_visual_indexes)")
    if checkpoint.vision is not None and (checkpoint.vision.windows is not None) != kind.takes_windows:
        lacks.append("windowed vision (vision_config.window_size)" if checkpoint.vision.windows is not None
                     else "vision without windows (vision_config.window_size)")
    if checkpoint.experts is not None and not kind.takes_experts:
        lacks.append("experts")
    if checkpoint.has_linear_layers and not kind.takes_linear_layers:
        lacks.append("linear-attention layers")
    if checkpoint.rope.mrope_section is not None and not kind.takes_mrope:
        lacks.append("M-RoPE (rope_parameters.mrope_section)")
    if lacks:
        raise CheckpointError(f"{checkpoint.path} declares what {kind.__name__} does not do: {'; '.join(lacks)}; "
                              "is `architectures` in config.json right?")


_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
             "model.visual.": "visual."}


def _rename(name: str, vision: bool, checkpoint: Checkpoint) -> str | None:
    """A name on disk, under any of the prefixes that Qwen checkpoints use. Left out are extra heads, an unused tower, and the
    frequencies that old files repeat."""
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
            break
    if name.startswith(("mtp.", "model.mtp.") if vision else ("mtp.", "model.mtp.", "visual.")) or name.endswith(".inv_freq"):
        return None
    return None if name.startswith("lm_head.weight") and checkpoint.tie_embeddings else name
