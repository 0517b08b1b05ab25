"""Deployments on Flower: its apps in one process, and real processes with TLS that are killed and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedslr
from conftest import make_federation
from deployed import SIZES, Federation, recipe
from fedslr.core import factored, tree
from fedslr.core.errors import FedslrError, TakenError
from fedslr.core.states import plain
from fedslr.deploy import options
from fedslr.deploy.accounts import Accounts
from fedslr.deploy.database import Database
from fedslr.deploy.node_store import NodeStore
from fedslr.deploy.node_work import NodeWork
from fedslr.storage.locks import is_taken, lock
from fedslr.storage.record import Record, read_records

pytest.importorskip("flwr")

from cryptography import x509
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.exit import exit_handler
from flwr.supercore.task_identity import TaskIdentity

from fedslr.deploy import flower, keys, loopback, submission
from fedslr.deploy.predict import scores


class OneProcess(Grid):
    """A Grid whose nodes are the ClientApp itself, each with a context of its own."""

    def __init__(self, contexts: dict[int, Context]) -> None:
        self.contexts = contexts
        self.answers: dict[str, Message] = {}
        self.spoil: Callable[[Message], Any] = lambda message: message
        self.pushed: list[Message] = []

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Any:
        return [SimpleNamespace(node_id=n, public_key=b"", last_activated_at="") for n in self.contexts]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            self.pushed.append(message)
            names.append(str(len(self.pushed)))
            answer = flower.client(message, self.contexts[message.metadata.dst_node_id])
            self.answers[names[-1]] = self.spoil(answer)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self.answers.pop(i) for i in message_ids if i in self.answers]
        if any(isinstance(answer, Exception) for answer in found):
            raise found[0]  # type: ignore[misc]
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


def context(node: int, node_config: dict[str, Any], **run_config: Any) -> Context:
    return Context(run_id=1, node_id=node, node_config=node_config, state=RecordDict(), run_config=run_config)


def one_process(home: Path, federation: fedslr.Federation) -> OneProcess:
    contexts = {}
    for number, data in enumerate(federation.clients):
        loopback.write_data(home / f"data-{number}" / "data.npz", data)
        settings = {"client": number, "data": str(home / f"data-{number}"), "store": str(home / f"node-{number}")}
        contexts[100 + number] = context(100 + number, settings)
    return OneProcess(contexts)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(flower, "RESEND_SECONDS", 0.0)
    monkeypatch.setattr(exit_handler, "registered_exit_handlers", [])
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1, raising=False)


@pytest.mark.parametrize("name", ["fedslr", "scaffold", "ditto"])
def test_the_apps_do_what_the_simulation_does(name, tmp_path):
    """Five rounds in single precision through ServerApp and ClientApp: models, accuracies and bytes."""
    asked = recipe(name)
    grid = one_process(tmp_path, make_federation(SIZES))
    flower.server(grid, context(0, {}, recipe=asked.to_toml(), out=str(tmp_path / "run")))
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    simulation = federation.simulated()
    assert distance(federation, simulation) <= 1e-6
    payloads = [
        len(m.content.config_records["fedslr"]["payload"]) for m in grid.pushed if m.metadata.message_type == "train"
    ]
    assert sum(payloads) == sum(r.bytes_down for r in federation.records)
    for ours, theirs in zip(read_records(tmp_path / "run"), federation.records, strict=True):
        for key in ("clients", "bytes_down", "bytes_up", "accuracy_global", "accuracy_personal"):
            assert ours.get(key) == getattr(theirs, key)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 5


def distance(federation: Federation, simulation: Any) -> float:
    """The largest difference of a number between a federation, as its disks have it, and a simulation."""
    accounts = Accounts(Database(federation.home / "run"), federation.asked.recipe.algorithm)
    pairs = [(accounts.state, simulation.state.server_state)]
    pairs += [(federation.member(c), simulation.state.roster.member(c)) for c in accounts.members]
    return max(off(plain(x), plain(y)) for a, b in pairs for x, y in zip(a, b, strict=True))


def off(a: Any, b: Any) -> float:
    pairs = zip(tree.leaves(factored.multiply_out(a)), tree.leaves(factored.multiply_out(b)), strict=True)
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs), default=0.0)


def test_the_reply_leaves_before_the_personal_part_is_trained(tmp_path, monkeypatch):
    """Flower pushes the reply, then it runs these exit handlers and waits for them, then it ends the process."""
    personalized: list[int] = []
    real = NodeWork.personalize
    monkeypatch.setattr(
        NodeWork, "personalize", lambda work, *args: (personalized.append(work.client), real(work, *args))[1]
    )
    grid = one_process(tmp_path, make_federation(SIZES))
    before_the_end: list[list[int]] = []

    def end_process(reply: Message) -> Message:
        before_the_end.append(list(personalized))
        exit_handler.trigger_exit_handlers(run_before_force_exit=True)
        return reply

    grid.spoil = end_process
    asked = recipe(changes=["rounds=1", "clients_per_round=1"])
    flower.server(grid, context(0, {}, recipe=asked.to_toml(), out=str(tmp_path / "run")))
    trained = [m.metadata.message_type for m in grid.pushed].index("train")
    assert before_the_end[trained] == []
    assert len(before_the_end[trained + 1]) == len(personalized) == 1
    page = NodeStore(tmp_path / f"node-{personalized[0]}").read()
    assert page is not None
    assert page.pending is None


def test_a_mistake_in_ones_own_is_a_line_in_the_run_folder(tmp_path):
    grid = one_process(tmp_path, make_federation(SIZES))
    asked = recipe("deployed_methods:Broken", changes=["rounds=1"])
    with pytest.raises(AttributeError):
        flower.server(grid, context(0, {}, recipe=asked.to_toml(), out=str(tmp_path / "run")))
    told = (tmp_path / "run" / "failure.txt").read_text()
    assert re.match(r"your code fails in .*deployed_methods.py, line \d+: AttributeError: ", told)


MALFORMED: dict[str, Callable[[Message], Any]] = {
    "an error": lambda m: Message(Error(0, "broken"), reply_to=m),
    "no record": lambda m: Message(RecordDict(), reply_to=m),
    "another record": lambda m: Message(RecordDict({"fedslr": ConfigRecord({"round": 1})}), reply_to=m),
    "what Flower cannot read": lambda m: ValueError("not a message"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_reply_does_not_end_the_run(kind, tmp_path):
    """Node 2's replies are malformed from the second on; the others finish the run."""
    grid = one_process(tmp_path, make_federation(SIZES))
    seen: list[int] = []

    def spoil(message: Message) -> Any:
        seen.append(message.metadata.src_node_id)
        return MALFORMED[kind](message) if message.metadata.src_node_id == 102 and seen.count(102) > 1 else message

    grid.spoil = spoil
    asked = recipe(changes=["clients_per_round=5", "rounds=2", "federation.deadline=1"])
    flower.server(grid, context(0, {}, recipe=asked.to_toml(), out=str(tmp_path / "run")))
    assert [r["clients"] for r in read_records(tmp_path / "run")] == [[0, 1, 3, 4]] * 2


def test_a_node_without_settings_says_what_is_missing(tmp_path):
    with pytest.raises(FedslrError, match="node-config: 'data' is missing"):
        flower.node_of(context(1, {"client": 1}))


def test_registering_goes_on_wherever_it_was_interrupted(tmp_path, monkeypatch):
    known: list[str] = []

    def register(command: list[str], env: Any) -> str:
        public = Path(command[-2]).read_text()
        if public in known:
            raise FedslrError("flwr supernode failed: Public key already in use")
        known.append(public)
        return ""

    monkeypatch.setattr(loopback, "call", register)
    monkeypatch.setattr(loopback, "program", lambda name: name)
    demo = loopback.Loopback(tmp_path)
    for lost in ([], ["0.registered"], ["0.registered", "0.pub"]):
        for name in lost:
            (demo.keys / name).unlink()
        demo.register("0")
        demo.register("0")
        assert (demo.keys / "0.pub").read_text() == known[-1]
    assert len(known) == 2

    def fail(command: list[str], env: Any) -> str:
        raise FedslrError("flwr supernode failed: no SuperLink")

    monkeypatch.setattr(loopback, "call", fail)
    with pytest.raises(FedslrError, match="no SuperLink"):
        demo.register("1")
    assert not (demo.keys / "1.registered").exists()


def test_a_demo_knows_where_it_stands(tmp_path, command, monkeypatch):
    run = tmp_path / "run"
    assert loopback.begun(run) is None
    run.mkdir()
    (run / "ledger.sqlite").touch()  # killed before the first transaction
    assert loopback.begun(run) is None
    Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"])).run()
    assert loopback.begun(run)[1] == 2
    code, _, err = command("federation", "demo", "--out", tmp_path, "--resume", "--rounds", 1)
    assert (code, err) == (2, f"error: rounds: got 1, but 2 are done in {tmp_path}\n")
    code, _, err = command("federation", "demo", "--out", tmp_path)
    assert code == 2
    assert "already holds a federation" in err
    (run / "summary.json").touch()
    each = {"accuracy_personal_per_client": [0.9, 0.8], "accuracy_global_per_client": [0.7, 0.6]}
    last = {**each, "evaluated": [0, 2], "metric": None}
    monkeypatch.setattr(loopback, "read_records", lambda path: [last])
    code, out, _ = command("federation", "demo", "--out", tmp_path, "--resume")
    assert code == 0
    assert "all 2 rounds are done; --rounds asks for more" in out
    # A client that left is nobody else.
    assert "node 2: personal model 80.0 %, global model 60.0 %" in out
    assert "node 1" not in out


def test_what_a_program_says_is_a_line(tmp_path):
    box = "import sys; sys.exit('╭─ Error ──╮\\n│ no such  │\\n│ thing    │\\n╰──────────╯')"
    with pytest.raises(FedslrError, match=r"failed: Error no such thing$"):
        submission.call([sys.executable, "-c", box], {"PYTHONIOENCODING": "utf-8"})
    missing = "import sys; sys.exit('no certificate: [Errno 2] No such file.')"
    with pytest.raises(FedslrError, match=r"failed: no certificate: No such file; check the address$"):
        submission.call([sys.executable, "-c", missing], {}, "; check the address")


def test_the_recipe_of_the_demo_is_the_default_of_the_app():
    assert flower.asked_for(context(0, {}, recipe="demo", out="")) == options.demo()
    assert flower.run_folder(context(0, {}, recipe="demo", out="")).name == "fedslr-1"


def test_the_recipe_in_the_documents_is_one():
    text = (Path(__file__).parent.parent.parent / "docs" / "guide" / "deploy.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (block,) = [b for b in blocks if "[federation]" in b]
    assert options.from_text(block).options.minimum == 3


def test_a_failure_is_told_in_the_run_folder(tmp_path):
    grid = one_process(tmp_path, make_federation(SIZES))
    with pytest.raises(FedslrError, match="holds no federation to resume"):
        flower.server(grid, context(0, {}, recipe="", out=str(tmp_path / "run")))
    assert "holds no federation" in (tmp_path / "run" / "failure.txt").read_text()
    with pytest.raises(FedslrError, match="holds no federation"):
        loopback.follow(tmp_path / "run", 3, print, handover=0.5)


def test_what_a_server_says_in_leaving_is_no_failure_of_its_successor(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(Record(1, 0.1, [0]).line() + "\n")
    (tmp_path / "failure.txt").write_text("the SuperLink is gone")
    with lock(tmp_path):
        done = threading.Timer(1.5, (tmp_path / "summary.json").touch)
        done.start()
        assert len(loopback.follow(tmp_path, 1, print, limit=60, handover=0.2)) == 1
    (tmp_path / "summary.json").unlink()
    with pytest.raises(FedslrError, match="the SuperLink is gone"):
        loopback.follow(tmp_path, 1, print, limit=60, handover=0.2)


def test_a_server_waits_for_the_one_before_to_leave_the_folder(tmp_path, command, monkeypatch):
    """A server whose SuperLink was killed takes some seconds to notice; the next one begins after it."""
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"]))
    before, said = federation.server(federation.asked), []
    with pytest.raises(TakenError, match="another process is running"):
        federation.server(None, patience=0.3, say=said.append)
    assert [line.startswith("another server is still in") for line in said] == [True]
    leaving = threading.Timer(1.0, before.folder.close)
    leaving.start()
    server = federation.server(None, patience=60)
    leaving.join()
    monkeypatch.setattr(submission, "submit", lambda *args: "")
    assert "a server is still at work on it; the new one waits" in command("federation", "resume", tmp_path / "run")[1]
    server.folder.close()
    assert "at work" not in command("federation", "resume", tmp_path / "run")[1]


def test_a_server_that_finds_another_at_work_is_no_failure_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(flower, "TAKEOVER_SECONDS", 0.1)
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"]))
    at_work = federation.server(federation.asked)
    grid = one_process(tmp_path, federation.federation)
    with pytest.raises(TakenError):
        flower.server(grid, context(0, {}, recipe="", out=str(tmp_path / "run")))
    assert not (tmp_path / "run" / "failure.txt").exists()
    at_work.folder.close()


# --- keys and certificates ------------------------------------------------------------------------------------------


def test_keys_are_the_owners_alone_and_never_overwritten(tmp_path):
    keys.make_certificates(tmp_path, ["127.0.0.1", "link.example.org"])
    public = keys.make_node_key(tmp_path / "3")
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in ("server.key", "3"))
    assert keys.registered_key(tmp_path, 3).startswith(b"-----BEGIN PUBLIC KEY-----")
    for make in (lambda: keys.make_node_key(tmp_path / "3"), lambda: keys.make_certificates(tmp_path, ["x"])):
        with pytest.raises(FedslrError, match="is already there"):
            make()
    public.write_text("nonsense")
    with pytest.raises(FedslrError, match="is no public key"):
        keys.registered_key(tmp_path, 3)


@pytest.mark.parametrize("host", ["a b!", "", "münchen.de", "link:9092", "-x", "x..y", "x" * 64, "10.0.0.999", "1.2"])
def test_certificates_are_for_names_that_there_can_be(host, command, tmp_path):
    code, _, err = command("federation", "certificates", tmp_path / "keys", "--host", "localhost", "--host", host)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"--host: got '{host}', expected a name such as" in err
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("host", ["link", "link7", "super_link-1.example.org", "*.example.org", "10.0.0.7", "::1"])
def test_certificates_name_the_host(host, tmp_path):
    keys.make_certificates(tmp_path, [host])
    made = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    (name,) = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert str(name.value) == host


# --- the command line -----------------------------------------------------------------------------------------------


def test_status_says_whom_the_first_round_waits_for(tmp_path, command):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"]))
    server = federation.server(federation.asked)
    wait = f"0 of {len(SIZES)} clients have joined; the first round waits for the others"
    assert wait in command("federation", "status", tmp_path / "run")[1]
    next(server.rounds())
    assert "have joined" not in command("federation", "status", tmp_path / "run")[1]
    server.folder.close()


def test_a_client_whose_key_is_missing_is_not_said_to_have_another(tmp_path):
    keys.make_node_key(tmp_path / "keys" / "3")
    asked = recipe(changes=[f"federation.keys='{tmp_path / 'keys'}'"])
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    with pytest.raises(FedslrError, match="0 of 5 clients enrolled"):
        federation.run()
    reasons = "\n".join(federation.refused)
    assert re.search(r"client 2, whose key is not registered: federation.keys: .*keys/2.pub", reasons)
    assert "client 3, which has another key" in reasons


def test_status_says_whether_a_server_is_at_work(tmp_path, command):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"]))
    server = federation.server(federation.asked)
    next(server.rounds())
    server.database.note_refusal("client 2 (key-2)", 1, "it is not finite")
    (tmp_path / "run" / "failure.txt").write_text("another start failed")
    out = command("federation", "status", tmp_path / "run")[1]
    assert "a server is at work on it" in out
    assert "did not count: a message of client 2 (key-2) in round 1: it is not finite" in out
    assert "stopped" not in out
    server.folder.close()
    assert "stopped: another start failed" in command("federation", "status", tmp_path / "run")[1]
    (tmp_path / "run" / "failure.txt").unlink()
    out = command("federation", "status", tmp_path / "run")[1]
    assert f"no server is at work on it; go on with: fedslr federation resume {tmp_path / 'run'}" in out


def test_a_start_that_failed_early_says_why(tmp_path, command):
    (tmp_path / "failure.txt").write_text("no module 'mine'")
    for name in ("status", "resume"):
        code, _, err = command("federation", name, tmp_path)
        says = f"error: {tmp_path}: holds no federation; its start failed: no module 'mine'\n"
        assert (code, err) == (2, says)
    (tmp_path / "ledger.sqlite").touch()
    code, _, err = command("federation", "status", tmp_path)
    assert code == 2
    assert err == says
    (tmp_path / "failure.txt").unlink()
    code, _, err = command("federation", "status", tmp_path)
    assert err.endswith("; name the folder that `fedslr federation start` was given as --out\n")


def test_what_cannot_run_is_not_started(tmp_path, command, monkeypatch):
    monkeypatch.setattr(submission, "submit", lambda *args: "17")
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"]))
    (tmp_path / "recipe.toml").write_text(federation.asked.to_toml())
    call = ("federation", "start", tmp_path / "recipe.toml", "--out", tmp_path / "run")
    code, out, _ = command(*call)
    assert (code, "`flwr log 17 fedslr`" in out) == (0, True)
    server = federation.server(federation.asked)
    assert command(*call)[::2] == (
        2, f"error: out: a server is at work in {tmp_path / 'run'}; wait for it, or choose another folder\n"
    )  # fmt: skip
    server.folder.close()
    code, _, err = command(*call, "--set", "lr=0.3")
    assert (code, f"this is not the run in {tmp_path / 'run'}: lr was" in err) == (2, True)
    assert command(*call, "--set", "rounds=3")[0] == 0
    assert not (tmp_path / "run" / "failure.txt").exists()


def test_what_could_only_fail_later_is_not_started(tmp_path, command, monkeypatch):
    monkeypatch.setattr(submission, "submit", lambda *args: "17")
    lines = ("clients_per_round = 3", 'model = {name = "cnn"}', "[federation]", 'inputs = "1x8x8"', "classes = 10")
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    call = ("federation", "start", tmp_path / "recipe.toml", "--out", tmp_path / "run")
    assert command(*call)[0] == 0
    says = (
        "error: model.name: 'cnn' takes images (channels, height, width) of 2×2 or more, but inputs have shape [64]; "
        "choose another model\n"
    )
    assert command(*call, "--set", "federation.inputs='64'")[::2] == (2, says)


def test_a_demo_that_is_interrupted_says_how_it_goes_on(tmp_path, command, monkeypatch):
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(loopback, "demo", interrupted)
    code, _, err = command("federation", "demo", "--out", tmp_path)
    assert (code, err) == (130, f"stopped; nothing was trained; remove {tmp_path}\n")
    for name in ("flower", "keys"):
        (tmp_path / name).mkdir()
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"]))
    server = federation.server(federation.asked)
    next(server.rounds())
    server.folder.close()
    going_on = f"go on with: fedslr federation demo --out {tmp_path} --resume\n"
    assert command("federation", "demo", "--out", tmp_path)[::2] == (130, f"stopped; {going_on}")
    assert command("federation", "status", tmp_path / "run")[1].endswith(going_on)


def test_what_a_program_said_last_is_told_in_whole_words(tmp_path):
    said = " ".join(f"word{i}" for i in range(200))
    with pytest.raises(FedslrError, match=r"sh -c failed: … word\d+ .* word199$") as error:
        submission.call(["sh", "-c", f"echo {said}; exit 1"], {"PATH": os.environ["PATH"]})
    assert len(str(error.value)) < 450


def test_status_remove_release_and_predict(tmp_path, command):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"]))
    federation.run()
    code, out, _ = command("federation", "status", tmp_path / "run")
    assert code == 0
    assert "2 of 2 rounds are done" in out
    assert "client 4: node key-4, 7 samples" in out
    (tmp_path / "run" / "summary.json").touch()
    assert command("federation", "resume", tmp_path / "run")[:2] == (
        0, "all 2 rounds are done; there is nothing to go on with\n"
    )  # fmt: skip
    assert command("federation", "remove", tmp_path / "run", 3)[0] == 0
    assert command("federation", "release", tmp_path / "run", 2)[0] == 0
    assert command("federation", "remove", tmp_path / "run", 4)[0] == 0
    assert command("federation", "remove", tmp_path / "run", 4, "--undo")[:2] == (0, "client 4 stays\n")
    out = command("federation", "status", tmp_path / "run")[1]
    assert "client 2: waits for a node" in out
    assert "leaving" in out
    code, _, err = command("federation", "remove", tmp_path / "run", 9)
    assert (code, err) == (2, "error: client: got 9, expected one of 0, 1, 2, 3, 4\n")
    assert command("federation", "status", tmp_path)[0] == 2

    held = federation.federation.clients[1]
    np.savez(tmp_path / "in.npz", x=held.x_test.numpy())
    code, out, _ = command("predict", "--store", tmp_path / "node-1", tmp_path / "in.npz", "--probabilities")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    simulation = federation.simulated()
    expected = simulation.problem.outputs(simulation.personal_params(1), held.x_test.float())
    assert [line["label"] for line in lines] == expected.argmax(1).tolist()
    assert np.allclose([line["probabilities"] for line in lines], expected.detach().softmax(1).numpy(), atol=1e-5)
    np.save(tmp_path / "in.npy", np.zeros((2, 5), np.float32))
    code, _, err = command("predict", "--store", tmp_path / "node-1", tmp_path / "in.npy")
    assert (code, err) == (2, "error: x: inputs are 5, the model takes 6; give an array of shape [samples, 6]\n")
    code, _, err = command("predict", "--store", tmp_path / "run", tmp_path / "in.npy")
    assert code == 2
    assert "is no node's store; name the folder that `store` in the SuperNode's --node-config names" in err
    (kept,) = (tmp_path / "node-2").glob("personal-*")
    kept.write_bytes(b"")
    code, _, err = command("predict", "--store", tmp_path / "node-2", tmp_path / "in.npz")
    assert (code, err.endswith("; the federation's next evaluation writes the model anew\n")) == (2, True)
    inputs = tmp_path / "wrong.npy"
    for wrong, says in (
        (np.full((2, 6), np.nan), f"{inputs}: x has values that are not finite"),
        (np.zeros((0, 6)), f"{inputs}: x is empty, shape [0, 6]"),
        (np.full((2, 6), 1e39), f"{inputs}: x has values that are not finite"),
        (np.full((2, 6), "a"), f"{inputs}: x holds texts, expected an array of numbers"),
        (np.zeros((2, 6), np.int64), "x: the model does not take inputs of type int64: "),
        (
            np.zeros((2, 6), np.uint8),
            "x: it is 8-bit, but the training data was not; scale x as the training data and save it as float32",
        ),
    ):
        np.save(inputs, wrong)
        code, _, err = command("predict", "--store", tmp_path / "node-1", inputs)
        assert (code, len(err.splitlines())) == (2, 1)
        assert err.startswith(f"error: {says}")
    for name in ("empty.npy", "scan.png"):
        (tmp_path / name).touch()
    for name, says in (
        ("none.npz", "does not exist"),
        ("none.png", "does not exist"),
        ("empty.npy", "cannot be read as an array"),
        ("none.npy", "cannot be read as an array: No such file or directory; give a file of numpy.save"),
        ("scan.png", "got a file of another kind; expected .npy or .npz, as numpy saves arrays"),
    ):
        code, _, err = command("predict", "--store", tmp_path / "node-1", tmp_path / name)
        assert code == 2
        assert err.startswith(f"error: {tmp_path / name}: {says}")


def test_without_flower_one_line_says_so(command, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    code, _, err = command("federation", "demo", "--out", tmp_path / "x")
    assert (code, err) == (2, "error: federations need Flower; pip install 'fedslr[deploy]'\n")


# --- real processes -------------------------------------------------------------------------------------------------


def wait_for(what: Callable[[], Any], seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.1)


ABANDONING = """
import os, signal, sys
from pathlib import Path
from fedslr.deploy.loopback import RUN_ONCE, Loopback
link = Loopback(Path(sys.argv[1])).__enter__()
link._start("sleeper", ["sleep", "1000"], RUN_ONCE)
print(link.processes["sleeper"].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_the_one_that_started_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ABANDONING, str(tmp_path)], capture_output=True, text=True, check=False
    )
    group = int(done.stdout)

    def is_gone() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(is_gone)


ORPHANED = """
import os, sys, threading
from pathlib import Path
from fedslr.deploy import flower
from fedslr.storage.locks import lock
flower.EXIT_SECONDS = flower.POLL_SECONDS = 0.1
parent, looks = os.getppid, []
def look():
    looks.append(parent())
    if len(looks) == 10:  # it has looked for its parent many times, and stayed
        print("ready", flush=True)
    return looks[-1]
os.getppid = look
kept = lock(Path(sys.argv[1]))
flower.end_with_parent()
threading.Event().wait()
"""
ORPHANING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_server_whose_superlink_is_gone_leaves_the_folder(tmp_path):
    """Even one that waits for something that never comes."""
    command = [sys.executable, "-c", ORPHANING, ORPHANED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        assert is_taken(tmp_path)
        parent.kill()
    wait_for(lambda: not is_taken(tmp_path))


def test_a_real_federation_outlives_a_killed_node_and_a_killed_server(tmp_path):
    """TLS and keys on loopback. After the first round a node is killed, and the SuperLink with the ServerApp in it;
    both are started again and the run is resumed. A node whose key nobody registered gets nowhere. The nodes do not
    train their first personal part before the round is over, so that it would not end if their reply waited for it.
    They do not train their second before the kills, so that the run is not over by then."""
    # An order that a kill lost is sent again after the deadline.
    limits = ["federation.deadline=100", "federation.minimum=2"]
    changes = ["rounds=3", "clients_per_round=2", "evaluate.every=2", *limits]
    asked = recipe("deployed_methods:Patient", clients=2, changes=changes)
    federation = Federation(tmp_path, make_federation([40, 30]), asked)
    run = tmp_path / "run"

    def rounds() -> int:
        return len(read_records(run)) if (run / "metrics.jsonl").exists() else 0

    with loopback.Loopback(tmp_path) as link:
        link.env |= {"PYTHONPATH": str(Path(__file__).parent.parent), "AWAITED_FILES": str(tmp_path / "awaited")}
        awaited = {"0": run / "metrics.jsonl", "1": tmp_path / "killed"}
        (tmp_path / "awaited").write_text(json.dumps({number: str(file) for number, file in awaited.items()}))

        def start(number: int) -> None:
            link.start_node(f"{number}", number, tmp_path / f"data-{number}", tmp_path / f"node-{number}")

        def fedslr_command(*args: str) -> None:
            submission.call([sys.executable, "-m", "fedslr", "federation", *args], link.env)

        link.start_superlink()
        for number, data in enumerate(federation.federation.clients):
            loopback.write_data(tmp_path / f"data-{number}" / "data.npz", data)
            link.register(f"{number}")
            start(number)
        keys.make_node_key(link.keys / "stranger")
        link.start_node("stranger", 1, tmp_path / "data-1", tmp_path / "stranger")
        (tmp_path / "recipe.toml").write_text(asked.to_toml())
        fedslr_command("start", str(tmp_path / "recipe.toml"), "--out", str(run))
        wait_for(lambda: "Failed to activate" in (link.logs / "stranger.log").read_text())
        link.stop("stranger")

        wait_for(lambda: rounds() >= 1)
        link.stop("1", signal.SIGKILL)
        link.stop("superlink", signal.SIGKILL)
        done = rounds()
        awaited["1"].write_text("both")
        link.start_superlink()
        start(1)
        fedslr_command("resume", str(run))
        records = loopback.follow(run, 3, print, limit=1800)

    assert 1 <= done < 3
    assert [r["clients"] for r in records] == [[0, 1]] * 3
    assert not (tmp_path / "stranger").exists()
    assert distance(federation, federation.simulated()) <= 1e-6
    assert scores(tmp_path / "node-0", federation.federation.clients[0].x_test.float()).shape == (7, 3)
