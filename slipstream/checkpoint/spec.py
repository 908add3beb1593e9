"""What a model is: everything that a checkpoint's configuration files say and that we use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.checkpoint.quantization import Quantization
from slipstream.errors import ConfigError
from slipstream.types import AttentionLayer, DraftLayer, LayerSpec, LinearLayer, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches positions beyond those that the model was trained on."""

    kind: str
    """`linear`: all frequencies; `yarn` and `llama3`: the slow ones, with a passage to the fast ones."""
    factor: float
    original_context: int
    """Positions that the model was trained on."""
    slow: float = 1.0
    """Turns in the original context below which a frequency is slow (beta_slow, low_freq_factor)."""
    fast: float = 32.0
    """Turns above which it is fast (beta_fast, high_freq_factor)."""
    truncate: bool = True
    """YaRN's passage begins and ends at whole frequencies."""
    attention: float = 1.0
    """What cos and sin are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of the language model."""

    theta: float
    rotary_size: int
    """Leading channels of a head that are rotated; the rest passes through."""
    mrope_section: tuple[int, int, int] | None
    """Frequency pairs driven by t, h, w; None: one-dimensional positions."""
    mrope_interleaved: bool
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts."""

    count: int
    top_k: int
    """Experts of each token."""
    intermediate_size: int
    """Of each expert."""
    shared_size: int
    """Intermediate size of the expert that every token takes; 0: there is none."""
    normalise: bool
    """The weights of a token's experts add up to 1."""
    layers: frozenset[int]
    """The layers that have experts; the others are dense."""


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """Attention inside windows of a picture (Qwen2.5-VL)."""

    side: int
    """Merged patches along each side of a window."""
    full_blocks: frozenset[int]
    """Blocks that attend to the whole picture all the same."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower (Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5)."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    """Of the learned square table; 0 in Qwen2-VL and Qwen2.5-VL, where positions are rotary alone."""
    in_channels: int
    deepstack: tuple[int, ...]
    """Blocks whose outputs are merged too: that of the i-th is added to the language model's hidden states after layer i."""
    windows: WindowConfig | None


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Image preprocessing (preprocessor_config.json)."""

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """Pixels per merged patch: both sides of a resized image are multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Video preprocessing (video_preprocessor_config.json): a video is a list of frames."""

    min_pixels: int
    max_pixels: int
    """Of all frames together with `timestamps`, else of each frame."""
    temporal_patch_size: int
    """Frames of a group, which share their tokens."""
    timestamps: bool
    """Each group of frames is a grid of its own behind its time as text (Qwen3-VL, Qwen3.5); else a video is one grid."""
    tokens_per_second: float | None
    """Positions on the t axis; None: one for each group of frames."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that config.json, generation_config.json and preprocessor_config.json say and that we use."""

    path: Path
    architecture: str
    dtype: str
    """Of the weights on disk that are not quantised: `float32`, `bfloat16` or `float16`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense layers; 0: there are none."""
    experts: ExpertConfig | None
    num_heads: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool
    attention_bias: bool
    max_context: int
    eos_token_ids: frozenset[int]
    sampling: SamplingParams
    """generation_config.json: how tokens are drawn for a request that does not say; temperature 0 with `do_sample: false`."""
    vision: VisionConfig | None
    image: ImageConfig | None
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None
    video: VideoConfig | None = None
    quantization: Quantization | None = None
    """None: every weight is stored as it is."""

    @property
    def draft(self) -> DraftLayer | None:
        """The last of `layers`, if it drafts."""
        last = self.layers[-1]
        return last if isinstance(last, DraftLayer) else None

    @property
    def depth(self) -> int:
        """Layers that every token passes: all but the one that drafts."""
        return len(self.layers) - (self.draft is not None)

    def drafting(self) -> Checkpoint:
        """With one layer more, which drafts: attention as in the others, and the MLP or experts of the first. Raises
        ConfigError for a model that has none."""
        attention = next((layer for layer in self.layers if isinstance(layer, AttentionLayer)), None)
        if not self.has_linear_layers or attention is None:  # Qwen3.5 and Qwen3-Next have it, and they alone are hybrid
            raise ConfigError(f"speculative.tokens: {self.architecture} has no multi-token prediction; set it to 0",
                              field="speculative.tokens")
        layer = DraftLayer(name="mtp.layers.0", kv_heads=attention.kv_heads, head_size=attention.head_size,
                           hidden_size=self.hidden_size)
        experts = self.experts
        if experts is not None and 0 in experts.layers:
            experts = replace(experts, layers=experts.layers | {len(self.layers)})
        return replace(self, layers=(*self.layers, layer), experts=experts)

    @property
    def has_linear_layers(self) -> bool:
        """True for hybrid models: a sequence then owns a state slot beside its blocks."""
        return any(isinstance(layer, LinearLayer) for layer in self.layers)

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Of the dense layers, of the experts and of the shared expert, as far as there are any."""
        experts = self.experts
        sizes = (self.intermediate_size, *((experts.intermediate_size, experts.shared_size) if experts else ()))
        return tuple(size for size in sizes if size)

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """None: the layer is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None
