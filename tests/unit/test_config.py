"""Configuration: files, overrides, and errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream import config
from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.types import Role

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.toml"
    path.write_text(text)
    return path


def test_nothing_given_is_one_replica_of_each_role() -> None:
    assert config.load(None) == Config()
    assert {name: (pool.role, pool.replicas) for name, pool in Config().pools.items()} == {
        "prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}


def test_file_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, '[engine]\nblock_size = 32\nthreads = 2\n[router]\nhost = "::1"\n')
    got = config.load(path, ["engine.threads=3", "router.port=0", "model.path=some/folder", "transfer.lease_seconds=2"])
    assert (got.engine.block_size, got.engine.threads) == (32, 3)
    assert (got.router.host, got.router.port) == ("::1", 0)
    assert got.model.path == "some/folder"
    assert got.transfer.lease_seconds == 2.0


def test_a_default_pool_can_be_changed_without_a_file() -> None:
    got = config.load(None, ["pools.decode.replicas=3", "pools.decode.env.FLAG=on", "pools.decode.env.N=4"])
    assert (got.pools["decode"].role, got.pools["decode"].replicas) == (Role.DECODE, 3)
    assert got.pools["decode"].env == {"FLAG": "on", "N": "4"}
    assert got.pools["prefill"].replicas == 1


def test_pools_of_a_file_replace_the_default_ones(tmp_path: Path) -> None:
    path = write(tmp_path, '[pools.p]\nrole = "prefill"\nreplicas = 2\n[pools.d]\nrole = "decode"\n')
    assert list(config.load(path).pools) == ["p", "d"]


@pytest.mark.parametrize(("override", "says"), [
    ("engine.blok_size=3", "did you mean engine.block_size?"),
    ("engin.block_size=3", "did you mean engine?"),
    ("pools.decode.replica=3", "did you mean pools.decode.replicas?"),
    ("router.zzz=1", "known keys: "),
    ("engine.block_size=big", "engine.block_size in the overrides must be a whole number, not 'big'"),
    ("engine.block_size=true", "must be a whole number, not True"),
    ("engine.block_size=0", "engine.block_size must be at least 1"),
    ("engine.max_running=2000", "must not exceed engine.max_batch_tokens (1024)"),
    ("transfer.parked_fraction=0.0", "must be in (0, 1]"),
    ("transfer.frame_bytes=33554433", "must be at most 32 MiB"),
    ("router.port=70000", "0 to 65535"),
    ("router.grpc.port=-2", "-1 to 65535"),
    ("router.grpc.prot=1", "did you mean router.grpc.port?"),
    ("pools.decode.role=encode", "must be one of prefill, decode"),
    ("pools.decode.replicas=0", "pools.decode.replicas: a deployment needs a decode replica, at least one"),
    ("pools.decode.role=prefill", "no pool has role decode; add one"),
    ("pools.decode.labels.zone='in(a'", "pools.decode.labels.zone: 'in(a' selects no label"),
    ("transfer.faults.drop=1.5", "transfer.faults.drop must be a share, 0 to 1, not 1.5"),
    ("transfer.faults.delay_seconds=-1", "transfer.faults.delay_seconds must be at least 0"),
    ("transfer.faults.bytes_per_second=-0.5", "transfer.faults.bytes_per_second must be at least 0, not -0.5"),
    ("transfer.stall_seconds=0", "transfer.stall_seconds must be above 0, not 0"),
    ("transfer.stall_seconds=inf", "transfer.stall_seconds in the overrides must be finite, not inf"),
    ("transfer.faults.corrupt=nan", "transfer.faults.corrupt in the overrides must be finite, not nan"),
    ("transfer.lease_seconds=0", "transfer.lease_seconds must be above 0, not 0"),
    ("transfer.connect_seconds=-1", "transfer.connect_seconds must be above 0, not -1"),
    ("transfer.image_store_bytes=-1", "transfer.image_store_bytes must be at least 0, not -1"),
    ("transfer.rdma.quarantine_seconds=-1", "transfer.rdma.quarantine_seconds must be at least 0, not -1"),
    ("transfer.rdma.engine=nixxl", "transfer.rdma.engine must be one of auto, nixl, mooncake, not 'nixxl'; did you mean nixl?"),
    ("engine.kv_dtype=fp8_e4m2",
     "engine.kv_dtype must be one of auto, fp8_e4m3, not 'fp8_e4m2'; did you mean fp8_e4m3?"),
    ("transfer.channel=gprc", "transfer.channel must be one of auto, local, rdma, grpc, not 'gprc'; did you mean grpc?"),
    ("transfer.channel=x", "transfer.channel must be one of auto, local, rdma, grpc, not 'x'"),
    ("pools.decode.tp=0", "pools.decode.tp must be at least 1, not 0"),
    ("pools.decode.cpus=0", "pools.decode.cpus must be at least 0.0001, not 0"),
    ("pools.decode.stages=[3,true]", "pools.decode.stages in the overrides must be a whole number, not True"),
    ("pools.decode.stages=3", "pools.decode.stages in the overrides must be a list, not 3"),
    ("pools.decode.resources.GPU=3", "GPU is reserved with cpus and gpus"),
    ("pools.router.role=decode", "is not `router`"),
    ("pools.a/b.role=decode", "a-z, 0-9 and inner dashes"),
    ("engine.block_size", "write it as section.key=value"),
    ("router.port.x=1", "router.port in the overrides must be a whole number"),
])
def test_errors_say_what_is_wrong(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, [override])
    assert says in str(caught.value)


def test_a_file_that_cannot_be_read_or_parsed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.toml: No such file"):
        config.load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"deployment\.toml is not valid TOML"):
        config.load(write(tmp_path, "[engine\n"))


def test_plain_values_make_the_same_configuration_again() -> None:
    made = config.load(None, ["engine.block_size=8", "pools.more.role=decode", "pools.more.env.A=1", "ray.cpus=2",
                              "pools.more.stages=[3,5]", "pools.more.labels.zone=a", "pools.more.resources.nic=1"])
    assert config.from_dict(json.loads(json.dumps(config.to_dict(made)))) == made


def test_scaled_is_the_same_with_other_numbers() -> None:
    made = config.load(None, ["pools.decode.tp=2"])
    assert config.scaled(made, {"decode": 3}) == config.load(None, ["pools.decode.tp=2", "pools.decode.replicas=3"])
    with pytest.raises(ConfigError, match="there is no pool 'x'; pools: prefill, decode"):
        config.scaled(made, {"x": 1})
    with pytest.raises(ConfigError, match="needs a decode replica"):
        config.scaled(made, {"decode": 0})


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    config.load(path)


def test_every_key_has_a_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    for section, values in config.to_dict(Config()).items():
        keys = values["prefill"] if section == "pools" else values
        assert f"## `[{section}" in page
        for key in keys:
            assert f"| `{key}` |" in page, f"{section}.{key}"
