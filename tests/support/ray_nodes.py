"""A Ray cluster of several nodes on this machine, with GPUs and labels that are only counted, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
CODE = """
import json, sys, ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
folder, nodes = sys.argv[1], json.loads(sys.argv[2])
cluster = Cluster(initialize_head=False)
for number, node in enumerate(nodes):
    more = {"include_dashboard": False, "temp_dir": folder} if number == 0 else {}
    cluster.add_node(object_store_memory=80 << 20, **more | node)
ray._private.utils.write_ray_address(cluster.address, folder)  # as `ray start` does: there may be other clusters here
ray.init(address=cluster.address, log_to_driver=False)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip():
        cluster.add_node(object_store_memory=80 << 20, **json.loads(line))
        print("{}", flush=True)
        continue
    free = ray._private.state.available_resources_per_node()
    nodes = {one["Labels"].get("kind"): {key: free.get(one["NodeID"], {}).get(key, 0) for key in ("CPU", "GPU", "nic")}
             for one in ray.nodes() if one["Alive"]}
    groups = [one["name"].split("/")[2] for one in placement_group_table().values() if one["state"] != "REMOVED"]
    actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    print(json.dumps({"free": nodes, "groups": sorted(groups), "actors": sorted(actors)}), flush=True)
ray.shutdown()
cluster.shutdown()
"""


class RayNodes:
    """The cluster; nodes are known by their label `kind`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._line()

    def state(self) -> dict[str, Any]:
        """`free` resources by node, `groups` by member, names of `actors`."""
        return self._ask("")

    def add(self, **node: Any) -> None:
        """One node more."""
        self._ask(json.dumps(node))

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def until(self, **wanted: Any) -> None:
        """Wait until `state` says so: what has ended is given back a moment later."""
        deadline = time.monotonic() + 40
        while any((state := self.state())[key] != value for key, value in wanted.items()):
            assert time.monotonic() < deadline, state
            time.sleep(0.1)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def ray_nodes(nodes: Sequence[Mapping[str, Any]], python: str = sys.executable) -> Iterator[RayNodes]:
    """`nodes`: options of Cluster.add_node, the head's first. `python`: what the cluster's processes run."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        env = os.environ | OPEN | {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
        if python != sys.executable:
            env.pop("PYTHONPATH", None)
        process = subprocess.Popen([python, "-c", CODE, folder, json.dumps(nodes)], env=env, cwd=folder, start_new_session=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield RayNodes(process)
        finally:
            process.communicate(timeout=60)
