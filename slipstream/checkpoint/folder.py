"""Where a checkpoint's files are: a folder, the demo, the hub cache; and what a JSON file among them holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError

DEMO = Path(__file__).parent.parent / "demo_model"
"""The demo checkpoint that ships inside the product."""

_HUB_ID = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(@(?P<revision>[\w.-]+))?")


def resolve(path: str, hub_cache: Path) -> Path:
    """`model.path` of the configuration as a folder.

    `demo` names the checkpoint inside the product; what is no folder may be a hub id, `owner/name` or `owner/name@revision`,
    whose files lie in the local hub cache. Nothing is downloaded. Raises CheckpointError that says what to download.
    """
    if path == "demo":
        return DEMO
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id is None:
        raise CheckpointError(f"{path} is no folder; give model.path a checkpoint folder, or a hub id such as Qwen/Qwen3-0.6B")
    repository = hub_cache / f"models--{hub_id['owner']}--{hub_id['name']}"
    revision = hub_id["revision"] or "main"
    ref = repository / "refs" / revision
    snapshot = repository / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    name = f"{hub_id['owner']}/{hub_id['name']}"
    if not snapshot.is_dir():
        raise CheckpointError(f"{path} is neither a folder nor in the hub cache at {hub_cache}; download it first: "
                              f"hf download {name} --revision {revision}")
    if not (snapshot / "config.json").exists() or not any(snapshot.glob("*.safetensors")):
        raise CheckpointError(f"the hub cache holds only a part of {path} ({snapshot} lacks config.json or *.safetensors); "
                              f"download the rest: hf download {name} --revision {revision}")
    return snapshot


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """A file's object; one that is not `required` and does not exist is empty. Raises CheckpointError."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        if required:
            raise CheckpointError(f"{path} does not exist; give model.path a checkpoint folder with a config.json") from error
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return data
