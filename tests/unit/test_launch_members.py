"""Which processes a deployment has, what each is started with, and what is said when there is no room."""

from __future__ import annotations

import json

import pytest

from launch.members import check_room, child_environment, explain, members
from slipstream import config
from slipstream.errors import PlacementError


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
    assert options == {"--replica-id": "prefill-0", "--epoch": "4", "--listen": "127.0.0.1:0"}
    arguments = router.arguments(host="127.0.0.1", epoch=1, directory="127.0.0.1:9")
    assert arguments[0] == "router"
    assert arguments[-2:] == ["--directory", "127.0.0.1:9"]
    assert config.from_dict(json.loads(arguments[arguments.index("--config-json") + 1])) == made


def test_environment_has_one_kind_of_gpu_mask() -> None:
    amd = {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin", "RAY_JOB_ID": "1"}
    assert child_environment(amd, {"A": "b"}, ["1"]) == {"HIP_VISIBLE_DEVICES": "1", "PATH": "/bin", "A": "b"}
    nvidia = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "GPU_DEVICE_ORDINAL": "0"}
    assert child_environment(nvidia, {}, ["2", "3"]) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_environment_of_a_process_without_gpus_hides_them_all() -> None:
    got = child_environment({"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}, {}, [])
    assert got == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def test_a_second_mask_is_reported() -> None:
    with pytest.raises(PlacementError, match="ROCR_VISIBLE_DEVICES is set on this node"):
        child_environment({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, {}, ["0"])


def test_what_the_pool_says_wins() -> None:
    assert child_environment({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}, [])["OMP_NUM_THREADS"] == "4"


def test_explains_which_node_lacks_what() -> None:
    nodes = {"10.0.0.1": {"CPU": 64.0}, "10.0.0.2": {"CPU": 2.0, "GPU": 8.0}}
    text = explain("prefill-0", {"CPU": 4, "GPU": 2}, nodes, {})
    assert text == ("no node is large enough for prefill-0, which needs CPU 4, GPU 2 on one node: "
                    "node 10.0.0.1 has CPU 64, GPU 0, missing GPU 2; node 10.0.0.2 has CPU 2, GPU 8, missing CPU 2")


def test_explains_that_others_hold_the_room() -> None:
    text = explain("decode-1", {"CPU": 4}, {"10.0.0.1": {"CPU": 8.0}}, {"CPU": 3.0})
    assert text == ("decode-1 needs CPU 4 on one node, but what is free in the whole cluster is CPU 3: "
                    "the rest is reserved by others")


def test_room_of_a_machine_that_nobody_joins() -> None:
    wanted = members(config.load(None, ["pools.decode.cpus=3"]))
    check_room(wanted, 4.5, 0)
    with pytest.raises(PlacementError, match=r"router-0 needs CPU 0\.5 .* is CPU 0:"):
        check_room(wanted, 4, 0)
    with pytest.raises(PlacementError, match=r"large enough for decode-0, which needs CPU 3 .* has CPU 2, missing CPU 1"):
        check_room(wanted, 2, 0)
