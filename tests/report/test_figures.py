"""`fedslr figures`: every kind of the paper's figures, from run folders."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text

import fedslr
from fedslr.data import load
from fedslr.report import curves, paper_figures
from fedslr.report.saved_runs import find_runs
from fedslr.run import recipes, representation
from fedslr.run.api import run_recipe
from test_report import write_run

RECIPE = """
rounds = 2
clients_per_round = 2
algorithm = { name = "fedslr", eta_g = 5, rank_penalty = 5e-3, l1_penalty = 3e-3 }
data = { name = "digits", clients = 3, samples_per_client = 20, split = "iid" }
evaluate = { every = 1 }
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fedslr.Result]:
    """A run of the command's own making, and its result."""
    home = tmp_path_factory.mktemp("trained")
    (home / "recipe.toml").write_text(RECIPE)
    return home / "out", run_recipe(recipes.read(home / "recipe.toml"), home / "out")


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
    }


def test_a_comparison_has_its_figures(command, tmp_path):
    for name in ("fedavg", "fedslr", "ditto"):
        write_run(tmp_path / "runs" / name, name=name)
    made = tmp_path / "made"
    code, printed, _ = command("figures", tmp_path / "runs", "--out", made, "--format", "png,pdf,svg")
    assert code == 0
    kinds = ("accuracy", "violin", "communication")
    assert {p.name for p in made.iterdir()} == {f"{kind}.{end}" for kind in kinds for end in ("png", "pdf", "svg")}
    assert [line.split(":")[1] for line in printed.splitlines() if "left out" in line] == [" tsne", " sensitivity"]
    for kind in kinds:
        assert (made / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
        assert (made / f"{kind}.pdf").read_bytes().startswith(b"%PDF")
        assert "<svg" in (made / f"{kind}.svg").read_text()


def test_a_figure_is_replaced_as_a_whole_or_not_at_all(command, tmp_path, monkeypatch):
    run, made = write_run(tmp_path / "run"), tmp_path / "made"
    call = ["figures", run, "--only", "accuracy", "--format", "png", "--out", made]
    assert command(*call)[0] == 0
    before = contents(made)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = command(*call)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"cannot write {made / 'accuracy.png'}: No space left on device" in err
    assert contents(made) == before


def test_a_run_has_its_representation(command, trained, tmp_path):
    code, printed, _ = command("figures", trained[0], "--out", tmp_path, "--only", "tsne", "--format", "svg")
    assert (code, printed) == (0, f"drawn to {tmp_path / 'tsne.svg'}\n")
    figure = paper_figures.tsne(
        find_runs([trained[0]]), paper_figures.Options(client=2, represent=representation.represent)
    )
    assert figure.get_suptitle() == "fedslr, seed 0, client 2: its test samples"
    panels = figure.axes
    titles = [axes.get_title().partition(":")[0] for axes in panels]
    parts = ("global", "personal")
    assert titles == [f"{extractor} extractor, {classifier} classifier" for extractor in parts for classifier in parts]


def test_a_representation_is_that_of_a_client_that_has_trained(trained):
    """Unless one is asked for, the one with the most labels among those."""
    (run,) = find_runs([trained[0]])
    for only in range(3):
        records = [{**record, "clients": [only]} for record in run.records]
        assert representation.represent(run._replace(records=records), None).client == only


def test_a_sweep_has_its_sensitivity(command, tmp_path):
    for i, value in enumerate((1e-4, 1e-3, 1e-2)):
        write_run(tmp_path / "runs" / str(i), lr=value)
    assert command("figures", tmp_path / "runs", "--out", tmp_path, "--only", "sensitivity")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs", "sensitivity.pdf", "sensitivity.png"]
    runs = find_runs([tmp_path / "runs"])
    left, right = paper_figures.sensitivity(runs, paper_figures.Options()).axes
    assert (left.get_xscale(), left.get_xlabel()) == ("log", "lr")
    assert [line.get_xdata().tolist() for line in right.lines] == [[1e-4, 1e-3, 1e-2]] * 2


def test_a_sweep_from_zero_has_room_for_its_values(tmp_path):
    for i, value in enumerate((0.0, 1e-4, 1e-3, 1e-2)):
        write_run(tmp_path / str(i), lr=value)
    figure = paper_figures.sensitivity(find_runs([tmp_path]), paper_figures.Options())
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert len(boxes) == 4
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_methods_that_differ_in_a_number_are_no_sweep(tmp_path):
    for name, lr in (("fedslr", 0.1), ("ditto", 0.1), ("fedavg", 0.05)):
        write_run(tmp_path / name, name=name, lr=lr)
    assert curves.find_sweep(curves.ranked_groups(find_runs([tmp_path]))) is None


def test_a_violin_says_whom_it_has_not(command, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "base", name="fedavg", lr=0.1)
    for seed in (0, 1, 2):
        write_run(runs / f"ours{seed}", seed=seed, lr=0.1)
    write_run(runs / "other", name="ditto", lr=0.05)
    code, printed, _ = command("figures", runs, "--out", tmp_path / "out", "--format", "png", "--only", "violin")
    assert code == 0
    said = [line for line in printed.splitlines() if line.startswith("left out: violin: ")]
    assert sorted(line.split("seed")[1].split(":")[0] for line in said) == [" 0", " 1, 2"]
    assert all(name in " ".join(said) for name in ("ditto", "fedslr"))


def test_communication_is_the_mean_over_seeds(tmp_path):
    for seed in (0, 1):
        folder = write_run(tmp_path / str(seed), seed=seed)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        changed = [{**line, "bytes_up": 1000 * (1 + 2 * seed)} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    (line,) = paper_figures.communication(find_runs([tmp_path]), paper_figures.Options(milliseconds=0)).axes[0].lines
    assert line.get_ydata()[0] == pytest.approx(8 * (1000 + 2000) / 2 / 1e7)


def test_curves_are_those_of_the_records(tmp_path):
    write_run(tmp_path / "a", rounds=6)
    runs = find_runs([tmp_path])
    personal, shared = paper_figures.accuracy(runs).axes[0].lines
    records = [r for r in runs[0].records if r["accuracy_personal"] is not None]
    assert personal.get_ydata() == pytest.approx([100 * r["accuracy_personal"] for r in records])
    assert shared.get_ydata() == pytest.approx([100 * r["accuracy_global"] for r in records])
    assert personal.get_xdata() == pytest.approx([2, 4, 6])


@pytest.mark.parametrize("rounds", [2, 3, 12])
def test_rounds_are_whole(rounds, tmp_path):
    write_run(tmp_path / "a", rounds=rounds)
    runs = find_runs([tmp_path])
    for figure in (paper_figures.accuracy(runs), paper_figures.communication(runs, paper_figures.Options())):
        (axes,) = figure.axes
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(tick == round(tick) for tick in ticks)


def test_a_single_evaluation_tells_models_apart(tmp_path):
    write_run(tmp_path / "a", rounds=2)
    personal, shared = paper_figures.accuracy(find_runs([tmp_path])).axes[0].lines
    assert personal.get_markerfacecolor() == personal.get_color()
    assert shared.get_markerfacecolor() == "white"


def test_names_hide_no_lines(tmp_path):
    """Lines are named beside the axes, without overlap; the highest line is inside."""
    for n in range(1, 7):
        write_run(tmp_path / str(n), lr=n)
        runs = find_runs([tmp_path])
        figure = paper_figures.accuracy(runs)
        figure.draw_without_rendering()
        # Without the lines that lead to the names.
        boxes = sorted((Text.get_window_extent(text) for text in figure.axes[0].texts), key=lambda box: box.y0)
        assert len(boxes) == 2 * n
        assert all(figure.axes[0].get_window_extent().x1 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes)
        assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))
        (drawn,) = paper_figures.communication(runs, paper_figures.Options()).axes
        assert drawn.get_ylim()[1] > 1.05 * max(y for line in drawn.lines for y in line.get_ydata())
    figure = paper_figures.sensitivity(runs, paper_figures.Options())
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert all(legend.get_window_extent().y0 >= axes.get_window_extent().y1 for axes in figure.axes)


def test_long_names_leave_room_for_the_axes(command, tmp_path):
    for value in ("x" * 300, "y" * 300):
        write_run(tmp_path / "runs" / value[0], note=value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert command("figures", tmp_path / "runs", "--only", "accuracy", "--out", tmp_path)[0] == 0
    shown = paper_figures.accuracy(find_runs([tmp_path / "runs"])).axes[0].texts
    assert all(len(text.get_text()) <= 50 for text in shown)
    assert {text.get_text().rpartition(", ")[2] for text in shown} == {"personal", "global"}


def test_colours_are_the_same_in_every_figure(tmp_path):
    for name in ("fedavg", "fedslr", "local"):
        write_run(tmp_path / name, name=name)
    runs = find_runs([tmp_path])
    first = {line.get_label().split(",")[0]: line.get_color() for line in paper_figures.accuracy(runs).axes[0].lines}
    drawn = paper_figures.communication(runs, paper_figures.Options()).axes[0].lines
    second = {line.get_label(): line.get_color() for line in drawn}
    assert first == second
    assert len(set(first.values())) == 3


def test_a_representation_is_that_of_the_runs_own_models(trained):
    """The law: extractor and classifier of one model together are that model."""
    folder, result = trained
    (run,) = find_runs([folder])
    before = contents(folder)
    seen = representation.represent(run, 1)
    assert contents(folder) == before
    data = load("digits", clients=3, samples_per_client=20, split="iid", seed=0)
    x = data.inputs(data.clients[1].x_test)
    with torch.no_grad():
        for part, model in (("global", result.global_model()), ("personal", result.personal_model(1))):
            assert np.array_equal(seen.predictions[part, part], model(x).argmax(1).numpy())
            hidden = torch.relu(model.hidden(torch.relu(model.conv2(pooled(model, x))).flatten(1)))
            assert seen.features[part] == pytest.approx(hidden.numpy(), abs=1e-5)
    assert not np.allclose(seen.features["global"], seen.features["personal"])


def pooled(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.max_pool2d(torch.relu(model.conv1(x)), 2)


def test_the_client_with_most_labels_is_chosen(trained):
    (run,) = find_runs([trained[0]])
    seen = representation.represent(run, None)
    clients = load("digits", clients=3, samples_per_client=20, split="iid", seed=0).clients
    assert len(np.unique(seen.labels)) == max(len(c.y_test.unique()) for c in clients)


def test_mistakes_are_answered_with_a_line(command, trained, tmp_path):
    run = write_run(tmp_path / "run")
    young = write_run(tmp_path / "young", rounds=1, planned=5)
    made_here = tmp_path / "python"
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    fedslr.run(fedslr.FedSLR(), load("digits", clients=3), model, rounds=1, out=made_here)
    for arguments, words in [
        ([run, "--only", "voilin"], "--only: got 'voilin'; did you mean 'violin'?"),
        ([run, "--only", " "], "figures: nothing could be drawn"),
        ([run, "--format", "gif"], "--format: got 'gif'"),
        ([run, "--only", "violin"], "violin: it is relative to FedAvg"),
        ([run, "--only", "sensitivity"], "sensitivity: the figure needs runs with several values of one number"),
        ([run, "--only", "tsne"], "this folder has no checkpoint, so it has no models"),
        ([young, "--only", "accuracy"], "accuracy: nothing has been evaluated yet"),
        ([made_here, "--only", "tsne"], "your own data, model, loss or method to fedslr.open_run"),
        ([trained[0], "--only", "tsne", "--client", "3"], "--client: got 3, expected a whole number from 0 to 2"),
        (
            [run, "--bandwidth", "0"],
            "--bandwidth, --latency: got 0 and 20, expected a number above 0 and one",
        ),
        ([run, "--latency", "-1"], "--bandwidth, --latency: got 10 and -1"),
        ([tmp_path / "none"], "no such folder"),
    ]:
        code, _, err = command("figures", *arguments, "--out", tmp_path / "made")
        assert code == 2, arguments
        assert words in err
        assert len(err.splitlines()) == 1
