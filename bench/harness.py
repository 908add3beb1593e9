"""What every suite has in common: interleaved rounds, medians, CPU seconds, ratios, the record of a run. Knows no method."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import SUITES
from slipstream.errors import ConfigError, InternalError

RESULTS = Path(__file__).parent / "results"
PACKAGES = "grpcio", "numpy", "torch", "nixl-cu12", "mooncake-transfer-engine-non-cuda"

Row = Mapping[str, str | float]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One move of bytes."""

    bytes: int
    seconds: float
    cpu_seconds: float
    """Of both processes."""

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second."""
        return self.bytes / self.seconds / 1e9

    @property
    def cpu_per_gib(self) -> float:
        """CPU seconds per 2^30 bytes."""
        return self.cpu_seconds / (self.bytes / 2**30)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of one suite: what `--json` prints and what is stored."""

    name: str
    rows: Sequence[Row]
    ratios: Mapping[str, float]
    """"ours/other" to a number."""
    command: str = ""
    machine: str = field(default_factory=lambda: machine())
    load: tuple[float, float] = (0.0, 0.0)
    """Average load of the machine over a minute, before and after: what else ran."""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=lambda: versions())


def rounds(methods: Mapping[str, Callable[[], Sample]], count: int) -> dict[str, list[Sample]]:
    """Every method once a round, each round from another one on, so that what else the machine does meets all of them."""
    names = list(methods)
    found: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(count):
        turn = number * (len(names) // max(1, count) + 1) % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            found[name].append(methods[name]())
    return found


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians, and the spread of the speed: (fastest - slowest) / median."""
    speeds = [sample.gigabytes_per_second for sample in samples]
    middle = statistics.median(speeds)
    return {"gb_per_second": middle, "cpu_seconds_per_gib": statistics.median(sample.cpu_per_gib for sample in samples),
            "spread": (max(speeds) - min(speeds)) / middle}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours / theirs: what slowed a whole round down cancels out."""
    if not ours or len(ours) != len(theirs):
        raise InternalError(f"{len(ours)} rounds of one side and {len(theirs)} of the other")
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def cpu_clock(pid: int) -> float:
    """CPU seconds that a process of this machine has used, all its threads together, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3): the kernel's scheduler clock of that process


def machine() -> str:
    """Processor, cores, memory and kernel."""
    fields = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    model = next((value.strip() for name, value in fields.items() if name.strip() == "model name"), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def versions() -> dict[str, str]:
    """Of what is measured and of the libraries under it; a package that is missing is left out."""
    found = {"slipstream": importlib.metadata.version("slipstream")}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table(result: Result) -> Table:
    """For people."""
    shown = Table(title=f"{result.name}: {result.machine}, {result.date}, load {result.load[0]:.2f} to {result.load[1]:.2f}")
    columns = list(dict.fromkeys(name for row in result.rows for name in row))
    for column in columns:
        shown.add_column(column.replace("_", " "), justify="left" if column in ("method", "workload", "model") else "right")
    for row in result.rows:
        shown.add_row(*(_cell(row.get(column, "")) for column in columns))
    return shown


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}"


def store(result: Result, folder: Path = RESULTS) -> Path:
    """Keep it under its name; an older one goes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return path


def run(name: str, console: Console, *, quick: bool, as_json: bool) -> None:
    """Run a suite, or `all`: print its table, store it unless it was a quick one, and end with its JSON line.

    Raises ConfigError for a name that there is not.
    """
    if name != "all" and name not in SUITES:
        raise ConfigError(f"there is no bench {name!r}; there are {', '.join(SUITES)} and all")
    for suite in SUITES if name == "all" else (name,):
        before = os.getloadavg()[0]
        found: Result = importlib.import_module(f"bench.{suite}").run(quick)
        command = f"slipstream bench {suite}{' --quick' if quick else ''}"
        result = Result(**{**vars(found), "command": command, "load": (before, os.getloadavg()[0])})
        if not as_json:
            console.print(table(result))
            for ratio, value in result.ratios.items():
                console.print(f"{ratio}: {value:.3g}")
        if not quick:
            store(result)
        if as_json:
            print(json.dumps(asdict(result)), flush=True)
