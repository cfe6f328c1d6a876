"""The `sluice` command line, with all of its commands."""

import typer

from sluice_server.services.cli import app as frames
from sluice_server.services.cli.adapters import adapters
from sluice_server.services.cli.bench import bench
from sluice_server.services.cli.cache import cache
from sluice_server.services.cli.calibrate import calibrate
from sluice_server.services.cli.chat import chat
from sluice_server.services.cli.classify import classify
from sluice_server.services.cli.demo import demo
from sluice_server.services.cli.edge import edge
from sluice_server.services.cli.embed import embed
from sluice_server.services.cli.generate import generate
from sluice_server.services.cli.healthcheck import healthcheck
from sluice_server.services.cli.import_gguf import import_gguf
from sluice_server.services.cli.keys import keys
from sluice_server.services.cli.kvstore import kvstore
from sluice_server.services.cli.models import models
from sluice_server.services.cli.profile import profile
from sluice_server.services.cli.ray_up import ray
from sluice_server.services.cli.rerank import rerank
from sluice_server.services.cli.run_batch import run_batch
from sluice_server.services.cli.serve import serve
from sluice_server.services.cli.token import token
from sluice_server.services.cli.top import top
from sluice_server.version import VERSION

CLIENTS = (generate, chat, embed, classify, rerank, bench, run_batch, top, profile)


def version() -> None:
    """Print the version."""
    typer.echo(VERSION)


app = frames.frame()
for command in (serve, version, *CLIENTS, edge, demo, healthcheck, import_gguf, calibrate, keys, kvstore):
    frames.add(app, command)
app.add_typer(adapters, name="adapters")
app.add_typer(models, name="models")
app.add_typer(token, name="token")
app.add_typer(ray, name="ray")
app.add_typer(cache, name="cache")
