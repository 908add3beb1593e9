"""`python -m prefill`: one prefill replica, without Ray."""

from __future__ import annotations

import sys

from prefill.service import mount
from slipstream.types import Role
from worker.process import main

if __name__ == "__main__":
    sys.exit(main(Role.PREFILL, mount))
