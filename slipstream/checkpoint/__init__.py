"""What a checkpoint folder declares (config.json and its neighbours); knows no tensor and no tokenizer."""

from slipstream.checkpoint.folder import DEMO, resolve
from slipstream.checkpoint.quantization import Quantization
from slipstream.checkpoint.reader import read
from slipstream.checkpoint.spec import (
    Checkpoint,
    ExpertConfig,
    ImageConfig,
    RopeConfig,
    RopeScaling,
    VideoConfig,
    VisionConfig,
    WindowConfig,
)

__all__ = ["DEMO", "Checkpoint", "ExpertConfig", "ImageConfig", "Quantization", "RopeConfig", "RopeScaling", "VideoConfig",
           "VisionConfig", "WindowConfig", "read", "resolve"]
