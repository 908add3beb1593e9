"""Checkpoints and their cuts, case by case: names on disk, what each rank holds, what a published config.json says.

Case numbers are those of tests/CASES.md.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from launch.members import members
from launch.placement import Host
from slipstream import checkpoint as checkpoints
from slipstream import config, sharding
from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError
from slipstream.kernels import reference
from slipstream.layers.parallel import Alone
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from slipstream.rpc.server import split_address
from slipstream.sharding import Geometry, Shard, heads_of
from slipstream.types import AttentionLayer, LinearLayer
from tests.support import ranks, tiny
from tests.support.plain import Plain
from tests.support.small import hybrid_checkpoint, random_model, sparse_checkpoint
from worker.entries import Up
from worker.link import Leader

CPU = torch.device("cpu")


def load(checkpoint: Checkpoint, shard: Shard | None = None) -> CausalLM:
    comm = Alone(len(checkpoint.layers))
    if shard is not None:
        comm.shard = shard
    return registry.load(checkpoint, dtype=torch.float32, device=CPU, comm=comm)


# Names ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text_tied", "qwen3_tied_vl", "qwen2_5_vl"])
def test_what_a_model_without_its_head_is_saved_as(name: str, tmp_path: Path) -> None:
    """LD-01: transformers' base class has no `model.`: `layers.0.`, or `language_model.layers.0.` beside `visual.`. Embedding
    models are published like that under the name of the whole class, whose head is the embedding."""
    checkpoint = checkpoints.read(tiny.write(name, tmp_path))
    expected = dict(load(checkpoint).named_parameters())
    whole: Any = getattr(transformers, checkpoint.architecture).from_pretrained(tmp_path)
    whole.base_model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    first = {key.partition(".")[0] for key in tensors}
    assert first == ({"language_model", "visual"} if "vl" in name else {"embed_tokens", "layers", "norm"})
    if not checkpoint.tie_embeddings:
        with pytest.raises(CheckpointError, match=r"lacks 1 weights: lm_head\.weight"):
            load(dataclasses.replace(checkpoint, path=tmp_path / "base"))
        save_file(tensors | {"lm_head.weight": whole.lm_head.weight.detach()}, tmp_path / "base" / "model.safetensors")
    found = dict(load(dataclasses.replace(checkpoint, path=tmp_path / "base")).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


# What a rank holds ------------------------------------------------------------------------------------------------------


def on_disk(folder: Path, checkpoint: Checkpoint) -> Checkpoint:
    made = dataclasses.replace(checkpoint, path=folder)
    save_file({name: each.detach() for name, each in random_model(made).named_parameters()}, folder / "model.safetensors")
    return made


def stages(checkpoint: Checkpoint, *layers: int) -> list[dict[str, Tensor]]:
    geometry = sharding.plan(checkpoint, tp=1, pp=len(layers), stages=layers)
    return [dict(load(checkpoint, Shard(geometry=geometry, rank=rank)).named_parameters()) for rank in range(len(layers))]


def dense(count: int, tied: bool = False) -> Checkpoint:
    small = hybrid_checkpoint()
    return dataclasses.replace(
        small, architecture="Qwen3ForCausalLM", tie_embeddings=tied, rope=dataclasses.replace(small.rope, mrope_section=None),
        layers=tuple(AttentionLayer(name=f"layers.{i}", kv_heads=2, head_size=16) for i in range(count)))


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last(tied: bool, tmp_path: Path) -> None:
    """LD-04, LD-05: of four; what the two in the middle hold is their layers. A tied head is a copy."""
    checkpoint = on_disk(tmp_path, dense(4, tied))
    found = stages(checkpoint, 1, 1, 1, 1)
    ends = [{name for name in part if ".layers." not in name} for part in found]
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    assert ends == [{embedding}, set(), set(), {norm, embedding if tied else "lm_head.weight"}]
    whole = sum(each.nbytes for each in load(checkpoint).parameters())
    table = 40 * 32 * 4
    assert sum(each.nbytes for part in found for each in part.values()) == whole + tied * table
    if tied:
        assert torch.equal(found[0][embedding], found[3][embedding])


def test_a_stage_holds_half_of_the_experts_bytes(tmp_path: Path) -> None:
    """LD-06: of two stages; the other one's experts are neither wanted nor held."""
    small = sparse_checkpoint()
    assert small.experts is not None
    checkpoint = on_disk(tmp_path, dataclasses.replace(
        small, layers=tuple(AttentionLayer(name=f"layers.{i}", kv_heads=2, head_size=16) for i in range(4)),
        experts=dataclasses.replace(small.experts, layers=frozenset(range(4)))))
    parts = [{name: each for name, each in part.items() if ".layers." in name} for part in stages(checkpoint, 2, 2)]
    assert [{name.split(".")[2] for name in part} for part in parts] == [{"0", "1"}, {"2", "3"}]
    sizes = [sum(each.nbytes for each in part.values()) for part in parts]
    assert sizes[0] == sizes[1]
    assert any(".experts." in name for name in parts[1])


@pytest.mark.parametrize(("count", "pp"), [(30, 4), (7, 2), (21, 2), (48, 5)])
def test_no_layer_is_lost_where_stages_do_not_divide(count: int, pp: int) -> None:
    """LD-14, LD-15."""
    geometry = sharding.plan(dense(count), tp=1, pp=pp)
    held = [i for rank in range(pp) for i in Shard(geometry=geometry, rank=rank).layers]
    assert held == list(range(count))
    assert max(geometry.stages) - min(geometry.stages) <= 2
    assert len(geometry.stages) == pp


def test_more_ranks_than_kv_heads_share_them_with_their_neighbours(tmp_path: Path) -> None:
    """LD-13: 4 heads on 8 ranks: rank r has head r // 2, whole."""
    assert [list(heads_of(4, 8, rank)) for rank in range(8)] == [[rank // 2] for rank in range(8)]
    small = dense(1)
    checkpoint = on_disk(tmp_path, dataclasses.replace(
        small, num_heads=8, layers=(AttentionLayer(name="layers.0", kv_heads=4, head_size=8),)))
    name = "model.layers.0.self_attn.{}_proj.weight"
    whole = dict(load(checkpoint).named_parameters())
    for rank in range(8):
        own = dict(load(checkpoint, Shard(geometry=Geometry(tp=8, stages=(1,)), rank=rank)).named_parameters())
        for part, head in (("k", rank // 2), ("v", rank // 2), ("q", rank)):
            assert torch.equal(own[name.format(part)], whole[name.format(part)][8 * head : 8 * head + 8]), (rank, part)


# What is published ------------------------------------------------------------------------------------------------------

TEXT_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "intermediate_size": 17408,
    "vocab_size": 248320, "eos_token_id": 248044, "full_attention_interval": 4, "attn_output_gate": True,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish", "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "mrope_interleaved": True,
                        "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}}
SPARSE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "linear_num_value_heads": 32, "intermediate_size": None, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
VISION: dict[str, Any] = {
    "model_type": "qwen3_5", "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3}
TOP: dict[str, Any] = {"language_model_only": False, "image_token_id": 248056, "video_token_id": 248057,
                       "vision_start_token_id": 248053, "vision_end_token_id": 248054, "tie_word_embeddings": False}


def published(folder: Path, architecture: str, text: dict[str, Any]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({
        **TOP, "architectures": [architecture], "text_config": {key: value for key, value in text.items() if value is not None},
        "vision_config": {**VISION, "out_hidden_size": text["hidden_size"]}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    return checkpoints.read(folder)


def test_qwen3_5_as_it_is_published(tmp_path: Path) -> None:
    """Facts of the 27B model: keys that transformers drops are read or do no harm; <|im_end|> is generation_config.json's."""
    found = published(tmp_path, "Qwen3_5ForConditionalGeneration", TEXT_27B)
    kinds = [type(layer) for layer in found.layers]
    assert kinds == ([LinearLayer] * 3 + [AttentionLayer]) * 16
    assert found.layers[0] == LinearLayer(name="layers.0", key_heads=16, value_heads=48, key_head_size=128,
                                          value_head_size=128, conv_width=4)
    assert found.layers[3] == AttentionLayer(name="layers.3", kv_heads=4, head_size=256)
    assert (found.rope.rotary_size, found.rope.mrope_section, found.rope.mrope_interleaved) == (64, (11, 11, 10), True)
    assert (found.rope.theta, sorted(found.eos_token_ids), found.dtype) == (1e7, [248044, 248046], "bfloat16")
    assert (found.image_token_id, found.tie_embeddings, found.vision and found.vision.deepstack) == (248056, False, ())
    assert found.video is not None
    assert found.image is not None
    assert (found.image.min_pixels, found.image.max_pixels, found.image.mean) == (65536, 16777216, (0.5, 0.5, 0.5))
    with pytest.raises(CheckpointError, match="output_gate_type 'sigmoid' is not supported; known: swish"):
        published(tmp_path, "Qwen3_5ForConditionalGeneration", {**TEXT_27B, "output_gate_type": "sigmoid"})


def test_qwen3_5_with_experts_as_it_is_published(tmp_path: Path) -> None:
    """Facts of the 35B-A3B model: no intermediate_size, no norm_topk_prob, and weights that add up to 1 all the same."""
    found = published(tmp_path, "Qwen3_5MoeForConditionalGeneration", {**TEXT_27B, **SPARSE})
    experts = found.experts
    assert experts is not None
    assert (experts.count, experts.top_k, experts.intermediate_size, experts.shared_size) == (256, 8, 512, 512)
    assert (experts.normalise, len(experts.layers), found.intermediate_size) == (True, 40, 0)


# Numbers ----------------------------------------------------------------------------------------------------------------


def test_norms_round_where_transformers_rounds() -> None:
    """Facts: 1 + w in float32 and one rounding; plain w after the rounding; the gate in float32 after that. To the bit."""
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(64, 96, generator=generator).bfloat16() for _ in range(3))
    weight = weight[0]

    def theirs(norm: Any, *args: Tensor) -> Tensor:
        norm = norm.bfloat16()
        norm.weight.data.copy_(weight)
        result: Tensor = norm(x, *args)
        return result

    ours = {kind: reference.rms_norm(x, weight, 1e-6, kind) for kind in (True, False)}
    assert torch.equal(ours[True], theirs(Qwen3_5RMSNorm(96)))
    assert torch.equal(ours[False], theirs(Qwen3RMSNorm(96)))
    normed = (x.float() / (x.float().square().mean(-1, True) + 1e-6).sqrt()).bfloat16()
    assert not torch.equal((1 + weight) * normed, ours[True])
    assert torch.equal(reference.gated_rms_norm(x, gate, weight, 1e-6), theirs(Qwen3_5RMSNormGated(96), gate))


def test_odds_of_experts_are_those_of_float32() -> None:
    """Facts: softmax in float32 over all experts, then the likeliest, then to 1, then one rounding."""
    logits = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    odds, chosen = logits.float().softmax(-1).topk(4, -1)
    found, weights = reference.top_experts(logits, 4, True)
    assert torch.equal(found, chosen)
    assert torch.equal(weights, (odds / odds.sum(-1, keepdim=True)).bfloat16())


def test_the_same_chunks_give_the_same_bits_after_a_handoff(tmp_path: Path) -> None:
    """Facts: states that are written down and read again are the states; another cut into chunks is only near."""
    checkpoint = checkpoints.read(tiny.write("qwen3_5_text", tmp_path))
    model = load(checkpoint)
    tokens = torch.randint(0, 490, (101,), generator=torch.Generator().manual_seed(1)).tolist()

    def answered(chunk: int, handed: bool) -> Tensor:
        of = Plain(model=model, checkpoint=checkpoint)
        of.prefill(tokens, chunk=chunk)
        if handed:
            held = [tensor for cache in of.caches for tensor in ranks.tensors_of(cache)]
            save_file({str(i): tensor for i, tensor in enumerate(held)}, tmp_path / "state")
            for name, tensor in load_file(tmp_path / "state").items():
                held[int(name)].zero_().copy_(tensor)
        return torch.stack([of.decode(token) for token in (5, 6, 7)])

    here = answered(70, False)
    assert torch.equal(answered(70, True), here)
    other = answered(33, False)
    assert not torch.equal(other, here)
    torch.testing.assert_close(other, here, rtol=1e-5, atol=1e-5)


# Ports ------------------------------------------------------------------------------------------------------------------


def test_ranks_that_start_together_never_share_a_port() -> None:
    """KV-21: eight replicas, twenty times; between the choice of a port and its use nobody else gets it."""
    names = [one.title(rank) for one in members(config.load(None, ["pools.prefill.role=prefill", "pools.prefill.tp=4"]))
             for rank in range(one.world)]
    assert len(set(names)) == len(names)
    for _ in range(20):
        hosts = [Host(f"r{number}", "") for number in range(8)]
        masters = [split_address(host.reserved_address("127.0.0.1")) for host in hosts]
        assert len(set(masters)) == 8
        for address in masters:
            with socket.socket() as other, pytest.raises(OSError, match="in use") as taken:
                other.bind(address)
            assert taken.value.errno == errno.EADDRINUSE
        leaders: list[Leader[Any, Up]] = [Leader(*address, world=2, epoch=1, fingerprint="same", up=Up) for address in masters]
        for leader, (_, port) in zip(leaders, masters, strict=True):
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                assert leader.port == port
            leader.close()
