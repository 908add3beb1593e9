"""Measurements of Slipstream, each one a ratio to a peer or to a limit that was measured in the same run.

Not part of the product and not in its wheel: `slipstream bench` finds it in a checkout.
"""

from __future__ import annotations

SUITES = ("wire", "bytes", "overlap", "parallel", "layout", "load", "routing")
"""In the order in which `all` runs them; each is the module of its name, with `run(quick) -> Result`."""
