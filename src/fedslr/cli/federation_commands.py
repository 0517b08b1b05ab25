"""`fedslr federation …` and `fedslr predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedslr.cli.arguments import AsJson, Changes, Resume
from fedslr.cli.printing import print_json
from fedslr.core.errors import FedslrError, Interrupted
from fedslr.deploy import options, predict
from fedslr.deploy.database import Database, open_database
from fedslr.deploy.lifecycle import FAILURE_FILE, TAKEOVER_SECONDS, require_same_federation
from fedslr.run.recipe_library import find_recipe
from fedslr.storage.locks import is_taken
from fedslr.storage.record import Record
from fedslr.storage.run_folder import FEDERATION_DATABASE
from fedslr.storage.statistics import find_headline

app = typer.Typer(help="Run federations on several machines, with Flower.", rich_markup_mode=None)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, on the SuperLink's machine.")]
ClientNumber = Annotated[int, typer.Argument(metavar="CLIENT", help="The client's number.")]
Connection = Annotated[str, typer.Option("--superlink", metavar="NAME", help="A connection of Flower's config.toml.")]


def require_flower() -> None:
    """Refuse a command that needs Flower if it is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FedslrError("federations need Flower; pip install 'fedslr[deploy]'") from None


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for everything.")] = Path("runs/federation"),
    rounds: Annotated[int | None, typer.Option(min=1, metavar="NUMBER", help="Rounds. Default: 3.")] = None,
    resume: Resume = False,
) -> None:
    """Run a whole federation on this machine.

    It has TLS, keys, a SuperLink, and three nodes with their own data.
    """
    require_flower()
    from fedslr.deploy import loopback

    try:
        last = loopback.demo(out, rounds, resume, typer.echo)[-1]
    except KeyboardInterrupt:
        begun = loopback.begun(out / "run") is not None
        again = f"go on with: {_resuming(out / 'run')}" if begun else f"nothing was trained; remove {out}"
        raise Interrupted(f"stopped; {again}") from None
    metric = find_headline(last["metric"])
    shared, own = (last[metric.key(model, per_client=True)] for model in ("global", "personal"))
    for number, one, all_of_them in zip(last.get("evaluated") or range(len(own)), own, shared, strict=True):
        typer.echo(f"node {number}: personal model {metric.text(one)}, global model {metric.text(all_of_them)}")
    typer.echo(f"everything is stopped; results in {out / 'run'} (look at {out / 'run' / 'report.html'})")


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for ca.crt, server.crt and server.key.")],
    host: Annotated[
        list[str], typer.Option(metavar="HOST", help="A name or address of the SuperLink's machine. Repeatable.")
    ],
) -> None:
    """Make the certificates of a federation."""
    require_flower()
    from fedslr.deploy import keys

    keys.make_certificates(folder, host)
    typer.echo(f"{folder}: ca.crt goes to every node; server.crt and server.key stay with the SuperLink")


@app.command()
def key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File for the private key; the public one gets .pub.")],
) -> None:
    """Make a node's key."""
    require_flower()
    from fedslr.deploy import keys

    public = keys.make_node_key(path)
    typer.echo(f"{path} never leaves this node; register {public} with the SuperLink: flwr supernode register {public}")


@app.command()
def start(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML recipe with a table `federation`.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Run folder, on the SuperLink's machine.")],
    changes: Changes = None,
    superlink: Connection = "fedslr",
) -> None:
    """Begin a federation: ask a SuperLink to run it."""
    asked = options.read(find_recipe(recipe), changes or [])
    asked.require_sound()
    require_flower()
    if is_taken(out):
        raise FedslrError(f"out: a server is at work in {out}; wait for it, or choose another folder")
    with open_database(out) as database:
        if database is not None:
            require_same_federation(database, asked, out)
    _submit(asked.to_toml(), out, superlink)


@app.command()
def resume(out: Run, superlink: Connection = "fedslr") -> None:
    """Go on with a federation from its last finished round."""
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

    from fedslr.deploy import submission

    with tempfile.TemporaryDirectory(prefix="fedslr-") as folder:
        env = {**submission.NO_TELEMETRY, **os.environ}
        number = submission.submit(Path(folder), superlink, text, out.absolute(), env)
    typer.echo(
        f"the SuperLink runs it as run {number}, and takes some seconds to begin; see "
        f"`fedslr federation status {out}`, `flwr log {number} {superlink}`"
    )


@app.command()
def status(out: Run, as_json: AsJson = False) -> None:
    """Show the rounds, the clients and the server's state."""
    now = _standing(out)
    if as_json:
        print_json(now)
        return
    typer.echo(f"run {now['run']}: {now['done']} of {now['rounds']} rounds are done")
    if (measured := now["evaluation"]) is not None:
        typer.echo(f"after round {measured['round']}: {now['scores']}")
    for member in now["clients"]:
        rounds = member["counted_in"]
        last = f"counted in {len(rounds)} rounds, last in {rounds[-1]}" if rounds else "not counted yet"
        node = "waits for a node" if member["node"] is None else f"node {member['node'][:16]}"
        leaving = ", leaving" if member["leaving"] else ""
        typer.echo(f"client {member['client']}: {node}, {member['examples']} samples, {last}{leaving}")
    for refusal in now["refused"]:
        typer.echo(f"did not count: a message of {refusal['sender']} in round {refusal['round']}: {refusal['why']}")
    joined, awaited = len(now["clients"]), now["awaited"]
    if not now["done"] and joined < awaited:
        typer.echo(f"{joined} of {awaited} clients have joined; the first round waits for the others")
    if now["server_at_work"]:
        typer.echo("a server is at work on it")
    elif now["failure"] is not None:
        typer.echo(f"stopped: {now['failure']}")
    elif now["done"] < now["rounds"]:
        typer.echo(f"no server is at work on it; go on with: {_resuming(out)}")


def _standing(out: Path) -> dict[str, Any]:
    """Return the state of a federation as `status --json` prints it."""
    database = _database(out)
    recipe = options.from_text(database.fact("recipe")).recipe
    counted: dict[int, list[int]] = {}
    for client, number, *_ in database.counted():
        counted.setdefault(client, []).append(number + 1)
    records = [Record.read(record) for record in database.records()]
    measured = next((record for record in reversed(records) if record.scores_text()), None)
    return {
        "run": database.fact("run"),
        "done": database.fact("done"),
        "rounds": recipe.settings.rounds,
        "evaluation": None if measured is None else measured.means(),
        "scores": None if measured is None else measured.scores_text(),
        "awaited": recipe.data.clients,
        "clients": [
            {
                "client": member.number,
                "node": member.identity,
                "examples": member.examples,
                "counted_in": counted.get(member.number, []),
                "leaving": member.leaving,
            }
            for member in database.members().values()
        ],
        "refused": [{"sender": who, "round": at, "why": why} for who, (at, why) in database.refused().items()],
        "server_at_work": is_taken(out),
        "failure": _failure(out),
    }


def _failure(out: Path) -> str | None:
    """Return why the last start of the server failed, or None."""
    path = out / FAILURE_FILE
    return path.read_text("utf-8").strip() if path.exists() else None


@app.command()
def remove(
    out: Run,
    client: ClientNumber,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the client stay after all, if it has not left yet.")
    ] = False,
) -> None:
    """Make a client leave before the next round.

    The server's mean over the clients then no longer counts it.
    """
    _database(out).set_leaving(client, not undo)
    if undo:
        typer.echo(f"client {client} stays")
        return
    typer.echo(
        f"client {client} leaves before the next round; then: flwr supernode unregister NODE (flwr supernode list)"
    )


@app.command()
def release(out: Run, client: ClientNumber) -> None:
    """Give a client's number to the next node that claims it.

    This is for a client whose machine or key was replaced.
    """
    _database(out).release(client)
    typer.echo(f"the next node that claims number {client} is client {client}")


def _resuming(out: Path) -> str:
    """Return the command that goes on with a run; a demo also starts its SuperLink and its nodes."""
    demo = out.name == "run" and all((out.parent / name).is_dir() for name in ("flower", "keys", "node-0"))
    return f"fedslr federation demo --out {out.parent} --resume" if demo else f"fedslr federation resume {out}"


def _database(out: Path) -> Database:
    """Return the database of a run folder; refuse a folder without one."""
    there = (out / FEDERATION_DATABASE).exists()
    database = Database(out) if there else None
    if database is None or not database.exists:
        todo = "name the folder that `fedslr federation start` was given as --out"
        why = f"its start failed: {failure}" if (failure := _failure(out)) else todo
        raise FedslrError(f"{out}: holds no federation; {why}")
    return database


def predict_command(
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="A .npy file, or a .npz file with an array x.")],
    store: Annotated[Path, typer.Option(metavar="FOLDER", help="The node's store.")],
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also print the probabilities of all classes.")
    ] = False,
) -> None:
    """Predict with a node's personal model.

    One line of JSON is printed per input.
    """
    found = predict.scores(store, predict.read_inputs(inputs))
    for label, row in zip(found.argmax(1).tolist(), found.softmax(1).tolist(), strict=True):
        line: dict[str, Any] = {"label": label}
        if probabilities:
            line["probabilities"] = [round(p, 6) for p in row]
        typer.echo(json.dumps(line))
