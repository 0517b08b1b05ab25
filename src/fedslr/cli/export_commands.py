"""`fedslr export` and `fedslr latency`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedslr.cli.arguments import Client, RunFolders
from fedslr.cli.display import out_console, warn
from fedslr.cli.printing import print_table
from fedslr.core.errors import CheckpointError, FedslrError, StorageError
from fedslr.deploy import node_export as deployed
from fedslr.export import latency as latencies
from fedslr.export.layered_model import DEFAULT_BATCH
from fedslr.export.model_card import model_name
from fedslr.export.model_export import SUFFIXES, write
from fedslr.export.model_export import export as of_run
from fedslr.export.programs import has_onnx
from fedslr.export.runtimes import runtimes
from fedslr.report.number_text import format_bytes
from fedslr.report.result_tables import Table
from fedslr.report.table_formats import markdown
from fedslr.run.reopen import open_run
from fedslr.run.result import find_client
from fedslr.storage.statistics import Headline

Batch = Annotated[int, typer.Option(min=1, metavar="SAMPLES", help="Samples in the batch that is timed.")]


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a run, or a node's store.")],
    client: Client = None,
    shared: Annotated[bool, typer.Option("--global", help="The global model instead of a client's.")] = False,
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="safetensors, torch (torch.export) or onnx.")
    ] = "safetensors",
    purpose: Annotated[
        str, typer.Option("--for", metavar="PURPOSE", help="size, or speed as measured on this machine.")
    ] = "size",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file (.pt2 for torch). Default: export/ in the run's folder."),
    ] = None,
    batch: Batch = DEFAULT_BATCH,
) -> None:
    """Write one model of a run to a file, with a model card.

    The file runs without fedslr. In a deployed federation, the server exports the global model from its run folder,
    and a node exports its client's model from its store.
    """
    on_node = deployed.is_store(folder)
    if shared is (on_node or client is not None):
        why = "; a node's store has its personal model only" if on_node else ""
        raise FedslrError(f"export: expected either --client or --global{why}")
    if on_node:
        target = _target(folder, "personal", format, out)
        number = None if client is None else find_client(client)
        made = write(lambda: deployed.personal_model(folder, number, batch), target, format, purpose)
    elif deployed.is_deployed(folder):
        if not shared:
            raise FedslrError(f"--client: the model of client {client} is on its node; fedslr export STORE there")
        target = _target(folder, "global", format, out)
        made = write(lambda: deployed.global_model(folder, batch), target, format, purpose)
    else:
        result = open_run(folder, device="cpu", warn=warn)
        if result.rounds_left:
            warn(f"this run is not finished: its models are those of round {result.summary['rounds']}")
        number = None if client is None else find_client(client, result.federation)
        target = _target(folder, "global" if number is None else f"client-{number}", format, out)
        try:
            made = of_run(result, target, client=number, format=format, purpose=purpose, batch=batch)
        except StorageError:
            raise
        except CheckpointError as error:
            again = f"fedslr run {folder / 'config.toml'} --out {folder} --resume"
            raise CheckpointError(f"{error}; where the run can go on, `{again}` makes that round again") from None
    facts = made.facts
    metric = Headline(**facts.about["metric"])
    score = "not measured" if facts.score is None else metric.text(facts.score)
    for line in (
        f"{model_name(facts.client, facts.about['client_name'])}, {facts.format}, for {facts.purpose}: {made.path}",
        f"{format_bytes(facts.bytes)}, {100 * facts.bytes / facts.dense_bytes:.0f} % of the dense model's size "
        f"({format_bytes(facts.dense_bytes)})",
        f"{metric.words} {score}; answers differ from the dense model's by at most {facts.difference:.1g}",
        f"model card: {made.card}",
    ):
        typer.echo(line)


def _target(folder: Path, name: str, format: str, out: Path | None) -> Path:
    return out or folder / "export" / f"{name}{SUFFIXES.get(format, '')}"


def latency(
    folders: RunFolders,
    client: Client = None,
    batch: Batch = DEFAULT_BATCH,
    repeat: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Batches that are timed; the median is reported.")
    ] = 50,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda. Default: all there are.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file for the times. Default: in the first folder.")
    ] = None,
) -> None:
    """Measure the inference latency of models.

    Every model is timed dense, factorised, sparse, and with the fastest form of every layer. Without a client it is
    the global model, as in the paper's table.
    """
    target = out or folders[0] / ("latency.json" if client is None else f"latency-client-{client}.json")
    if target.is_dir() or (out is not None and not out.parent.is_dir()):
        # Before a measurement that takes minutes.
        raise FedslrError(f"--out: got {target}, expected a file in a folder that exists, such as latency.json")
    with_, under = runtimes(device), latencies.conditions(batch, repeat, client)
    found = []
    for row in latencies.measured_rows(folders, client, batch, repeat, with_, warn):
        found.append(row)
        # A row of a large model takes minutes, so each is written as soon as it is measured.
        latencies.save(target, found, under)
        typer.echo(f"measured {row['run']}", err=True)
    if not found:
        raise FedslrError("latency: no run here has a global model; expected --client NUMBER")
    typer.echo(f"milliseconds per batch of {batch}, median of {repeat}, threads: {under['threads']}; {under['model']}")
    _print(latencies.latency_table(found))
    if not has_onnx():
        typer.echo("without onnxruntime, which is not installed: pip install 'fedslr[export]'")
    typer.echo(f"written to {target}")


def _print(made: Table) -> None:
    """Print a table as wide as the terminal; elsewhere, print it as Markdown."""
    if out_console.is_terminal:
        print_table(made)
    else:
        typer.echo(markdown(made), nl=False)
