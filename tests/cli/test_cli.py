"""The command line as a person meets it: what works, and what is said when something does not."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import typer.main
from torch.nn.functional import cross_entropy

import fedslr
from fedslr.cli import main, run_commands
from fedslr.core import schema
from fedslr.core.machine import machine_failure
from fedslr.data import DataOptions
from fedslr.run import recipe_text, recipes

TINY = """
rounds = 2
clients_per_round = 2
batch_size = 20
seed = 0
algorithm = { name = "fedslr", eta_g = 5, rank_penalty = 5e-3, l1_penalty = 3e-3 }
data = { name = "digits", clients = 4, samples_per_client = 20 }
evaluate = { every = 1 }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_a_run_leaves_the_folder_it_promises(command, recipe, tmp_path):
    out = tmp_path / "out"
    code, printed, progress = command("run", recipe, "--out", out)
    assert code == 0
    assert {p.name for p in out.iterdir()} - {".lock"} == {
        "checkpoint",
        "config.toml",
        "labels.json",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    }
    for text in ("accuracy, global model", "accuracy, personal models", "% of dense", "sent down", "sent up", str(out)):
        assert text in " ".join(printed.split()) or text in printed.replace("\n", "")
    assert "round 2/2" in progress
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    for line in lines:
        assert {"round", "lr", "clients", "bytes_down", "bytes_up", "rank", "seconds"} <= line.keys()
        assert {"accuracy_global", "accuracy_personal", "accuracy_global_per_client"} <= line.keys()
        assert len(line["accuracy_personal_per_client"]) == 4
    summary = json.loads((out / "summary.json").read_text())
    assert summary["algorithm"] == "fedslr"
    assert summary["bytes"]["down"] == sum(line["bytes_down"] for line in lines)


@dataclass(frozen=True)
class Mine(fedslr.FedAvg):
    """A method that a recipe finds in its module."""

    name: ClassVar[str] = "mine"


def hidden() -> fedslr.FedAvg:
    @dataclass(frozen=True)
    class Hidden(fedslr.FedAvg):
        """A method that no recipe finds."""

        name: ClassVar[str] = "hidden"

    return Hidden()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, True),
        ({"loss": lambda outputs, y: 3 * cross_entropy(outputs, y)}, False),
        ({"selection": lambda rng, size, examples: [0, 1]}, False),
        ({"model": fedslr.models.build("mlp", (1, 8, 8), 10, 0)}, False),
        ({"algorithm": Mine()}, True),
        ({"algorithm": hidden()}, False),
    ],
    ids=["names", "loss", "selection", "model", "method", "hidden"],
)
def test_a_run_knows_whether_its_recipe_is_all_of_it(given, named, tmp_path, command):
    federation = fedslr.load("digits", clients=4, samples_per_client=20)
    asked = {"algorithm": fedslr.FedAvg(), "model": "mlp", "rounds": 1, "out": tmp_path / "a", **given}
    result = fedslr.run(federation=federation, **asked)
    assert result.summary["rerunnable"] is named
    if "model" in given:
        assert fedslr.open_run(tmp_path / "a").summary == result.summary
        assert command("export", tmp_path / "a", "--global")[0] == 0


def test_a_model_of_ones_own_by_name_is_rerunnable(recipe, tmp_path, command, monkeypatch):
    (tmp_path / "my_reader.py").write_text(
        "from torch import nn\ndef reader(shape, classes):\n"
        "    size = shape[0] * shape[1] * shape[2]\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, 9), nn.ReLU(), nn.Linear(9, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert command("run", recipe, "--out", "a", "--set", "model.name=my_reader:reader")[0] == 0
    assert json.loads(Path("a/summary.json").read_text())["rerunnable"] is True
    assert command("run", "a/config.toml", "--out", "b")[0] == 0
    assert command("figures", "a", "--only", "tsne", "--out", "figures")[0] == 0


@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_a_model_of_ones_own_that_fails_in_training_is_a_line(engine, recipe, tmp_path, command, monkeypatch):
    (tmp_path / "my_sulker.py").write_text(
        "from torch import nn\n"
        "class Sulker(nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(shape[0] * shape[1] * shape[2], classes)\n"
        "    def forward(self, x):\n"
        "        self.asked = getattr(self, 'asked', 0) + 1\n"
        "        {}['mood'] if self.asked > 6 else None\n"
        "        return self.layer(x.flatten(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = ("--set", "model.name=my_sulker:Sulker", "--set", f"engine={engine}")
    code, _, err = command("run", recipe, "--out", "a", *asked)
    assert_one_plain_line(code, err, "my_sulker.py, line 8: KeyError: 'mood'")
    code, _, err = command("compare", recipe, "--out", "b", "--methods", "fedavg", "--seeds", "0", *asked)
    assert code == 2
    assert "my_sulker.py, line 8: KeyError: 'mood'" in err


MINE = """
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch

import fedslr
from fedslr.core import tree


@dataclass(frozen=True)
class Half(fedslr.FedAvg):
    name: ClassVar[str] = "half"
    share: Annotated[float, fedslr.core.schema.fraction, "of the way that the server goes"] = 0.5

    def aggregate(self, server, ledger, mean_upload, round):
        return super().aggregate(server, ledger, tree.map(lambda d: self.share * d, mean_upload), round)


class Nameless(fedslr.FedAvg):
    pass


class Undecorated(Half):
    name = "undecorated"
    beta: float = 0.5


@dataclass(frozen=True)
class Taken(fedslr.FedAvg):
    name: ClassVar[str] = "fedslr"


@dataclass(frozen=True)
class Abstract(fedslr.Algorithm):
    name: ClassVar[str] = "abstract"


@dataclass(frozen=True)
class Raises(Half):
    name: ClassVar[str] = "raises"

    def local_update(self, problem, client, ledger, payload, data, round):
        return client, payload["conv9"]


@dataclass(frozen=True)
class Diverging(Half):
    name: ClassVar[str] = "diverging"

    def aggregate(self, server, ledger, mean_upload, round):
        return super().aggregate(server, ledger, tree.map(lambda d: d * float("nan"), mean_upload), round)


@dataclass(frozen=True)
class Singular(Half):
    name: ClassVar[str] = "singular"

    def aggregate(self, server, ledger, mean_upload, round):
        raise torch.linalg.LinAlgError("it does not converge")


class Kept(NamedTuple):
    velocity: dict


@dataclass(frozen=True)
class Keeping(Half):
    name: ClassVar[str] = "keeping"

    def init_client(self, w):
        return Kept(w)


@dataclass(frozen=True)
class Maybe(Half):
    name: ClassVar[str] = "maybe"
    k: Annotated[int | None, fedslr.core.schema.countable, "nothing"] = None


def first(rng, size, examples):
    return range(size)


def twice(rng, size, examples):
    return [1, 1]


def broken(rng, size, examples):
    return examples[10**6]
"""
LINE = next(n for n, line in enumerate(MINE.splitlines(), 1) if "conv9" in line)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def test_a_method_and_a_selection_of_ones_own_by_name(mine, recipe, command):
    own = ("--set", "algorithm.name=mine:Half", "--set", "algorithm.share=1", "--set", "selection=mine:first")
    assert command("run", recipe, "--out", "a", *own)[0] == 0
    summary = json.loads(Path("a/summary.json").read_text())
    assert (summary["algorithm"], summary["rerunnable"]) == ("half", True)
    lines = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert all(line["clients"] == list(range(len(line["clients"]))) for line in lines)
    assert command("run", "a/config.toml", "--out", "b")[0] == 0
    assert (
        command("run", recipe, "--out", "c", "--set", "algorithm.name=fedavg", "--set", "selection=mine:first")[0] == 0
    )
    ends = [json.loads(Path(f"{x}/summary.json").read_text())["accuracy"] for x in "abc"]
    assert ends[0] == ends[1] == ends[2]
    assert command("run", recipe, "--out", "a", "--resume", *own, "--set", "rounds=9")[0] == 0
    assert command("export", "a", "--global")[0] == 0
    result = fedslr.open_run("a")
    assert result.algorithm.share == 1


def test_a_method_of_ones_own_is_compared_and_swept(mine, recipe, command):
    code, printed, _ = command("compare", recipe, "--methods", "fedavg,mine:Half", "--out", "c", "--seeds", "0")
    assert code == 0
    assert "Half" not in printed
    assert "half " in printed.splitlines()[-2]
    assert Path("c/half-seed0/summary.json").exists()
    own = ("--set", "algorithm.name=mine:Half")
    assert command("sweep", recipe, *own, "--over", "share=0.5,1", "--seeds", "0", "--out", "s")[0] == 0
    assert Path("s/share=0.5-seed0/summary.json").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("algorithm.name=mine:Hafl", "mine.py) has no 'Hafl'; did you mean 'Half'?"),
        ("algorithm.name=mine.py:Half", "there is no module 'mine.py' in this folder or on the Python path; leave"),
        ("algorithm.name=nobody:Half", "algorithm.name: got 'nobody:Half', but there is no module 'nobody'"),
        ("algorithm.name=mine:first", "got 'mine:first', expected a subclass of fedslr.Algorithm"),
        ("algorithm.name=mine:Nameless", "Nameless is not a dataclass; write @dataclass(frozen=True)"),
        ("algorithm.name=mine:Undecorated", "Undecorated is not a dataclass; write @dataclass(frozen=True)"),
        ("algorithm.name=mine:Taken", "Taken has the name 'fedslr' of another method; choose another name"),
        ("algorithm.name=mine:Abstract", "algorithm: Abstract lacks aggregate, broadcast"),
        ("algorithm.name=mine:Raises", f"mine.py, line {LINE}: KeyError: 'conv9'"),
        ("algorithm.name=mine:Singular", "the global model diverged: it does not converge; lower lr"),
        ("algorithm.name=mine:Diverging", "the global model diverged: 'conv1.weight' has numbers that are not finite"),
        ("selection=mine:twice", "selection: round 1 got [1, 1], expected some of the clients"),
        ("selection=mine:last", "mine.py) has no 'last'"),
        ("selection=mine:broken", "IndexError: list index out of range"),
        ("selection=a:b:c", 'selection: got "a:b:c", expected'),
        (
            "selection=last",
            'selection: got "last", expected one of uniform, bernoulli, by-size, authors, or module:function',
        ),
        ("selection=custom", "selection: got 'custom', expected one of uniform"),
    ],
)
def test_a_mistake_in_ones_own_is_a_line(change, says, mine, recipe, command):
    code, _, err = command("run", recipe, "--out", "a", "--set", change)
    assert_one_plain_line(code, err, says)
    assert "eta_g" not in err  # FedAvg has none that could be lowered


def test_a_module_that_pythons_own_hides_is_told(mine, recipe, command):
    Path("statistics.py").write_text("class Net: pass\n")
    code, _, err = command("run", recipe, "--out", "a", "--set", "model.name=statistics:Net")
    assert_one_plain_line(code, err, "Python has a module of the same name, which hides statistics.py")


def test_an_optional_hyperparameter_is_swept(mine, recipe, command):
    assert command("sweep", recipe, "--set", "algorithm.name=mine:Maybe", "--over", "k=1,2", "--out", "s")[0] == 0


def test_another_state_than_before_is_told(mine, recipe, command):
    own = ("--out", "a", "--set", "algorithm.name=mine:Keeping")
    assert command("run", recipe, *own)[0] == 0
    Path("mine.py").write_text(MINE.replace("velocity", "impulse"))
    sys.modules.pop("mine")
    code, _, err = command("run", recipe, *own, "--set", "rounds=9", "--resume")
    assert_one_plain_line(code, err, "the checkpoint's Kept has the fields velocity, but the method's has impulse")


def test_two_classes_of_one_name_are_told_apart_by_what_they_are_called(mine, recipe, command):
    Path("mine2.py").write_text(MINE.replace('"half"', '"half2"'))
    code, printed, _ = command("compare", recipe, "--methods", "mine:Half,mine2:Half", "--out", "c", "--seeds", "0")
    assert code == 0
    assert {"half", "half2"} <= {line.partition(" ")[0] for line in printed.splitlines()}


def test_methods_that_are_called_the_same(mine, recipe, command):
    Path("mine3.py").write_text(MINE)
    code, _, err = command("compare", recipe, "--methods", "mine:Half,mine3:Half", "--out", "c")
    assert_one_plain_line(code, err, "methods: got 'half,half', expected one or more different values, such as")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            MemoryError("Unable to allocate 96.9 GiB"),
            "not enough memory: Unable to allocate 96.9 GiB; use fewer",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried …"),
            "not enough memory on the GPU; use fewer clients",
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA …"),
            "not enough memory on the GPU; use fewer clients",
        ),
    ],
)
def test_memory_that_is_not_there_is_a_line(error, line, recipe, command, tmp_path, monkeypatch):
    def run_recipe(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(run_commands.api, "run_recipe", run_recipe)
    code, _, err = command("run", recipe, "--out", tmp_path / "a")
    assert_one_plain_line(code, err, f"error: {line}")
    code, _, err = command("compare", recipe, "--methods", "local,fedavg", "--jobs", 1, "--out", tmp_path / "b")
    assert_one_plain_line(code, err, f"local-seed0: {line}")


def test_an_allocation_that_pytorch_refuses_is_a_line():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert "not enough memory" in (machine_failure(caught.value) or "")
    assert machine_failure(RuntimeError("size mismatch")) is None


def test_a_gpu_that_gives_up_is_a_line_without_advice_to_who_writes_kernels():
    told = machine_failure(
        RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`")
    )
    assert told is not None
    assert told.startswith("the GPU failed: an illegal memory access was encountered; ")
    assert "TORCH" not in told
    assert told.endswith("--resume")
    asserted = machine_failure(RuntimeError("CUDA error: device-side assert triggered\nSearch for it"))
    assert "out of range" in (asserted or "")


def test_a_written_config_is_rerunnable(command, recipe, tmp_path):
    assert command("run", recipe, "--out", tmp_path / "a", "--set", "lr=0.05")[0] == 0
    assert tomllib.loads((tmp_path / "a" / "config.toml").read_text())["lr"] == 0.05
    assert command("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b")[0] == 0
    a, b = (json.loads((tmp_path / x / "summary.json").read_text()) for x in "ab")
    assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}


def test_a_run_that_never_began_is_begun(command, recipe, tmp_path):
    """A supervisor always says --resume."""
    code, _, err = command("run", recipe, "--out", tmp_path / "out", "--resume")
    assert code == 0
    assert "holds no run yet; this is its beginning" in " ".join(err.split())


def test_resume_goes_on(command, recipe, tmp_path):
    out = tmp_path / "out"
    assert command("run", recipe, "--out", out)[0] == 0
    assert command("run", recipe, "--out", out, "--resume", "--set", "rounds=3")[0] == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


def test_methods_are_listed(command):
    code, printed, _ = command("algorithms")
    assert code == 0
    for name in fedslr.ALGORITHMS:
        assert name in printed
    assert "eta_g = 10  proximal step size" in printed


@pytest.mark.parametrize("method", [*fedslr.ALGORITHMS])
def test_a_recipe_with_every_key_is_the_defaults(command, tmp_path, method):
    code, printed, _ = command("recipe", method)
    assert code == 0
    (tmp_path / "mine.toml").write_text(printed, "utf-8")
    assert recipes.read(tmp_path / "mine.toml") == recipes.parse({"algorithm": {"name": method}})
    told = {line.removeprefix("# ").split(" = ")[0].split(" =")[0] for line in printed.splitlines()}
    assert {*recipe_text.PLAIN, *schema.fields(DataOptions), *(key for _, key in recipe_text.GROUPED.values())} <= told


OWN = """
from dataclasses import dataclass
from typing import Annotated
from fedslr import FedAvg
from fedslr.core.schema import positive

@dataclass(frozen=True)
class Own(FedAvg):
    name = "own"
    pull: Annotated[float, positive, "how hard\\nit pulls"] = 0.5
    cap: float | None = None
"""


def test_a_recipe_for_a_method_of_ones_own(command, tmp_path, monkeypatch):
    """Help of several lines, and a hyperparameter without a default."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe_method.py").write_text(OWN)
    code, printed, _ = command("recipe", "recipe_method:Own")
    assert code == 0
    table = tomllib.loads(printed)
    assert table["algorithm"] == {"name": "recipe_method:Own", "pull": 0.5}
    assert "# how hard it pulls; a number above 0" in printed
    assert "\n# cap =" in printed


def test_a_recipe_is_utf8_wherever_it_is_written(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([sys.executable, "-m", "fedslr", "recipe"], capture_output=True, env=environment, check=True)
    assert "½‖v‖²" in done.stdout.decode("utf-8")


def test_a_recipe_for_no_method(command):
    code, printed, told = command("recipe", "fedslrr")
    assert (code, printed) == (2, "")
    assert told.startswith("error: recipe: got \"fedslrr\", no such method; did you mean 'fedslr'?")


def test_runs_are_shown_side_by_side(command, recipe, tmp_path):
    for method in ("fedslr", "fedavg"):
        assert command("run", recipe, "--out", tmp_path / method, "--set", f"algorithm.name={method}")[0] == 0
    picture = tmp_path / "curves.png"
    code, printed, _ = command("show", tmp_path / "fedslr", tmp_path / "fedavg", "--plot", picture)
    assert code == 0
    assert "fedavg" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_diagnostics_are_recorded_and_warned_of_once(command, recipe, tmp_path):
    code, _, err = command("run", recipe, "--out", tmp_path / "out", "--diagnostics")
    assert code == 0
    assert err.count("above 1/(2L)") == 1
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"potential", "stationarity", "gradient_mapping", "smoothness"} <= last["diagnostics"].keys()


def test_version_and_module_entry():
    done = subprocess.run([sys.executable, "-m", "fedslr", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"fedslr {fedslr.__version__}"


SCRIPT = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())["project"]["scripts"][
    "fedslr"
]


@pytest.mark.parametrize("call", [["-m", "fedslr"], ["fedslr"]], ids=["module", "script"])
def test_an_interrupt_while_it_is_imported_is_a_line(call, tmp_path):
    """A torch that interrupts whoever imports it stands for a person who is quick."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(5)\n")
    module, _, main = SCRIPT.partition(":")
    path = os.pathsep.join([str(tmp_path), str(Path(fedslr.__path__[0]).parent)])
    (tmp_path / "fedslr").write_text(f"from {module} import {main}\n{main}()\n")
    done = subprocess.run(
        [sys.executable, *call, "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        # Tests that were started in the background ignore interrupts, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped before anything was done\n")


def test_help_names_every_command(command):
    code, printed, _ = command("--help")
    assert code == 0
    for name in ("run", "show", "algorithms"):
        assert name in printed


def commands_of(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command below a group, by the words that call it."""
    found = {}
    for name, made in group.commands.items():
        found |= commands_of(made, (*path, name)) if hasattr(made, "commands") else {(*path, name): made}
    return found


COMMANDS = commands_of(typer.main.get_command(main.app))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_tells_what_every_argument_and_option_is(path, command):
    """What the functions declare, not what the parser kept of it: a click that typer does not know loses some."""
    code, printed, _ = command(*path, "--help")
    assert code == 0
    assert "\\" not in printed
    # Long lines are broken at hyphens too.
    shown = " ".join(printed.split()).replace("- ", "-")
    declared = typing.get_type_hints(COMMANDS[path].callback.__wrapped__, include_extras=True)
    for name in declared.keys() - {"return"}:
        (told,) = declared[name].__metadata__
        assert told.help, name
        assert told.help.replace("- ", "-") in shown, name


def test_a_defect_is_not_hidden(command, recipe, tmp_path, monkeypatch):
    """Exit code 1 and a traceback are for us: only a person's mistake is answered with a line."""
    # A function of this file would count as the user's own code.
    monkeypatch.setattr(run_commands.api, "run_recipe", math.sqrt)
    with pytest.raises(TypeError):
        command("run", recipe, "--out", tmp_path / "out")


def test_an_error_inside_a_client_names_it(monkeypatch):
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(fedslr.FedAvg, "local_update", broken)
    with pytest.raises(RuntimeError) as raised:
        fedslr.run(fedslr.FedAvg(), fedslr.load("digits", clients=4), rounds=1, clients_per_round=1)
    assert raised.value.__notes__[0].startswith("in round 1, client ")


def test_a_bare_command_is_help(command):
    code, printed, _ = command()
    assert code == 0
    assert "algorithms" in printed
    assert len(printed.splitlines()) > 5


def test_names_are_not_markup(command, recipe, tmp_path):
    out = tmp_path / "x[/b]y[red]"
    code, printed, _ = command("run", recipe, "--out", out)
    assert code == 0
    assert "x[/b]y[red]" in printed.replace("\n", "")
    assert command("show", out)[0] == 0


def test_a_terminal_without_greek_gets_question_marks():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "fedslr", "algorithms"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr


CALLS = """
import sys
from fedslr.cli import main as cli
for call in sys.argv[1:]:
    sys.argv = ["fedslr", *call.split("|")]
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            raise
"""


def test_text_is_utf8_whatever_the_locale(recipe, tmp_path):
    recipe.write_text(TINY.replace("clients = 4,", 'root = "données", clients = 4,'), "utf-8")
    out = tmp_path / "out"
    calls = [f"run|{recipe}|--out|{out}", f"run|{recipe}|--out|{out}|--resume", f"show|{out}", f"report|{out}"]
    calls += [f"export|{out}|--global", f"figures|{out}|--only|accuracy|--out|{tmp_path}"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", CALLS, *calls], capture_output=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "données" in (out / "config.toml").read_text("utf-8")
    assert "données" in (out / "report.html").read_text("utf-8")


def test_a_damaged_summary_is_one_line(command, recipe, tmp_path):
    command("run", recipe, "--out", tmp_path / "out")
    summary = tmp_path / "out" / "summary.json"
    for text, words in (("{}", "'rounds'"), ('{"rounds": ', "Expecting value")):
        summary.write_text(text)
        code, _, err = command("show", tmp_path / "out")
        assert_one_plain_line(code, err, f"{summary}: cannot be read: {words}")
    assert command("run", recipe, "--out", tmp_path / "out", "--resume")[0] == 0
    assert command("show", tmp_path / "out")[0] == 0


def test_a_picture_needs_a_kind(command, recipe, tmp_path):
    command("run", recipe, "--out", tmp_path / "out")
    code, _, err = command("show", tmp_path / "out", "--plot", tmp_path / "picture")
    assert_one_plain_line(code, err, "expected a file that ends in .png, .pdf or .svg")


def test_byte_totals_go_on_after_a_resume(command, recipe, tmp_path):
    out = tmp_path / "out"
    command("run", recipe, "--out", out)
    _, _, resumed = command("run", recipe, "--out", out, "--resume", "--set", "rounds=3")
    _, _, whole = command("run", recipe, "--out", tmp_path / "whole", "--set", "rounds=3")
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]


def test_fewer_rounds_than_there_are_is_refused(command, recipe, tmp_path):
    out = tmp_path / "out"
    command("run", recipe, "--out", out)
    code, _, err = command("run", recipe, "--out", out, "--resume", "--set", "rounds=1")
    assert_one_plain_line(code, err, "rounds: got 1, but the run already has 2; ask for 2 or more")


# --- wrong requests: exit code 2, one plain line, nothing lost ------------------------------------------------------

WRONG_KEYS = [
    ("clients_per_rounds=3", "unknown key 'clients_per_rounds' in the recipe; did you mean 'clients_per_round'?"),
    ("algorithm.eta=3", "unknown key 'eta' in algorithm; did you mean 'eta_g'?"),
    ("data.cliens=3", "unknown key 'cliens' in data; did you mean 'clients'?"),
    ("data.client=3", "data.client: got 3, expected a text"),
    ("model.nam=cnn", "unknown key 'nam' in model; did you mean 'name'?"),
    ("evaluate.evry=3", "unknown key 'evry' in evaluate; did you mean 'every'?"),
    ("rounds=0", "rounds: got 0, expected a whole number from 1 to 100,000,000"),
    ("rounds=2.5", "rounds: got 2.5, expected a whole number from 1 to 100,000,000"),
    ("rounds=many", 'rounds: got "many", expected a whole number from 1 to 100,000,000'),
    ("rounds=true", "rounds: got true, expected a whole number from 1 to 100,000,000"),
    ("clients_per_round=50", "clients_per_round: got 50, but there are only 4 clients; expected 1 to 4"),
    ("batch_size=-1", "batch_size: got -1, expected a whole number from 1 to 100,000,000"),
    ("lr=-0.1", "lr: got -0.1, expected a number above 0"),
    ("lr=nan", "lr: got NaN, expected a number above 0"),
    ("lr_decay=1.5", "lr_decay: got 1.5, expected a number above 0 and at most 1"),
    ("weight_decay=-1", "weight_decay: got -1, expected a number 0 or above"),
    ("seed=-1", "seed: got -1, expected a whole number from 0 to"),
    ("seed=99999999999999999999999", "seed: got 99999999999999999999999, expected a whole number from 0 to"),
    ("device=meta", "device: got 'meta', which this machine cannot use"),
    ("algorithm.name=[1]", "algorithm.name: got [1], no such method"),
    ("evaluate=3", "evaluate: got 3, expected a table [evaluate]"),
    ("evaluate_every=3", "did you mean 'evaluate.every'?"),
    ("algorithm.eta_g=1e300", "the global model diverged"),
    (
        "data.clients=5000",
        "data.clients: 5000 clients with 20 training samples each need 100000 samples, but the dataset has 1347",
    ),
    ("data.samples_per_client=100000000000000", "expected a whole number from 1 to 100,000,000"),
    *(
        (f"{key}=9999999999999999999999", f"{key}: got 9999999999999999999999, expected a whole number from ")
        for key in (
            *("rounds", "clients_per_round", "batch_size", "epochs", "personal_epochs", "evaluate.every"),
            *("evaluate.clients", "checkpoint.every", "data.clients", "data.test_samples"),
        )
    ),
    ("data.test_samples=1", "data.test_samples: got 1, too few for test sets"),
    ("dtype=float8", 'dtype: got "float8", expected one of float32, float64'),
    ("device=tpu9", "device: got 'tpu9', which this machine cannot use; try auto or cpu"),
    ("store=cloud", 'store: got "cloud", expected one of memory, disk'),
    ("algorithm.name=fedsrl", "algorithm.name: got \"fedsrl\", no such method; did you mean 'fedslr'?"),
    ("algorithm.name=3", "algorithm.name: got 3, no such method"),
    ("name=fedavg", "--set name: may be algorithm.name or data.name or model.name; write one of them"),
    ("algorithm.rank_penalty=-1e-4", "algorithm.rank_penalty: got -0.0001, expected a number 0 or above"),
    ("algorithm.eta_g=0", "algorithm.eta_g: got 0, expected a number above 0"),
    ("algorithm=fedavg", 'algorithm: got "fedavg", expected a table'),
    ("data.name=digit", "data.name: got 'digit', no such dataset; did you mean 'digits'?"),
    ("data.split=dirichlet2", 'data.split: got "dirichlet2", expected one of iid, dirichlet'),
    ("data.alpha=0", "data.alpha: got 0, expected a number above 0"),
    (
        "data.samples_per_client=5000",
        "data.clients: 4 clients with 5000 training samples each need 20000 samples, but the dataset has 1347",
    ),
    ("model.name=resnet", "model.name: got 'resnet', no such model"),
    ("checkpoint.every=0", "checkpoint.every: got 0, expected a whole number from 1 to 100,000,000"),
    ("lr.x=1", 'lr: got {"x": 1}, expected a number above 0'),
    ("rounds", "--set: got 'rounds', expected key=value"),
    ("lr=1e30", "training diverged: "),
]


def assert_one_plain_line(code: int, err: str, says: str) -> None:
    lines = [line for line in err.splitlines() if not line.startswith("round ")]
    assert code == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert says in lines[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(("change", "says"), WRONG_KEYS, ids=[c for c, _ in WRONG_KEYS])
def test_wrong_keys_and_values(change, says, command, recipe, tmp_path):
    code, _, err = command("run", recipe, "--out", tmp_path / "out", "--set", change)
    assert_one_plain_line(code, err, says)


def test_a_mistake_is_blamed_on_where_it_was_made(command, recipe, tmp_path):
    good, bad = ("--set", "lr=0.05"), ("--set", "algorithm.eta_g=-3")
    code, _, err = command("run", recipe, *good, *bad, "--out", tmp_path / "out")
    assert_one_plain_line(code, err, "error: --set algorithm.eta_g=-3: algorithm.eta_g: got -3, expected")
    name, bad = ("--set", "algorithm.name=ditto"), ("--set", "lam=-1")
    code, _, err = command("run", recipe, *name, *bad, "--out", tmp_path / "out")
    assert_one_plain_line(code, err, "error: --set lam=-1: algorithm.lam: got -1, expected")
    recipe.write_text("eta_g = 3\n" + TINY)
    code, _, err = command("run", recipe, *good, "--out", tmp_path / "out")
    assert_one_plain_line(code, err, f"error: {recipe}: unknown key 'eta_g' in the recipe; did you mean 'algorithm.")


def test_set_takes_a_key_by_its_last_name(recipe):
    changed = recipes.read(recipe, ["alpha=3", "rank_penalty=0.5", "split=iid"])
    assert (changed.data.alpha, changed.data.split, changed.algorithm.rank_penalty) == (3, "iid", 0.5)
    assert recipes.read(recipe, ["lam=0.5", "algorithm.name=ditto"]).algorithm == fedslr.Ditto(lam=0.5)


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


WRONG_CALLS = {
    "no such recipe": (
        lambda p: ["run", p / "none.toml"],
        "none.toml: there is no such file; `fedslr recipes` lists the recipes of fedslr",
    ),
    "a folder as recipe": (lambda p: ["run", p], "a recipe is a file, but this is a folder; name a TOML file"),
    "not TOML": (
        lambda p: ["run", write(p / "bad.toml", "rounds = = 3")],
        "this recipe is not valid TOML: Invalid value (at line 1",
    ),
    "not text": (
        lambda p: ["run", write(p / "bin.toml", b"\xff\xfe\x00")],
        "this recipe is not text in UTF-8",
    ),
    "unwritable folder": (
        lambda p: ["run", p / "tiny.toml", "--out", write(p / "file", "x") / "sub"],
        "out: cannot write to",
    ),
    "unknown option": (lambda p: ["run", p / "tiny.toml", "--fast"], "--fast"),
    "an option misspelt": (lambda p: ["run", p / "tiny.toml", "--resum"], "--resume"),
    "unknown command": (lambda p: ["rum"], "No such command 'rum'. Did you mean 'run'? (see fedslr --help)"),
    "an argument too many": (lambda p: ["data", "nope"], "No such command 'nope' (see fedslr data --help)"),
    "missing recipe": (lambda p: ["run"], "Missing argument 'RECIPE' (see fedslr run --help)"),
    "show of nothing": (lambda p: ["show", p / "none"], "none: no such folder"),
    "show of an unfinished run": (
        lambda p: ["show", write(p / "config.toml", "x").parent],
        "no finished run in it (summary.json is missing); finish its run with --resume",
    ),
    "show of what lies deeper": (
        lambda p: ["show", write(p / "a" / "b" / "c" / "config.toml", "x").parents[2]],
        "a: no run directly in it, but there are runs in ",
    ),
    "a deployment": (
        lambda p: ["run", write(p / "d.toml", "[federation]\nclasses = 2")],
        "d.toml: unknown key 'federation' in the recipe; this recipe is a deployment's, for fedslr federation start",
    ),
    "out is a file": (
        lambda p: ["run", p / "tiny.toml", "--out", write(p / "file", "x")],
        "file: File exists; choose another folder",
    ),
    "out has a long name": (lambda p: ["run", p / "tiny.toml", "--out", p / ("x" * 300)], "File name too long"),
    "somebody's metrics": (
        lambda p: ["run", p / "tiny.toml", "--out", write(p / "metrics.jsonl", "mine").parent],
        "already holds a run",
    ),
    "resume without a config": (
        lambda p: ["run", p / "tiny.toml", "--resume", "--out", write(p / "metrics.jsonl", "mine").parent],
        "config.toml is missing; restore it",
    ),
    "a table set on a word": (
        lambda p: ["run", write(p / "w.toml", 'algorithm = "x"'), "--set", "algorithm.name=fedavgg"],
        "did you mean 'fedavg'?",
    ),
    "diagnostics of fedavg": (
        lambda p: ["run", p / "tiny.toml", "--set", "algorithm.name=fedavg", "--diagnostics", "--out", p / "o"],
        "diagnostics: fedavg has no convergence theory here",
    ),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls(case, command, recipe, tmp_path):
    make, says = WRONG_CALLS[case]
    code, _, err = command(*make(tmp_path))
    assert_one_plain_line(code, err, says)


def test_a_mistake_in_ones_own_code_is_a_line_and_a_traceback_for_those_who_ask(command, recipe, tmp_path, monkeypatch):
    (tmp_path / "my_mistake.py").write_text("def clients():\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    wrong = (recipe, "--out", tmp_path / "out", "--set", "data.name=my_mistake:clients")
    code, _, err = command("run", *wrong)
    assert_one_plain_line(code, err, "my_mistake.py, line 2: ZeroDivisionError: division by zero (FEDSLR_TRACEBACK=1")
    monkeypatch.setenv("FEDSLR_TRACEBACK", "1")
    for call in (("run", *wrong), ("compare", *wrong, "--methods", "fedavg")):
        code, _, err = command(*call)
        assert code == 2
        assert "return 1 / 0" in err
        assert "error: " in err.splitlines()[-1]


def test_a_method_that_returns_something_else_is_named_with_its_client(command, recipe, tmp_path, monkeypatch):
    (tmp_path / "my_return.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\nimport fedslr\n"
        "@dataclass(frozen=True)\n"
        "class Upload(fedslr.FedAvg):\n"
        "    name: ClassVar[str] = 'upload'\n"
        "    def local_update(self, *given):\n"
        "        return super().local_update(*given)[1]\n"
    )
    monkeypatch.chdir(tmp_path)
    wrong = ("--set", "algorithm.name=my_return:Upload", "--set", "engine=eager")
    code, _, err = command("run", recipe, "--out", tmp_path / "out", *wrong)
    assert_one_plain_line(code, err, "local_update: got dict, expected (the client's new state, its upload as a dict")
    assert re.search(r" \(in round 1, client \d \(upload\)\)$", err)


def test_a_function_of_other_arguments_is_refused_before_it_is_called(command, recipe, tmp_path, monkeypatch):
    (tmp_path / "my_signatures.py").write_text("def none():\n    pass\n\n\ndef one(shape, /):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    for key, name, says in (
        ("model.name", "none", "which takes (), expected a function (input_shape, num_classes)"),
        ("loss", "none", "which takes (), expected a function (outputs, targets)"),
        ("selection", "one", "which takes (shape, /), expected a function (rng, size, examples)"),
        ("data.name", "one", "which takes (shape, /), expected a function ()"),
    ):
        code, _, err = command("run", recipe, "--out", tmp_path / "out", "--set", f"{key}=my_signatures:{name}")
        assert_one_plain_line(code, err, f"{key}: got 'my_signatures:{name}', {says}")
    code, _, err = command("run", recipe, "--out", tmp_path / "out", "--set", "model.name=my_signatures:none")
    assert err.startswith("error: --set model.name=my_signatures:none: ")


def test_a_run_is_never_overwritten(command, recipe, tmp_path):
    out = tmp_path / "out"
    command("run", recipe, "--out", out)
    before = (out / "summary.json").read_bytes()
    code, _, err = command("run", recipe, "--out", out)
    assert_one_plain_line(code, err, "already holds a run; resume it (--resume, resume=True)")
    code, _, err = command("run", recipe, "--out", out, "--resume", "--set", "lr=0.3")
    assert_one_plain_line(code, err, "holds another run: lr was 0.1, now 0.3")
    assert (out / "summary.json").read_bytes() == before


def test_a_damaged_checkpoint_is_one_line(command, recipe, tmp_path):
    out = tmp_path / "out"
    command("run", recipe, "--out", out)
    for path in (out / "checkpoint").glob("manifest*"):
        path.write_text("{}")
    code, _, err = command("run", recipe, "--out", out, "--resume", "--set", "rounds=3")
    says = (
        f"every checkpoint in {out / 'checkpoint'} is damaged; restore it from a backup, or repeat the run in another"
    )
    assert_one_plain_line(code, err, says)


def test_an_attempt_that_finished_no_round_is_in_nobodys_way(command, recipe, tmp_path):
    for more in ((), ("--resume",)):
        out = tmp_path / f"a{len(more)}"
        assert command("run", recipe, "--set", "lr=1e30", "--out", out)[0] == 2
        code, _, err = command("run", recipe, "--out", out, *more)
        assert code == 0, err
        assert tomllib.loads((out / "config.toml").read_text())["lr"] == 0.1


def test_results_that_were_damaged_are_made_again(command, recipe, tmp_path):
    out = tmp_path / "a"
    assert command("run", recipe, "--out", out)[0] == 0
    before = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text("xx")
    assert command("show", out)[0] == 2
    assert command("run", recipe, "--out", out, "--resume")[0] == 0
    assert json.loads((out / "summary.json").read_text())["accuracy"] == before["accuracy"]
    (out / "labels.json").unlink()
    assert command("run", recipe, "--out", out, "--resume")[0] == 0
    assert (out / "labels.json").exists()
    assert command("show", out)[0] == 0


def test_a_run_is_not_put_among_those_of_a_comparison(command, recipe, tmp_path):
    usual = (recipe, "--methods", "local", "--seeds", "0", "--out", tmp_path / "c")
    assert command("compare", *usual)[0] == 0
    code, _, err = command("run", recipe, "--out", tmp_path / "c")
    assert_one_plain_line(code, err, "holds the runs of a comparison or a sweep; choose another folder")
    assert command("compare", *usual, "--resume")[0] == 0


def test_what_is_done_to_a_results_tensors_is_not_done_to_the_result():
    federation = fedslr.load("digits", clients=3, samples_per_client=20)
    result = fedslr.run(fedslr.Ditto(), federation, rounds=1, clients_per_round=3)
    for ask in (lambda: result.global_params, lambda: result.personal_params(0)):
        for x in ask().values():
            x.zero_()
        assert all(x.any() for name, x in ask().items() if name.endswith("weight"))


def test_divergence_keeps_what_was_finished(command, recipe, tmp_path):
    out = tmp_path / "out"
    code, _, err = command(
        "run", recipe, "--out", out, "--set", "lr=3e3", "--set", "rounds=50", "--set", "algorithm.name=fedavg"
    )
    assert code == 2
    assert "training diverged" in err
    assert "a lower lr helps" in err
