"""`fedslr export` and `fedslr latency`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedslr.cli.arguments import require_file
from fedslr.cli.display import out_console, print_table, warn
from fedslr.core.errors import CheckpointError, FedslrError, StorageError, suggest
from fedslr.deploy import node_export as deployed
from fedslr.export import latency as latencies
from fedslr.export import programs
from fedslr.export.card import whose
from fedslr.export.export import BATCH, SUFFIXES, write
from fedslr.export.export import export as of_run
from fedslr.export.timing import runtimes
from fedslr.report import amount, percent, tables
from fedslr.run.reopen import open_run

Client = Annotated[int | None, typer.Option(help="The client whose personal model it is.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples in the batch that times are measured with.")]


def mount(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(export)
    app.command()(latency)


def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or a node's store.")],
    client: Annotated[
        str | None, typer.Option(help="The client whose personal model it is: its number, or its name in the data.")
    ] = None,
    shared: Annotated[bool, typer.Option("--global", help="The global model instead of a client's.")] = False,
    format: Annotated[str, typer.Option(help="safetensors, torch (torch.export) or onnx.")] = "safetensors",
    purpose: Annotated[str, typer.Option("--for", help="size, or speed as measured on this machine.")] = "size",
    out: Annotated[
        Path | None, typer.Option(help="The file (.pt2 for torch). Default: export/ in the run's folder.")
    ] = None,
    batch: Batch = BATCH,
) -> None:
    """Write one model of a run to a file that runs without it, with a model card beside it.

    Of a deployed federation the global model is exported from the server's run folder, a client's on its node, from
    the folder of its store.
    """
    if deployed.is_store(folder):
        if shared:
            raise FedslrError("export: got --global, but a node's store has its personal model only")
        target = _target(folder, "personal", format, out)
        number = _number(client)
        made = write(lambda: deployed.personal_model(folder, number, batch), target, format, purpose)
    elif (client is None) is not shared:
        got = "both --client and --global" if shared else "neither --client nor --global"
        raise FedslrError(f"export: got {got}, expected one of them")
    elif deployed.is_deployed(folder):
        if not shared:
            raise FedslrError(f"--client: the model of client {client} is on its node; fedslr export STORE there")
        target = _target(folder, "global", format, out)
        made = write(lambda: deployed.global_model(folder, batch), target, format, purpose)
    else:
        result = open_run(folder, device="cpu", warn=warn)
        if result.rounds_left:
            warn(f"this run is not finished: its models are those of round {result.summary['rounds']}")
        number = _number(client, result.federation.client_names or ())
        target = _target(folder, "global" if number is None else f"client-{number}", format, out)
        try:
            made = of_run(result, target, client=number, format=format, purpose=purpose, batch=batch)
        except StorageError:
            raise
        except CheckpointError as error:
            again = f"fedslr run {folder / 'config.toml'} --out {folder} --resume"
            raise CheckpointError(f"{error}; where the run can go on, `{again}` makes that round again") from None
    facts = made.facts
    accuracy = "not measured" if facts.accuracy is None else percent(facts.accuracy)
    for line in (
        f"{whose(facts.client, facts.about['client_name'])}, {facts.format}, for {facts.purpose}: {made.path}",
        f"{amount(facts.bytes)}, {100 * facts.bytes / facts.dense_bytes:.0f} % of the dense model's size "
        f"({amount(facts.dense_bytes)})",
        f"accuracy {accuracy}; answers differ from the dense model's by at most {facts.difference:.1g}",
        f"model card: {made.card}",
    ):
        typer.echo(line)


def _number(client: str | None, names: Sequence[str] = ()) -> int | None:
    """The client somebody means: by its number, or by its name, which may be a number too."""
    if client is None:
        return None
    called = list(names).index(client) if client in names else None
    number = int(client) if re.fullmatch(r"-?\d+", client) else None
    if number is not None and (called is None or number < len(names)):
        if called not in (None, number):
            warn(f"--client {client}: taken as a number; the client that is called so is client {called}")
        return number
    if called is not None:
        return called
    expected = f"a number, or its name; {suggest(client, names)}" if names else "its number"
    raise FedslrError(f"--client: got '{client}', expected {expected}")


def _target(folder: Path, name: str, format: str, out: Path | None) -> Path:
    if out is None and folder.is_dir() and not os.access(folder, os.W_OK):
        raise FedslrError(f"{folder} cannot be written to; choose a file with --out")
    return out or folder / "export" / f"{name}{SUFFIXES.get(format, '')}"


def latency(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or folders that hold such.")],
    client: Client = None,
    batch: Batch = BATCH,
    repeat: Annotated[int, typer.Option(min=1, help="Batches that are timed; the median counts.")] = 50,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: all there are.")] = None,
    out: Annotated[Path | None, typer.Option(help="The figures as JSON. Default: in the (first) folder.")] = None,
) -> None:
    """Milliseconds per batch of the models of some runs: dense, factorised, sparse, and the fastest form per layer.

    Without a client it is the global model, as in the paper's table.
    """
    target = out or folders[0] / ("latency.json" if client is None else f"latency-client-{client}.json")
    if out is not None or folders[0].is_dir():
        require_file("--out", target, "latency.json")
    with_, under = runtimes(device), latencies.conditions(batch, repeat, client)
    found = []
    for row in latencies.rows(folders, client, batch, repeat, with_, warn):
        found.append(row)
        # Every row takes minutes where models are large: what is measured is on the disk.
        latencies.save(target, found, under)
        typer.echo(f"measured {row['run']}", err=True)
    if not found:
        raise FedslrError("latency: no run here has a global model; expected --client NUMBER")
    typer.echo(f"milliseconds per batch of {batch}, median of {repeat}, threads: {under['threads']}; {under['model']}")
    _print(latencies.table(found))
    if not programs.has_onnx():
        typer.echo("without onnxruntime, which is not installed: pip install 'fedslr[export]'")
    typer.echo(f"written to {target}")


def _print(made: tables.Table) -> None:
    """For people as wide as their screen; elsewhere in Markdown, to be kept."""
    if out_console.is_terminal:
        print_table(made)
    else:
        typer.echo(tables.markdown(made), nl=False)
