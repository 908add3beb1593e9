"""Multi-token prediction in plain torch, by the reference's convention: pair i is token i + 1 beside the output for token i, at
position i, and attends to pairs 0 to i. No pages, no states, no chunks. And its weights, for a tiny checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from tests.support import oracle

MTP = "mtp."


def add(folder: Path, seed: int = 0, prefix: str = MTP) -> Path:
    """Random `mtp.*` weights beside those that are there; experts a matrix each, however the other layers' lie."""
    checkpoint = checkpoints.read(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    hidden, layer = checkpoint.hidden_size, checkpoint.drafting().draft
    assert layer is not None
    heads, size = checkpoint.num_heads, layer.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden), "norm.weight": (hidden,), "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,)}
    inner: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,), "self_attn.q_proj": (2 * heads * size, hidden),
        "self_attn.k_proj": (layer.kv_heads * size, hidden), "self_attn.v_proj": (layer.kv_heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size)}
    experts = checkpoint.experts
    mlps = {"mlp": checkpoint.intermediate_size}
    if experts is not None:
        mlps = {f"mlp.experts.{e}": experts.intermediate_size for e in range(experts.count)}
        mlps["mlp.shared_expert"] = experts.shared_size
        inner |= {"mlp.gate": (experts.count, hidden), "mlp.shared_expert_gate": (1, hidden)}
    for stem, wide in mlps.items():
        inner |= {f"{stem}.{name}_proj": (wide, hidden) for name in ("gate", "up")}
        inner[f"{stem}.down_proj"] = (hidden, wide)
    shapes |= {f"layers.0.{name}.weight": shape for name, shape in inner.items()}
    for name, shape in shapes.items():
        scale = 0.1 if len(shape) == 1 else 0.06
        weights[prefix + name] = torch.randn(shape, generator=generator) * scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_easy(folder: Path) -> Path:
    """The same for a model whose next token depends mostly on the last one alone, as what the layer drafts does: many drafts
    are right, and some are wrong."""
    add(folder)
    weights = load_file(folder / "model.safetensors")
    stem = next(name for name in weights if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")) and "visual" not in name:
            tensor *= 0.0 if name.startswith(MTP) else 0.1
    hidden = len(weights["mtp.norm.weight"])
    weights["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), -1)
    weights["mtp.pre_fc_norm_embedding.weight"].zero_()
    weights["mtp.norm.weight"] = weights[stem + "norm.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Reference:
    """What the layer makes of one whole text."""

    @torch.no_grad()
    def __init__(self, folder: Path, tokens: Sequence[int], pixels: Sequence[oracle.Pixels] = (), prefix: str = MTP) -> None:
        """Hidden states, embeddings (pictures in place) and rotation are taken from transformers' own run."""
        self.checkpoint = checkpoints.read(folder)
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix(prefix): value.float() for name, value in weights.items() if name.startswith(prefix)}
        model = oracle.model(folder)
        text = getattr(model.model, "language_model", model.model)
        seen: dict[str, Any] = {}
        hooks = [
            text.layers[0].register_forward_pre_hook(lambda module, given: seen.update(embeds=given[0][0])),
            text.norm.register_forward_hook(lambda module, given, out: seen.update(hidden=out[0])),
            text.rotary_emb.register_forward_pre_hook(lambda module, given, more: seen.update(
                positions=more.get("position_ids", given[-1])), with_kwargs=True)]
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        self.logits = model(**oracle.inputs(folder, tokens, pixels)).logits[0]
        for hook in hooks:
            hook.remove()
        self.head, self.table = model.lm_head.weight, text.embed_tokens.weight
        self.positions = seen["positions"]  # [.., T]: of one axis, or three
        self.hidden, self.embeds, self.rotary = seen["hidden"], seen["embeds"], text.rotary_emb

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.checkpoint.rms_norm_eps) * (1 + self.weights[name])

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (each[0] for each in self.rotary(x, positions))
        size = cos.shape[-1]
        first, second = x[..., :size].chunk(2, -1)
        turned = x[..., :size] * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
        return torch.cat((turned, x[..., size:]), -1)

    @torch.no_grad()
    def outputs(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """[n, hidden] after the last norm, for pairs 0 to n - 1."""
        w, c = self.weights, self.checkpoint
        joined = torch.cat((self._norm(embeds, "pre_fc_norm_embedding.weight"),
                            self._norm(hidden, "pre_fc_norm_hidden.weight")), -1)
        x = joined @ w["fc.weight"].T
        stem = "layers.0.self_attn."
        normed = self._norm(x, "layers.0.input_layernorm.weight")
        n, size = len(x), w[stem + "q_norm.weight"].shape[0]
        query, gate = (normed @ w[stem + "q_proj.weight"].T).view(n, c.num_heads, 2 * size).chunk(2, -1)
        key, value = ((normed @ w[f"{stem}{name}_proj.weight"].T).view(n, -1, size) for name in ("k", "v"))
        query = self._rotated(self._norm(query, stem + "q_norm.weight"), positions)
        key = self._rotated(self._norm(key, stem + "k_norm.weight"), positions)
        groups = c.num_heads // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value) * gate.sigmoid()
        x = x + mixed.reshape(n, -1) @ w[stem + "o_proj.weight"].T
        return self._norm(x + self._mlp(self._norm(x, "layers.0.post_attention_layernorm.weight")), "norm.weight")

    def _mlp(self, x: Tensor) -> Tensor:
        w, experts = self.weights, self.checkpoint.experts

        def glu(stem: str, rows: Tensor) -> Tensor:
            up = F.silu(rows @ w[stem + ".gate_proj.weight"].T) * (rows @ w[stem + ".up_proj.weight"].T)
            return up @ w[stem + ".down_proj.weight"].T

        if experts is None:
            return glu("layers.0.mlp", x)
        likely, chosen = (x @ w["layers.0.mlp.gate.weight"].T).softmax(-1).topk(experts.top_k, -1)
        likely = likely / likely.sum(-1, keepdim=True)
        out = (x @ w["layers.0.mlp.shared_expert_gate.weight"].T).sigmoid() * glu("layers.0.mlp.shared_expert", x)
        for row in range(len(x)):
            for weight, expert in zip(likely[row], chosen[row].tolist(), strict=True):
                out[row] = out[row] + weight * glu(f"layers.0.mlp.experts.{expert}", x[row : row + 1])[0]
        return out

    @torch.no_grad()
    def drafts(self, length: int, then: Sequence[int] = ()) -> Tensor:
        """Logits of the draft after the first `length` tokens of the text (2 or more), the last of which has not passed the
        model yet; `then`: behind them other drafts."""
        embeds, hidden, positions = self.embeds[1:length], self.hidden[: length - 1], self.positions[..., : length - 1]
        for token in then:
            out = self.outputs(embeds, hidden, positions)[-1:]
            embeds, hidden = torch.cat((embeds, self.table[token : token + 1])), torch.cat((hidden, out))
            positions = torch.cat((positions, positions[..., -1:] + 1), -1)
        logits: Tensor = self.outputs(embeds, hidden, positions)[-1] @ self.head.T
        return logits
