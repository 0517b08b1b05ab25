"""`fedslr federation …` and `fedslr predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedslr.cli.arguments import Changes
from fedslr.core.errors import FedslrError, Interrupted
from fedslr.deploy import options, predict
from fedslr.deploy.database import FILE, Database, open_database
from fedslr.deploy.lifecycle import FAILURE_FILE, TAKEOVER_SECONDS, require_same_run
from fedslr.report.number_text import percent
from fedslr.storage.locks import is_taken

app = typer.Typer(
    help="Federations on several machines, carried by Flower (pip install 'fedslr[deploy]').", rich_markup_mode=None
)
Run = Annotated[Path, typer.Argument(help="The run folder, on the SuperLink's machine.")]
Client = Annotated[int, typer.Argument(help="The client's number.")]
Connection = Annotated[str, typer.Option("--superlink", help="A connection of Flower's config.toml.")]


def require_flower() -> None:
    """One plain line where Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FedslrError("federations need Flower; pip install 'fedslr[deploy]'") from None


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything.")] = Path("runs/federation"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; 3 unless given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the federation in the folder.")] = False,
) -> None:
    """A whole federation on this machine: TLS, keys, a SuperLink, three nodes with their own data."""
    require_flower()
    from fedslr.deploy import loopback

    try:
        last = loopback.demo(out, rounds, resume, typer.echo)[-1]
    except KeyboardInterrupt:
        begun = loopback.begun(out / "run") is not None
        again = f"go on with: {_resuming(out / 'run')}" if begun else f"nothing was trained; remove {out}"
        raise Interrupted(f"stopped; {again}") from None
    shared, own = last["accuracy_global_per_client"], last["accuracy_personal_per_client"]
    for number, one, all_of_them in zip(last.get("evaluated") or range(len(own)), own, shared, strict=True):
        typer.echo(f"node {number}: personal model {percent(one)}, global model {percent(all_of_them)}")
    typer.echo(f"everything is stopped; results in {out / 'run'} (look at {out / 'run' / 'report.html'})")


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder for ca.crt, server.crt and server.key.")],
    host: Annotated[list[str], typer.Option(help="A name or address the SuperLink is reached by. Repeatable.")],
) -> None:
    """Make the certificates of a federation."""
    require_flower()
    from fedslr.deploy import keys

    keys.make_certificates(folder, host)
    typer.echo(f"{folder}: ca.crt goes to every node; server.crt and server.key stay with the SuperLink")


@app.command()
def key(path: Annotated[Path, typer.Argument(help="File for the private key; the public one gets .pub.")]) -> None:
    """Make a node's key."""
    require_flower()
    from fedslr.deploy import keys

    public = keys.make_node_key(path)
    typer.echo(f"{path} never leaves this node; register {public} with the SuperLink: flwr supernode register {public}")


@app.command()
def start(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe with a table `federation`.")],
    out: Annotated[Path, typer.Option(help="Run folder, on the SuperLink's machine.")],
    changes: Changes = None,
    superlink: Connection = "fedslr",
) -> None:
    """Begin a federation: ask a SuperLink to run it."""
    asked = options.read(recipe, changes or [])
    asked.require_sound()
    require_flower()
    if is_taken(out):
        raise FedslrError(f"out: a server is at work in {out}; wait for it, or choose another folder")
    with open_database(out) as database:
        if database is not None:
            require_same_run(database, asked, out)
    _submit(asked.to_toml(), out, superlink)


@app.command()
def resume(out: Run, superlink: Connection = "fedslr") -> None:
    """Go on with a federation from its last finished round, whatever stopped it."""
    require_flower()
    database = _database(out)
    rounds, done = options.from_text(database.fact("recipe")).recipe.settings.rounds, database.fact("done")
    database.close()
    if done >= rounds and (out / "summary.json").exists():
        typer.echo(f"all {rounds} rounds are done; there is nothing to go on with")
        return
    if is_taken(out):
        typer.echo(
            f"a server is still at work on it; the new one waits up to {TAKEOVER_SECONDS:g} seconds for it to end"
        )
    _submit("", out, superlink)


def _submit(text: str, out: Path, superlink: str) -> None:
    import os
    import tempfile

    from fedslr.deploy import loopback

    with tempfile.TemporaryDirectory(prefix="fedslr-") as folder:
        number = loopback.submit(Path(folder), superlink, text, out.absolute(), {**loopback.NO_TELEMETRY, **os.environ})
    typer.echo(
        f"the SuperLink runs it as run {number}, and takes some seconds to begin; see "
        f"`fedslr federation status {out}`, `flwr log {number} {superlink}`"
    )


@app.command()
def status(out: Run) -> None:
    """Where a federation stands: its rounds, its clients, what stopped it."""
    database = _database(out)
    asked, records = options.from_text(database.fact("recipe")), database.records()
    typer.echo(f"run {database.fact('run')}: {database.fact('done')} of {asked.recipe.settings.rounds} rounds are done")
    measured = next((r for r in reversed(records) if r.get("accuracy_personal") is not None), None)
    if measured is not None:
        shared, own = percent(measured.get("accuracy_global")), percent(measured["accuracy_personal"])
        typer.echo(f"after round {measured['round']}: global {shared}, personal {own}")
    counted: dict[int, list[int]] = {}
    for client, number, *_ in database.counted():
        counted.setdefault(client, []).append(number + 1)
    members = database.members()
    for member in members.values():
        rounds = counted.get(member.number, [])
        last = f"counted in {len(rounds)} rounds, last in {rounds[-1]}" if rounds else "not counted yet"
        who = "waits for a node" if member.identity is None else f"node {member.identity[:16]}"
        leaving = ", leaving" if member.leaving else ""
        typer.echo(f"client {member.number}: {who}, {member.examples} samples, {last}{leaving}")
    for sender, (number, why) in database.refused().items():
        typer.echo(f"did not count: a message of {sender} in round {number}: {why}")
    joined, awaited = len(members), asked.recipe.data.clients
    if not database.fact("done") and joined < awaited:
        typer.echo(f"{joined} of {awaited} clients have joined; the first round waits for the others")
    if is_taken(out):
        typer.echo("a server is at work on it")
    elif (out / FAILURE_FILE).exists():
        typer.echo("stopped: " + (out / FAILURE_FILE).read_text("utf-8").strip())
    elif database.fact("done") < asked.recipe.settings.rounds:
        typer.echo(f"no server is at work on it; go on with: {_resuming(out)}")


@app.command()
def remove(
    out: Run,
    client: Client,
    undo: Annotated[bool, typer.Option("--undo", help="Let it stay after all, if it has not left yet.")] = False,
) -> None:
    """Have a client leave before the next round; it takes its share of the server's mean with it."""
    _database(out).set_leaving(client, not undo)
    if undo:
        typer.echo(f"client {client} stays")
        return
    typer.echo(
        f"client {client} leaves before the next round; then: flwr supernode unregister NODE (flwr supernode list)"
    )


@app.command()
def release(out: Run, client: Client) -> None:
    """Give a client's number to the next node that claims it: its machine or its key was replaced."""
    _database(out).release(client)
    typer.echo(f"client {client} is whoever claims that number next")


def _resuming(out: Path) -> str:
    """The command that goes on with a run: a demo brings its SuperLink and its nodes along."""
    demo = out.name == "run" and all((out.parent / name).is_dir() for name in ("flower", "keys", "node-0"))
    return f"fedslr federation demo --out {out.parent} --resume" if demo else f"fedslr federation resume {out}"


def _database(out: Path) -> Database:
    there = (out / FILE).exists()
    database = Database(out) if there else None
    if database is None or not database.exists:
        failure = out / FAILURE_FILE
        why = f"; its start failed: {failure.read_text('utf-8').strip()}" if failure.exists() else ""
        raise FedslrError(f"{out}: holds no federation ({FILE} is {'empty' if there else 'missing'}){why}")
    return database


def predict_command(
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="A .npy file, or a .npz file with an array x.")],
    store: Annotated[Path, typer.Option(help="The node's store.")],
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Also print those of all classes.")] = False,
) -> None:
    """Predict with a node's personal model: one line of JSON per input."""
    found = predict.scores(store, predict.read_inputs(inputs))
    for label, row in zip(found.argmax(1).tolist(), found.softmax(1).tolist(), strict=True):
        line: dict[str, Any] = {"label": label}
        if probabilities:
            line["probabilities"] = [round(p, 6) for p in row]
        typer.echo(json.dumps(line))
