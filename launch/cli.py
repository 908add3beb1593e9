"""The `slipstream` command. Each command imports what it needs when it runs, so that `--help` is immediate."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import slipstream
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.config import Config

app = typer.Typer(name="slipstream", help="Serve Qwen models with prefill and decode in separate processes.",
                  no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML configuration file; docs/config.md lists every key.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override one value; may be repeated.")]
Model = Annotated[str | None, typer.Option("--model", help="A checkpoint folder, or a hub id in the local hub cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the router says, as JSON.")]
Url = Annotated[str, typer.Option("--url", help="Where a router listens.")]
Key = Annotated[str, typer.Option("--api-key", envvar="SLIPSTREAM_API_KEY", show_default=False, show_envvar=True,
                                  help="For a router that wants one (router.keys_file).")]

DEFAULT_URL = "http://127.0.0.1:8000"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {slipstream.__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True,
                                                   callback=_version)] = False) -> None:
    pass


def main() -> None:
    """Entry point: failures of ours are one paragraph on stderr and exit status 2 (configuration) or 1, never a traceback."""
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except SlipstreamError as error:
        _fail(error, 1)


@app.command()
def demo(
    config: ConfigFile = None,
    model: Annotated[str, typer.Option(help="demo, which ships with the product, or smollm2, which speaks English and is "
                                            "fetched and converted once.")] = "demo",
    set_: Overrides = None,
) -> None:
    """Ask a small deployment three questions.

    Starts one prefill, one decode and one router process (or what --config says), checks the answers and shuts down.
    """
    from rich.console import Console

    from launch import demo, serve, smollm2
    from slipstream.config import user_cache
    from slipstream.typed import check_name

    console = Console()
    check_name(model, ("demo", "smollm2"), "--model")
    # Any free port and a name of its own: a demo must not collide with a deployment that is up.
    fixed, asked = ["router.port=0", f"ray.deployment=demo-{os.getpid()}"], demo.questions()
    if model == "smollm2":
        folder = smollm2.provide(user_cache(), lambda text: typer.echo(f"smollm2: {text}"))
        fixed += [f"model.path={json.dumps(str(folder))}", "engine.kv_cache_tokens=8192"]
        asked = demo.questions(model)
    settings = _config(config, [*fixed, *(set_ or [])])
    raise typer.Exit(_with_ray(lambda: serve.run(settings, console, demo.Demo(console, asked).run)))


@app.command("serve")
def serve_(config: ConfigFile = None, model: Model = None, set_: Overrides = None) -> None:
    """Keep a deployment up until Ctrl-C.

    The first Ctrl-C or SIGTERM drains, the second one stops at once.
    """
    from rich.console import Console

    from launch import serve
    from slipstream.config import ray_job_stop_seconds

    named = [f"model.path={model}"] if model is not None else []
    settings = _config(config, [*named, *(set_ or [])])
    console = Console()
    if warning := serve.check_job(settings, ray_job_stop_seconds()):
        console.print(warning, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(_with_ray(lambda: serve.run(settings, console, serve.until_stopped)))


@app.command()
def status(
    url: Url = DEFAULT_URL,
    kernels: Annotated[bool, typer.Option("--kernels", help="Show what runs for each operation, and why.")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Show who holds how many KV blocks and state slots.")] = False,
    json_: AsJson = False,
    key: Key = "",
) -> None:
    """Show replicas, health and load. Exit status 1 when the deployment takes no requests."""
    from launch import client
    from launch.status import show

    fields = client.get(url, "/status?detail=1" if kernels or ledger else "/status", key=key)
    problem = client.health(url)
    show(url, fields, problem, kernels=kernels, ledger=ledger, as_json=json_)
    raise typer.Exit(1 if problem else 0)


@app.command()
def transfers(url: Url = DEFAULT_URL, json_: AsJson = False, key: Key = "") -> None:
    """Show the transfers in flight between prefill and decode replicas, and how far they are."""
    from launch import client
    from launch.transfers import show

    show(client.get(url, "/status?detail=transfers", key=key), as_json=json_)


@app.command()
def explain(request_id: Annotated[str, typer.Argument(help="Of a recent request: x-request-id, the answer's id, or that of the "
                                                      "log.")],
            url: Url = DEFAULT_URL, json_: AsJson = False) -> None:
    """Show which replicas a request was given, why those, and what became of it."""
    from urllib.parse import quote

    from launch import client
    from launch.explain import show

    show(client.get(url, f"/explain/{quote(request_id)}"), as_json=json_)


@app.command()
def chat(
    text: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[list[Path] | None, typer.Option("--image", help="A PNG, JPEG or WebP file; may be repeated.")] = None,
    url: Url = DEFAULT_URL,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show latencies and bytes moved, on stderr.")] = False,
    key: Key = "",
) -> None:
    """Ask one question and stream the answer to stdout."""
    from launch import client

    answer = client.Answer()
    messages = [client.user_message(text, image or [])]
    for piece in client.stream_chat(url, messages, answer, max_tokens=max_tokens, temperature=temperature, key=key):
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
    if verbose:
        from launch.demo import measures

        typer.echo(measures(answer), err=True)


@app.command()
def scale(
    replicas: Annotated[list[str], typer.Argument(metavar="POOL=N...", help="How many replicas pools are to have.")],
    url: Url = DEFAULT_URL,
    supervisor: Annotated[str, typer.Option(help="Address of the supervisor; not given: the router knows it.")] = "",
    config: ConfigFile = None,
    set_: Overrides = None,
    key: Key = "",
) -> None:
    """Give pools of a running deployment other numbers of replicas, and wait for it.

    What comes has to serve before anything goes; what goes drains first. No request is lost. Ending this command ends the
    wait, not the scaling.
    Of the configuration only [security] is used: the supervisor's.
    """
    from launch import client, directory
    from slipstream import config as config_module
    from slipstream.rpc import security

    trusted = security.load(config_module.load(config, set_ or []).security)

    wanted = {}
    for one in replicas:
        pool, _, count = one.partition("=")
        if not pool or not count.isdigit():
            raise ConfigError(f"{one!r}: write it as POOL=N, for example decode=3")
        wanted[pool] = int(count)
    address = supervisor or client.get(url, "/status", key=key).get("supervisor", "")
    if not address:
        raise ConfigError(f"the router at {url} has no supervisor: its workers were named with --worker")
    for pool, now in sorted(directory.scale(address, wanted, trusted).items()):
        typer.echo(f"{pool} {now}")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME|all", help="wire, bytes, overlap, parallel, layout, load or routing.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small run that shows that it works; it is not stored.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object per suite instead of tables.")] = False,
) -> None:
    """Measure against memcpy, sockets and other limits of this machine.

    Needs a checkout of the repository, where results are stored in bench/results. Run it on a machine that does nothing else.
    """
    from rich.console import Console

    try:
        from bench import harness
    except ModuleNotFoundError as error:
        if error.name != "bench":
            raise
        raise ConfigError("the benchmarks are not part of the installed package; run `slipstream bench` in a checkout of the "
                          "repository, after `make setup`") from error
    harness.run(name, Console(), quick=quick, as_json=json_)


def _config(path: Path | None, overrides: list[str]) -> Config:
    from launch.members import check_geometries
    from slipstream import checkpoint, config

    settings = config.load(path, overrides)
    try:  # what is wrong with the model, or with its cut, is found before anything starts
        folder = checkpoint.resolve(settings.model.path, config.hub_cache())
    except ConfigError:
        if settings.ray.address:  # it need not lie on this node
            return settings
        raise
    check_geometries(settings, checkpoint.read(folder, drafts=settings.speculative.tokens > 0))
    return settings


def _with_ray(run: Callable[[], int]) -> int:
    try:
        return run()
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("Ray is not installed here; pip install 'slipstream[ray]', or start the processes yourself "
                          "with python -m prefill, python -m decode and python -m router") from error


def _fail(error: SlipstreamError, status: int) -> Any:
    typer.echo(f"slipstream: {error}", err=True)
    sys.exit(status)
