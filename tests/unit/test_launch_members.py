"""Which processes a deployment has, what each is started with, and what is said when there is no room."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from launch.members import Member, Node, check_geometries, check_room, child_environment, explain, members
from launch.serve import check_job
from slipstream import checkpoint as checkpoints
from slipstream import config
from slipstream.checkpoint import DEMO
from slipstream.errors import ConfigError, PlacementError


def test_members_of_a_deployment() -> None:
    made = config.load(None, ["pools.decode.replicas=2", "pools.decode.env.FLAG=on", "router.replicas=2", "engine.threads=3",
                              "pools.prefill.gpus=1"])
    found = members(made)
    assert [one.name for one in found] == ["prefill-0", "decode-0", "decode-1", "router-0", "router-1"]
    assert found[0].bundle == {"CPU": 1.0, "GPU": 1.0}
    assert found[1].bundle == {"CPU": 1.0}
    assert found[1].env == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive", "FLAG": "on"}
    assert [one.config.router.port for one in found[3:]] == [8000, 8001]


def test_any_free_port_stays_any_free_port() -> None:
    made = config.load(None, ["router.replicas=2", "router.port=0"])
    assert [one.config.router.port for one in members(made)[2:]] == [0, 0]


def test_arguments_carry_the_whole_configuration() -> None:
    made = config.load(None, ["engine.block_size=8"])
    worker, router = members(made)[0], members(made)[2]
    arguments = worker.arguments(host="127.0.0.1", epoch=4, directory="127.0.0.1:9")
    assert arguments[0] == "prefill"
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert options.pop("--config-json")
    assert options == {"--pool": "prefill", "--replica-id": "prefill-0", "--epoch": "4", "--listen": "127.0.0.1:0"}
    arguments = router.arguments(host="127.0.0.1", epoch=1, directory="127.0.0.1:9")
    assert arguments[0] == "router"
    assert arguments[-2:] == ["--directory", "127.0.0.1:9"]
    assert config.from_dict(json.loads(arguments[arguments.index("--config-json") + 1])) == made


def test_environment_has_one_kind_of_gpu_mask() -> None:
    amd = {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin", "RAY_JOB_ID": "1"}
    assert child_environment(amd, {"A": "b"}, ["1"]) == {"HIP_VISIBLE_DEVICES": "1", "PATH": "/bin", "A": "b"}
    nvidia = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "GPU_DEVICE_ORDINAL": "0"}
    assert child_environment(nvidia, {}, ["2", "3"]) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_the_mask_of_amd_is_that_of_every_ray_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY-03: older releases masked by ROCR; those from our minimum on set HIP, and a node of the other kind is refused."""
    amd = pytest.importorskip("ray._private.accelerators.amd_gpu").AMDGPUAcceleratorManager
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "ray>=2.50,<3" in project["optional-dependencies"]["ray"]
    for mask in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(mask, raising=False)
    amd.set_current_process_visible_accelerator_ids(["5"])
    assert child_environment(os.environ, {}, ["5"])["HIP_VISIBLE_DEVICES"] == "5"
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "5")
    with pytest.raises(PlacementError, match="use HIP_VISIBLE_DEVICES"):
        child_environment(os.environ, {}, ["5"])


def test_environment_of_a_process_without_gpus_hides_them_all() -> None:
    got = child_environment({"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}, {}, [])
    assert got == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def test_a_second_mask_is_reported() -> None:
    with pytest.raises(PlacementError, match="ROCR_VISIBLE_DEVICES is set on this node"):
        child_environment({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, {}, ["0"])


def test_what_the_pool_says_wins() -> None:
    assert child_environment({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}, [])["OMP_NUM_THREADS"] == "4"


def replica(*settings: str) -> Member:
    return members(config.load(None, [f"pools.decode.{setting}" for setting in ("role=decode", *settings)]))[1]


def test_explains_which_node_lacks_what() -> None:
    nodes = [Node(address="10.0.0.1", total={"CPU": 64.0}), Node(address="10.0.0.2", total={"CPU": 2.0, "GPU": 8.0})]
    text = explain(replica("cpus=4", "gpus=2"), nodes, {})
    assert text == ("no node is large enough for decode-0, which needs CPU 4, GPU 2 on one node: "
                    "node 10.0.0.1 has CPU 64, GPU 0, missing GPU 2; node 10.0.0.2 has CPU 2, GPU 8, missing CPU 2")


def test_explains_that_others_hold_the_room() -> None:
    text = explain(replica("cpus=4"), [Node(address="10.0.0.1", total={"CPU": 8.0})], {"CPU": 3.0})
    assert text == ("decode-0 needs CPU 4 on one node, but what is free in the whole cluster is CPU 3: "
                    "the rest is reserved by others")


def test_explains_which_stage_has_no_place() -> None:
    nodes = [Node(address="10.0.0.1", total={"CPU": 9.0, "GPU": 8.0}), Node(address="10.0.0.2", total={"CPU": 9.0, "GPU": 3.0})]
    wanted = ("gpus=1", "tp=4", "pp=3")
    assert explain(replica(*wanted), nodes, {}) == (
        "no node is left for stage 2 of decode-0, which needs CPU 4, GPU 4 on one node; there is room for 2 such: "
        "node 10.0.0.1 has CPU 9, GPU 8; node 10.0.0.2 has CPU 9, GPU 3, missing GPU 1")
    nodes[1] = Node(address="10.0.0.2", total={"CPU": 9.0, "GPU": 4.0})
    assert explain(replica(*wanted), nodes, {"CPU": 18.0, "GPU": 3.0}).startswith(
        "each of the 3 stages of decode-0 needs CPU 4, GPU 4 on one node, but what is free in the whole cluster is CPU 18,")


def test_explains_which_labels_and_resources_are_missing() -> None:
    nodes = [Node(address="10.0.0.1", total={"CPU": 9.0}, labels={"zone": "a"}),
             Node(address="10.0.0.2", total={"CPU": 9.0, "nic": 1.0})]
    assert explain(replica("labels.zone=b", "resources.nic=0.5", "tp=4"), nodes, {}) == (
        "no node is large enough for decode-0, which needs CPU 4, nic 2 on one node with label zone b: "
        "node 10.0.0.1 has CPU 9, nic 0 and label zone a, missing nic 2 and label zone b; "
        "node 10.0.0.2 has CPU 9, nic 1 and label zone none, missing nic 1 and label zone b")


@pytest.mark.parametrize(("wanted", "value", "fits"), [
    ("a", "a", True), ("a", "b", False), ("a", None, False), ("!a", "b", True), ("!a", "a", False), ("!a", None, True),
    ("in(a, b)", "b", True), ("in(a,b)", "c", False), ("!in(a,b)", "c", True), ("!in(a,b)", "b", False),
])
def test_labels_are_read_as_ray_reads_them(wanted: str, value: str | None, fits: bool) -> None:
    node = Node(address="10.0.0.1", total={"CPU": 1.0}, labels={"zone": value} if value else {})
    made = config.load(None, ["pools.decode.role=decode", f"pools.decode.labels.zone='{wanted}'"])
    assert ("reserved by others" in explain(members(made)[1], [node], {})) is fits


def test_ranks_of_a_replica() -> None:
    one = replica("tp=2", "pp=3", "cpus=0.1", "gpus=1", "resources.nic=0.5")
    assert (one.world, one.share) == (6, {"CPU": 0.1, "GPU": 1.0, "nic": 0.5})
    assert one.bundle == {"CPU": 0.2, "GPU": 2.0, "nic": 1.0}, "of one stage"
    arguments = one.arguments(host="10.0.0.1", epoch=4, directory="", rank=5, master="10.0.0.2:7")
    assert arguments[4:] == ["--pool", "decode", "--replica-id", "decode-0", "--epoch", "4", "--listen", "10.0.0.1:0",
                             "--rank", "5", "--world", "6", "--master", "10.0.0.2:7"]


@pytest.mark.parametrize("setting", ["tp=2", "pp=2", "stages=[3,5]", "cpus=2", "gpus=1", "labels.zone=a", "resources.nic=1",
                                     "env.A=b"])
def test_what_is_placed_or_cut_otherwise_is_not_adopted(setting: str) -> None:
    assert replica(setting).identity != replica().identity


def test_other_pools_and_numbers_of_replicas_do_not_matter_to_an_adoption() -> None:
    before = members(config.load(None))
    after = members(config.load(None, ["pools.decode.replicas=2", "pools.prefill.cpus=2", "ray.placement_seconds=1"]))
    assert [one.identity == other.identity for one, other in zip(before, (*after[:2], after[3]), strict=True)] == [
        False, True, True]


@pytest.mark.parametrize(("setting", "message"), [
    ("tp=3", r"pools.decode: tp 3 does not cut \S+ evenly .*; legal: 1, 2, 4"), ("pp=99", "pools.decode: pp must be 1 to 8"),
    ("expert_parallel=true", "pools.decode: expert_parallel: .* has no experts"),
    ("stages=[1,2]", r"pools.decode: stages \[1, 2\] must be 1 positive"),
])
def test_a_cut_that_the_model_does_not_allow_is_named_with_those_that_it_does(setting: str, message: str) -> None:
    made = config.load(None, ["pools.decode.role=decode", f"pools.decode.{setting}"])
    with pytest.raises(ConfigError, match=message):
        check_geometries(made, checkpoints.read(DEMO))


def test_a_ray_that_is_started_here_has_no_labels() -> None:
    with pytest.raises(PlacementError, match=r"decode-0 needs nodes with nic, zone \(pools.decode.labels, resources\)"):
        check_room([replica("labels.zone=a", "resources.nic=1")], 9, 0)


def test_room_of_a_machine_that_nobody_joins() -> None:
    wanted = members(config.load(None, ["pools.decode.cpus=3"]))
    check_room(wanted, 4.5, 0)
    with pytest.raises(PlacementError, match=r"router-0 needs CPU 0\.5 .* is CPU 0:"):
        check_room(wanted, 4, 0)
    check_room(members(config.load(None, ["pools.decode.pp=2"])), 3.5, 0)
    with pytest.raises(PlacementError, match=r"prefill-0 needs GPU 8 .* has 7 that PyTorch can use, 7 of them left"):
        check_room(members(config.load(None, ["pools.prefill.gpus=2", "pools.prefill.tp=4"])), 9, 7)
    with pytest.raises(PlacementError, match=r"large enough for decode-0, which needs CPU 3 .* has CPU 2, missing CPU 1"):
        check_room(wanted, 2, 0)


def test_a_child_imports_our_packages_from_where_its_host_does() -> None:
    assert "PYTHONPATH" not in child_environment({}, {}, [])
    assert child_environment({}, {}, [], "/job")["PYTHONPATH"] == "/job"
    assert child_environment({"PYTHONPATH": "/a:/b"}, {}, [], "/job")["PYTHONPATH"] == "/job:/a:/b"
    assert child_environment({"PYTHONPATH": "/a:/job"}, {}, [], "/job")["PYTHONPATH"] == "/a:/job"


def test_a_ray_job_has_to_join_and_hears_when_it_would_be_killed_while_it_drains() -> None:
    alone, joined = config.load(None), config.load(None, ["ray.address=auto"])
    assert check_job(alone, None) == ""
    with pytest.raises(ConfigError, match=r'set ray\.address to "auto"'):
        check_job(alone, 60.0)
    assert "kills this job after 3 s" in check_job(joined, 3.0)
    assert check_job(joined, 60.0) == ""


def test_a_machine_of_its_own_is_not_flooded_with_processes() -> None:
    check_room(members(config.load(None, ["pools.decode.replicas=62"])), 1024, 0)  # and a prefill replica, and a router
    with pytest.raises(PlacementError, match=r"65 processes on this machine, and ray\.max_processes allows 64"):
        check_room(members(config.load(None, ["pools.decode.replicas=63"])), 1024, 0)


@pytest.mark.parametrize("selector", ["a", "!a", "in(a,b)", "!in(a, b-1)", "mi300x_8.2"])
def test_labels_that_ray_understands_are_let_through(selector: str) -> None:
    made = config.load(None, [f"pools.decode.labels.zone='{selector}'"])
    assert made.pools["decode"].labels == {"zone": selector}
