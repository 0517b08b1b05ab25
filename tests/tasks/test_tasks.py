"""Tasks: every kind of target trains in every engine, and its scores are those of the libraries."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedslr
from conftest import assert_alike
from fedslr.core.targets import IGNORED, TARGETS, outputs_for
from fedslr.tasks import TASKS, losses, metrics
from fedslr.tasks.scoring import Scorer

SIZES = [7, 12, 5, 9]
CLASSES, TOKENS = 3, 4


def targets(task: str, size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return random targets of a task."""
    if task == "classification":
        return rng.integers(0, CLASSES, size)
    if task == "binary":
        return np.arange(size) % 2
    if task == "multilabel":
        return rng.integers(0, 2, (size, CLASSES))
    if task == "regression":
        return rng.normal(size=(size, CLASSES))
    y = rng.integers(0, CLASSES, (size, TOKENS))
    y[::3, -1] = IGNORED
    return y


class PerToken(nn.Module):
    """One score per class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(x).tanh())
        return out


def federation(task: str, test: int = 8) -> fedslr.Federation:
    rng = np.random.default_rng(0)

    def inputs(size: int) -> Any:
        return rng.integers(0, 6, (size, TOKENS)) if task == "sequence" else rng.normal(size=(size, 5))

    clients = [
        {"x": inputs(n), "y": targets(task, n, rng), "x_test": inputs(test), "y_test": targets(task, test, rng)}
        for n in SIZES
    ]
    classes = {"binary": 2, "regression": CLASSES}.get(task, CLASSES)
    return fedslr.Federation.from_arrays(clients, num_classes=classes, task=task)


def model(task: str) -> nn.Module:
    torch.manual_seed(0)
    if task == "sequence":
        return PerToken()
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs_for(task, CLASSES)))


def run(task: str, engine: str = "eager", method: str = "fedslr", **options: Any) -> fedslr.Result:
    settings = {"rounds": 2, "clients_per_round": 3, "batch_size": 4, "lr": 0.05, "evaluate_every": 1, **options}
    made = federation(task)
    return fedslr.run(fedslr.ALGORITHMS[method](), made, model(task), engine=engine, dtype="float64", **settings)


every_task = pytest.mark.parametrize("task", list(TASKS))


@every_task
@pytest.mark.parametrize("method", ["fedslr", "fedavg", "perfedavg", "ifca"])
def test_engines_agree(task, method):
    eager, batched = (run(task, engine, method) for engine in ("eager", "batched"))
    for name, x in eager.global_params.items():
        torch.testing.assert_close(x, batched.global_params[name], rtol=0, atol=1e-10)
    seconds = ("seconds", "seconds_by")
    strip = lambda result: [{k: v for k, v in r.items() if k not in seconds} for r in result.records]  # noqa: E731
    assert_alike(strip(eager), strip(batched))


@every_task
def test_training_lowers_the_loss(task):
    result = run(task, rounds=12, lr=0.3)
    losses_seen = [r["train_loss_personal"] for r in result.records]
    assert losses_seen[-1] < losses_seen[0]
    assert math.isfinite(result.summary["scores"]["test_loss"]["personal"])


@every_task
def test_the_headline_is_the_first_metric_everywhere(task, tmp_path):
    names = list(TASKS[task].metrics[:2])[::-1]
    result = run(task, metrics=names, out=tmp_path)
    assert result.headline.name == names[0]
    assert result.summary[names[0]] == result.summary["scores"][names[0]]
    assert result.summary["metric"]["larger_is_better"] == metrics.METRICS[names[0]].larger_is_better
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line.get("metric", "accuracy") == names[0]
    assert len(line[f"{names[1]}_personal_per_client"]) == len(SIZES)
    report = (tmp_path / "report.html").read_text()
    assert result.headline.words in report
    assert names[0] in (tmp_path / "config.toml").read_text()
    assert "accuracy" in names[0] or "accuracy" not in repr(result)


@every_task
def test_a_resumed_run_equals_one_that_was_never_stopped(task, tmp_path):
    whole = run(task, rounds=4)
    run(task, rounds=2, out=tmp_path)
    again = run(task, rounds=4, out=tmp_path, resume=True)
    for name, x in whole.global_params.items():
        assert torch.equal(x, again.global_params[name])
    assert whole.summary["scores"] == again.summary["scores"]


def test_scores_are_those_of_the_library_on_whole_outputs():
    result = run("classification", metrics=["auroc", "macro_f1", "balanced_accuracy", "log_loss", "top5_accuracy"])
    held = result.federation.clients[2]
    with torch.no_grad():
        outputs = result.personal_model(2)(held.x_test.double())
    probabilities, y = torch.softmax(outputs, 1).numpy(), held.y_test.numpy()
    found = {
        k.removesuffix("_personal_per_client"): v[2] for k, v in result.records[-1].items() if "l_per_c" in k and v
    }
    assert found["macro_f1"] == pytest.approx(
        sklearn.metrics.f1_score(y, probabilities.argmax(1), average="macro", zero_division=0)
    )
    assert found["log_loss"] == pytest.approx(sklearn.metrics.log_loss(y, probabilities, labels=[0, 1, 2]))
    assert found["auroc"] == pytest.approx(
        sklearn.metrics.roc_auc_score(y, probabilities, multi_class="ovr", labels=[0, 1, 2])
    )
    assert found["top5_accuracy"] == 1
    assert found["test_loss"] == pytest.approx(float(F.cross_entropy(outputs, held.y_test)))


def test_what_a_client_does_not_define_is_no_figure():
    """A client with one class has no area under a curve; the mean leaves it out."""
    clients = [
        {"x": np.eye(4), "y": [0, 1, 0, 1], "x_test": np.eye(4), "y_test": [0, 1, 0, 1]},
        {"x": np.eye(4), "y": [0, 1, 0, 1], "x_test": np.eye(4), "y_test": [0, 0, 0, 0]},
    ]
    made = fedslr.Federation.from_arrays(clients, task="binary")
    result = fedslr.run(fedslr.FedAvg(), made, nn.Linear(4, 1), rounds=1)
    first, second = result.records[-1]["auroc_personal_per_client"]
    assert second is None
    assert result.summary["auroc"]["personal"] == first


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("cross_entropy", lambda out, y: F.cross_entropy(out, y.argmax(1), reduction="none")),
        ("bce", lambda out, y: F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1)),
        ("mse", lambda out, y: F.mse_loss(out, y, reduction="none").mean(1)),
        ("mae", lambda out, y: F.l1_loss(out, y, reduction="none").mean(1)),
        ("huber", lambda out, y: F.huber_loss(out, y, reduction="none").mean(1)),
    ],
)
def test_a_loss_is_that_of_torch_for_every_sample(name, reference):
    torch.manual_seed(0)
    outputs, y = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64).round()
    target = y.argmax(1) if name == "cross_entropy" else y
    torch.testing.assert_close(losses.find(name)(outputs, target), reference(outputs, y))


def test_weights_and_smoothing_are_those_of_torch():
    torch.manual_seed(0)
    outputs, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    found = losses.find("cross_entropy", {"weights": (1.0, 2.0, 0.5), "smoothing": 0.1})(outputs, y)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    expected = F.cross_entropy(outputs, y, weight, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(found, expected)
    with pytest.raises(fedslr.FedslrError, match="loss: 'mse' takes no smoothing"):
        losses.find("mse", {"smoothing": 0.1})


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_ignored_tokens_do_not_count(samples, tokens, ignored):
    torch.manual_seed(0)
    outputs, y = torch.randn(samples, tokens + ignored, 3), torch.randint(0, 3, (samples, tokens + ignored))
    y[:, tokens:] = IGNORED
    short = losses.cross_entropy(outputs[:, :tokens], y[:, :tokens])
    torch.testing.assert_close(losses.cross_entropy(outputs, y), short)
    scorer = Scorer("sequence", losses.cross_entropy, ["token_accuracy", "perplexity"])
    whole, part = scorer.score(outputs, y), scorer.score(outputs[:, :tokens], y[:, :tokens])
    assert_alike(whole, part, 1e-6)


def negative_error(targets: Any, predictions: Any) -> float:
    return -float(abs(targets - predictions).mean())


def test_a_metric_of_ones_own():
    result = run("regression", metrics=[negative_error, "rmse"])
    assert result.headline.name == "negative_error"
    assert result.summary["negative_error"]["personal"] < 0


@pytest.mark.parametrize(
    ("task", "y", "line"),
    [
        ("classification", [0.5, 1.0, 2.0], "holds floating-point numbers, expected integer class labels"),
        ("classification", ["a", "b", "a"], "holds texts, expected integer class labels"),
        ("classification", [0, -1, 1], "range from -1 to 1; expected one integer label from 0 to 1 per sample"),
        ("binary", [0, 1, 2], "range from 0 to 2; expected one label, 0 or 1, per sample"),
        ("multilabel", [0, 1, 1], r"have shape \[3\] for 3 samples; expected 1 labels, 0 or 1, per sample"),
        ("regression", [0.5, float("nan"), 1.0], r"have values that are not finite \(NaN or infinity\)"),
        ("regression", ["1", "b", "2"], "holds texts, expected an array of numbers"),
        ("sequence", [[0, 1], [1], [0, 1]], "holds rows of different shapes, expected rows of one length; pad"),
        ("sequence", [0, 1, 1], r"have shape \[3\] for 3 samples; expected one integer label"),
    ],
)
def test_wrong_targets_are_one_line_that_says_what_to_do(task, y, line):
    client = {"x": np.eye(3), "y": y, "x_test": np.eye(3), "y_test": y}
    with pytest.raises(fedslr.FedslrError, match=line) as found:
        fedslr.Federation.from_arrays([client], task=task)
    assert "\n" not in str(found.value)
    assert str(found.value).startswith("client 0: y")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"loss": "mse"}, "loss: got 'mse', but task = 'classification' takes cross_entropy; change one of them"),
        ({"metrics": ["rmse"]}, "metrics: got 'rmse', but task = 'classification' has accuracy"),
        ({"metrics": ["acuracy"]}, "metrics: got 'acuracy', no such metric; did you mean 'accuracy'"),
        ({"metrics": "accuracy"}, 'metrics: got "accuracy", expected a list of texts'),
        ({"task": "regression"}, r"client 0: y holds labels that are int64; expected one number"),
        ({"task": "regresion"}, 'task: got "regresion", expected one of classification'),
        ({"class_weights": [1, "a"]}, "class_weights: got"),
    ],
)
def test_wrong_options_are_one_line(options, line):
    with pytest.raises(fedslr.FedslrError, match=line):
        fedslr.run(fedslr.FedAvg(), federation("classification"), model("classification"), rounds=1, **options)


def test_a_recipe_chooses_the_task(command, tmp_path: Path):
    rng = np.random.default_rng(0)
    home = tmp_path / "patients"
    home.mkdir()
    for name in ("north", "south"):
        x = rng.normal(size=(20, 3))
        y = x @ [1.0, 2.0, -1.0]
        np.savez(home / f"{name}.npz", x=x[:15], y=y[:15], x_test=x[15:], y_test=y[15:])
    (tmp_path / "r.toml").write_text(
        f'rounds = 3\nclients_per_round = 2\ntask = "regression"\nmetrics = ["mae"]\n'
        f'algorithm = {{ name = "fedavg" }}\nmodel = {{ name = "mlp" }}\n'
        f'data = {{ name = "npz:{home}", clients = 2 }}\n'
    )
    code, out, err = command("run", tmp_path / "r.toml", "--out", tmp_path / "run")
    assert code == 0, err
    assert "MAE, personal models" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["mae"]["personal"] > 0
    changes = ("--set", "task=classification", "--set", "metrics=[]")
    code, out, err = command("run", tmp_path / "r.toml", *changes, "--out", tmp_path / "b")
    assert (code, "y holds floating-point numbers, expected integer class labels" in err) == (2, True), err


def test_every_task_has_a_kind_of_target():
    assert TARGETS.keys() == TASKS.keys()


def test_the_built_in_regression_is_split_by_its_targets():
    made = fedslr.load("diabetes", clients=4, alpha=0.1, seed=0)
    assert made.task == "regression"
    assert sum(len(c.y) for c in made.clients) == 4 * (331 // 4)
    means = [float(c.y.mean()) for c in made.clients]
    assert max(means) - min(means) > 0.3
    result = fedslr.run(fedslr.FedAvg(), made, model="mlp", rounds=2, clients_per_round=2, lr=0.02)
    assert result.headline.name == "rmse"
    assert result.summary["scores"].keys() == {"train_loss", "test_loss", "rmse", "mae", "r2"}
