"""Architecture name -> loaded model, whose class declares what it can do and has to prove it. Knows no scheduler."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels import dispatch
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.batch import DraftCache, ForwardBatch, LayerCache
from slipstream.layers.gated_delta import GatedDeltaNet
from slipstream.layers.moe import SparseMLP
from slipstream.layers.parallel import Communicator
from slipstream.models import weights
from slipstream.models.mtp import Predictor
from slipstream.models.qwen import CausalLM
from slipstream.types import LinearLayer


class LanguageModel(Protocol):
    """What the engine runs."""

    kernels: Kernels

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None = None, *,
                hidden: Tensor | None = None, on_scored: Callable[[Tensor], None] | None = None) -> Tensor | None:
        """Logits of `batch.logit_rows`, [R, vocab] float32, on tensor rank 0 of the last stage, without the last
        `batch.scored`: those go to `on_scored`, in order and in pieces. `on_layer(i)` when layer i has written its caches;
        `hidden` of the stage before."""


@runtime_checkable
class VisionModel(Protocol):
    """A model that takes images implements this; one that does not refuses them."""

    def encode_images(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """uint8 [H, W, 3] images and [F, H, W, 3] videos (F frames, a multiple of the temporal patch) -> one
        [tokens, (1 + L) * hidden] each: the embedding, then L deepstack features."""


@runtime_checkable
class DraftingModel(Protocol):
    """A model that drafts tokens (multi-token prediction) implements this."""

    def draft(self, tokens: Tensor, hidden: Tensor, before: Tensor, block_tables: Tensor, rows: Tensor, cache: DraftCache
              ) -> tuple[Tensor, Tensor]:
        """One draft for each of E sequences, and the output to go on from: see qwen.draft."""


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Something that a checkpoint may need of its class."""

    flag: str
    """The class attribute that declares it, once among a class and its bases."""
    needs: str
    """What config.json has then, in its words."""
    needed: Callable[[Checkpoint], bool]
    proof: Callable[[Any, Any], bool]
    """Whether a model that was built for such a checkpoint has the parts."""
    method: str = ""
    """What a class has if, and only if, it declares the capability."""


def _count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


CAPABILITIES = (
    Capability(flag="takes_pictures", needs="a vision tower (vision_config)", needed=lambda c: c.vision is not None,
               proof=lambda m, c: m.visual is not None, method="encode_images"),
    Capability(flag="takes_deepstack", needs="deepstack features (vision_config.deepstack_visual_indexes)",
               needed=lambda c: c.vision is not None and bool(c.vision.deepstack),
               proof=lambda m, c: len(m.visual.deepstack_merger_list) == len(c.vision.deepstack)),
    Capability(flag="takes_windows", needs="windowed vision (vision_config.window_size)",
               needed=lambda c: c.vision is not None and c.vision.windows is not None,
               proof=lambda m, c: m.visual.windows == c.vision.windows),
    Capability(flag="takes_experts", needs="experts", needed=lambda c: c.experts is not None,
               proof=lambda m, c: _count(m, SparseMLP) == len(c.experts.layers)),
    Capability(flag="takes_linear_layers", needs="linear-attention layers", needed=lambda c: c.has_linear_layers,
               proof=lambda m, c: _count(m, GatedDeltaNet) == sum(isinstance(layer, LinearLayer) for layer in c.layers)),
    Capability(flag="takes_mrope", needs="M-RoPE (rope_parameters.mrope_section)",
               needed=lambda c: c.rope.mrope_section is not None,
               proof=lambda m, c: m.model.rotary.axes.bincount(minlength=3).tolist() == list(c.rope.mrope_section)),
    Capability(flag="drafts", needs="multi-token prediction (speculative.tokens)", needed=lambda c: c.draft is not None,
               proof=lambda m, c: _count(m, Predictor) == 1, method="draft"),
)


CLASSES = {
    "qwen": ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
             "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
             "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
             "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
}
"""What can be served: files of this folder, and their classes, which are called as config.json calls the architectures."""


def architectures() -> dict[str, type[CausalLM]]:
    """Every architecture that can be served, by its name in config.json."""
    return by_name(*(getattr(importlib.import_module(f"slipstream.models.{file}"), name)
                     for file, names in CLASSES.items() for name in names))


def by_name(*kinds: type[CausalLM]) -> dict[str, type[CausalLM]]:
    """Raises ConfigError for a class that declares something twice, or without the method, or the other way round, and for two
    classes of one name."""
    found = {kind.__name__: kind for kind in kinds}
    if len(found) < len(kinds):
        raise ConfigError(f"two model classes have one name: {', '.join(sorted(kind.__name__ for kind in kinds))}")
    for kind in kinds:
        for what in CAPABILITIES:
            owners = [base.__name__ for base in kind.__mro__ if vars(base).get(what.flag)]
            if len(owners) > 1:
                raise ConfigError(f"{kind.__name__} declares {what.flag} twice: in {' and in '.join(owners)}")
            if what.method and callable(getattr(kind, what.method, None)) != bool(owners):
                raise ConfigError(f"{kind.__name__} declares {what.flag} but has no method {what.method}" if owners else
                                  f"{kind.__name__} has the method {what.method} but does not declare {what.flag}")
    return found


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
    _prove(whole, checkpoint)
    if checkpoint.draft is not None and not any("mtp." in name for name in weights.files_of(checkpoint.path)):
        raise CheckpointError(f"{checkpoint.path} has no mtp.* weights, which drafting needs; set speculative.tokens to 0")
    weights.load_into(model, whole, checkpoint.path, dtype=dtype, device=device, quantization=checkpoint.quantization,
                      progress=progress,
                      rename=lambda name: _rename(name, isinstance(model, VisionModel), checkpoint))
    return model.to(device).eval()


def _check_capabilities(kind: type[CausalLM], checkpoint: Checkpoint) -> None:
    """What the checkpoint declares, its class must do; found before any weight is read."""
    lacks = []
    if checkpoint.vision is not None and checkpoint.rope.mrope_section is None:
        lacks.append("pictures without M-RoPE (rope_parameters has no mrope_section)")
    if kind.takes_windows and checkpoint.vision is not None and checkpoint.vision.windows is None:
        lacks.append("vision without windows (vision_config.window_size)")
    lacks += [what.needs for what in CAPABILITIES if what.needed(checkpoint) and not getattr(kind, what.flag)]
    if lacks:
        raise CheckpointError(f"{checkpoint.path} declares what {kind.__name__} does not do: {'; '.join(lacks)}; "
                              "is `architectures` in config.json right?")


def _prove(model: CausalLM, checkpoint: Checkpoint) -> None:
    """What the class declares and the checkpoint needs must be in the model; found before any weight is read."""
    for what in CAPABILITIES:
        if not what.needed(checkpoint):
            continue
        try:
            proved = what.proof(model, checkpoint)
        except (AttributeError, TypeError):  # not even the part that would show it
            proved = False
        if not proved:
            raise CheckpointError(f"{checkpoint.path} declares {what.needs}; {type(model).__name__} declares {what.flag}, but "
                                  "does not implement it")


_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
             "model.visual.": "visual.", "language_model.": "model.",  # from here on: what a model without its head is saved as
             "layers.": "model.layers.", "embed_tokens.": "model.embed_tokens.", "norm.": "model.norm."}


def _rename(name: str, vision: bool, checkpoint: Checkpoint) -> str | None:
    """A name on disk, under any of the prefixes that Qwen checkpoints use. Left out are an unused tower, an unused
    layer that drafts, a tied head, and the frequencies that old files repeat."""
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
            break
    name = name.removeprefix("model.") if name.startswith("model.mtp.") else name
    unused = (*(() if checkpoint.draft is not None else ("mtp.",)), *(() if vision else ("visual.",)))
    if name.startswith(unused) or name.endswith(".inv_freq"):
        return None
    return None if name.startswith("lm_head.weight") and checkpoint.tie_embeddings else name
