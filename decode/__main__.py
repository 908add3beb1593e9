"""`python -m decode`: one decode replica, without Ray."""

from __future__ import annotations

import sys

from decode.service import mount
from slipstream.types import Role
from worker.process import main

if __name__ == "__main__":
    sys.exit(main(Role.DECODE, mount))
