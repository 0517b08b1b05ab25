"""Tables: columns as inputs, frames and files as federations, and mistakes in one line each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedslr
from fedslr.core.errors import FedslrWarning

pd = pytest.importorskip("pandas")

SIZE = 60


def frame(size: int = SIZE, seed: int = 0) -> pd.DataFrame:
    """Patients of two hospitals. `row` numbers them, and one age and some blood groups are missing."""
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 9, size)
    sick = age + rng.normal(0, 5, size) > 50
    age[3] = np.nan
    return pd.DataFrame(
        {
            "row": np.arange(size),
            "age": age,
            "blood": rng.choice(["A", "B", None], size),
            "smokes": rng.random(size) < 0.3,
            "hospital": np.where(np.arange(size) < size // 3, "north", "south"),
            "sick": np.where(sick, "yes", "no"),
        }
    )


@pytest.fixture
def quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Missing values are warned of."""


def everything(federation: fedslr.Federation) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples in the order of their first input."""
    x = torch.cat([t for c in federation.clients for t in (c.x, c.x_test)])
    y = torch.cat([t for c in federation.clients for t in (c.y, c.y_test)])
    order = x[:, 0].argsort()
    return x[order], y[order]


@pytest.mark.usefixtures("quiet")
def test_a_frame_becomes_a_federation_and_back():
    df = frame()
    federation = fedslr.Federation.from_frame(df, target="sick", client="hospital", standardize=None)
    assert federation.client_names == ["north", "south"]
    assert federation.class_names == ["no", "yes"]
    assert federation.feature_names == ["row", "age", "blood=A", "blood=B", "smokes"]
    assert [(len(c.y), len(c.y_test)) for c in federation.clients] == [(16, 4), (32, 8)]
    x, y = everything(federation)
    assert x[:, 0].tolist() == df["row"].tolist()
    known = df["age"].notna().to_numpy()
    assert np.array_equal(x[known, 1], df["age"][known])
    assert np.array_equal(x[:, 2], df["blood"] == "A")
    assert np.array_equal(x[:, 3], df["blood"] == "B")
    assert np.array_equal(x[:, 4], df["smokes"])
    assert [federation.class_names[label] for label in y] == df["sick"].tolist()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("scope", ["federation", "client"])
def test_the_training_samples_standardise_the_numbers(scope):
    df = frame().drop(columns=["blood"])
    federation = fedslr.Federation.from_frame(df, target="sick", client="hospital", standardize=scope)
    train = [c.x for c in federation.clients]
    for x in [torch.cat(train)] if scope == "federation" else train:
        assert torch.allclose(x.mean(0), torch.zeros(3, dtype=x.dtype), atol=1e-12)
        assert torch.allclose(x.std(0, correction=0), torch.ones(3, dtype=x.dtype), atol=1e-12)


def test_a_missing_number_is_the_median_of_the_training_samples():
    df = pd.DataFrame({"n": [1.0, 2, 4, 8, np.nan, np.inf, 100], "client": ["a"] * 6 + ["b"], "y": [0, 1] * 3 + [0]})
    with pytest.warns(FedslrWarning, match=r"some of 7 samples have missing values \(n 2\)"):
        federation = fedslr.Federation.from_frame(df, "y", "client", standardize=None, test=0)
    assert sorted(federation.clients[0].x[:, 0].tolist()) == [1, 2, 4, 4, 4, 8]


@pytest.mark.usefixtures("quiet")
def test_a_column_without_a_training_value_is_zero():
    df = pd.DataFrame({"n": [np.nan] * 10 + list(range(10)), "hospital": ["a"] * 10 + ["b"] * 10, "y": [0, 1] * 10})
    federation = fedslr.Federation.from_frame(df, "y", "hospital", standardize="client")
    assert not federation.clients[0].x.any()
    assert federation.clients[1].x.any()


@pytest.mark.usefixtures("quiet")
def test_a_frame_may_be_split_over_a_number_of_clients():
    federation = fedslr.Federation.from_frame(frame(), "sick", 4, split="iid", validation=0.25)
    assert [(len(c.y), len(c.y_test)) for c in federation.clients] == [(9, 3)] * 4
    assert all(c.y_val is not None and len(c.y_val) == 3 for c in federation.clients)


@pytest.mark.usefixtures("quiet")
def test_types_of_pandas_are_numbers_or_categories():
    df = frame().assign(
        count=pd.array([None, 1, 2] * 20, dtype="Int64"), grade=pd.Categorical([3, 1, 2] * 20), text=["a", "b"] * 30
    )
    federation = fedslr.Federation.from_frame(df, "sick", "hospital", ["count", "grade", "text"])
    assert federation.feature_names == ["count", "grade=1", "grade=2", "grade=3", "text=a", "text=b"]


def mistakes() -> pd.DataFrame:
    return frame().assign(
        admitted=pd.date_range("2020-01-01", periods=SIZE),
        name=[f"patient {i}" for i in range(SIZE)],
        weight=["?", *map(str, range(1, SIZE))],
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": "sik"}, "target: the table has no column 'sik'; did you mean 'sick'?"),
        ({"client": "hospitl"}, "client: the table has no column 'hospitl'; did you mean 'hospital'?"),
        ({"features": ["agee"]}, "features: the table has no column 'agee'; did you mean 'age'?"),
        ({"features": []}, "features: the table has no columns left; name at least one column"),
        ({"features": ["admitted"]}, "column 'admitted' holds datetime64[us]; convert it to numbers"),
        ({"features": ["name"]}, "column 'name': got 60 different texts, of which 0 are numbers; expected numbers, or"),
        ({"features": ["weight"]}, "column 'weight': got 60 different texts, of which 59 are numbers; expected numb"),
        ({"target": "blood"}, "column 'blood': 22 of 60 rows have no value; drop or complete these rows"),
        ({"features": ["row"], "standardize": "all"}, 'standardize: got "all", expected one of federation, client, no'),
        ({"features": ["row"], "test": 1}, "test: got 1, expected a number from 0 to below 1"),
        ({"df": np.zeros((3, 3))}, "df: got a ndarray, expected a pandas.DataFrame"),
    ],
)
def test_a_mistake_in_a_frame_is_one_line(options, says):
    with pytest.raises(fedslr.FedslrError) as error:
        fedslr.Federation.from_frame(**{"df": mistakes(), "target": "sick", "client": "hospital", **options})
    found = str(error.value).replace("datetime64[ns]", "datetime64[us]")
    assert found.startswith(says)
    assert "\n" not in found


def write_recipe(path: Path, data: str) -> Path:
    path.write_text(
        f'model.name = "mlp"\nrounds = 1\nclients_per_round = 2\nalgorithm.name = "fedavg"\ndata = {data}\n'
    )
    return path


def test_a_recipe_reads_a_csv_file(command, tmp_path):
    frame().to_csv(tmp_path / "patients.csv", index=False)
    columns = 'target = "sick", client = "hospital", features = ["age", "blood"]'
    recipe = write_recipe(tmp_path / "one.toml", f'{{ name = "table:{tmp_path}/patients.csv", {columns} }}')
    code, _, err = command("run", recipe, "--out", tmp_path / "run")
    assert code == 0
    assert "some of 60 samples have missing values (age 1, blood 22)" in " ".join(err.split())
    result = fedslr.open_run(tmp_path / "run")
    assert result.federation.client_names == ["north", "south"]
    assert result.federation.feature_names == ["age", "blood=A", "blood=B"]
    again = ("run", recipe, "--out", tmp_path / "run", "--resume", "--set", "rounds=2")
    assert command(*again)[0] == 0
    code, _, err = command(*again, "--set", "data.features=['age']")
    assert code == 2
    assert 'data.features was ["age", "blood"], now ["age"]; choose another folder' in err


def test_a_folder_has_a_file_per_client(command, tmp_path):
    home = tmp_path / "wards"
    home.mkdir()
    for name, part in frame().groupby("hospital"):
        part.drop(columns="hospital").to_csv(home / f"{name}.csv", index=False)
    federation = fedslr.load(f"table:{home}", target="sick", test=0.5, warn=lambda text: None)
    assert federation.client_names == ["north", "south"]
    assert [(len(c.y), len(c.y_test)) for c in federation.clients] == [(10, 10), (20, 20)]
    recipe = write_recipe(tmp_path / "one.toml", f'{{ name = "table:{home}", target = "sick" }}')
    assert command("run", recipe, "--out", tmp_path / "run")[0] == 0
    frame().to_csv(home / "east.csv", index=False)
    with pytest.raises(
        fedslr.FedslrError, match=r"north.csv: the columns differ from those of east.csv: hospital; giv"
    ):
        fedslr.load(f"table:{home}", target="sick")


def test_a_parquet_file_is_read_like_a_csv_file(tmp_path):
    pytest.importorskip("pyarrow")
    frame().to_parquet(tmp_path / "a.parquet")
    frame().to_csv(tmp_path / "a.csv", index=False)
    options = {"target": "sick", "client": "hospital", "warn": lambda text: None}
    one, other = (fedslr.load(f"table:{tmp_path}/a.{kind}", **options) for kind in ("parquet", "csv"))
    assert one.feature_names == other.feature_names
    assert all(torch.equal(a.x, b.x) for a, b in zip(one.clients, other.clients, strict=True))


def test_a_table_without_a_column_of_clients_is_split(tmp_path):
    frame().to_csv(tmp_path / "a.csv", index=False)
    told: list[str] = []
    options = {"target": "sick", "clients": 5, "split": "iid", "warn": told.append}
    assert len(fedslr.load(f"table:{tmp_path}/a.csv", **options).clients) == 5
    fedslr.load(f"table:{tmp_path}/a.csv", **options, client="hospital")
    assert f"data: 'table:{tmp_path}/a.csv' is already partitioned by client and ignores split" in told


def test_clients_beyond_the_default_number_are_reported(tmp_path):
    rows = pd.DataFrame({"x": np.arange(404) % 9, "y": np.arange(404) % 2, "who": np.arange(404) // 4})
    rows.to_csv(tmp_path / "a.csv", index=False)
    told: list[str] = []
    options = {"target": "y", "client": "who", "warn": told.append}
    assert len(fedslr.load(f"table:{tmp_path}/a.csv", **options).clients) == 100
    assert told == ["data.clients: takes the first 100 of 101 clients; set clients = 101 to take all"]
    assert len(fedslr.load(f"table:{tmp_path}/a.csv", **options, clients=101).clients) == 101


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ('{ name = "table:a.csv" }', "data.target: 'table:a.csv' needs the column of the labels"),
        ('{ name = "table:none.csv", target = "y" }', "none.csv: fedslr cannot read this table: "),
        ('{ name = "table:a.xlsx", target = "y" }', "data.name: a.xlsx is no .csv or .parquet file; convert it"),
        ('{ name = "table:empty", target = "y" }', "data.name: empty has no .csv and no .parquet files; put one file"),
        ('{ name = "table:a.csv", target = "y", features = "age" }', 'data.features: got "age", expected a list of te'),
        ('{ name = "table:a.csv", target = "y", test = 2 }', "data.test: got 2, expected a number from 0 to below 1"),
    ],
)
def test_a_wrong_table_in_a_recipe_is_one_line(data, says, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    code, _, err = command("run", write_recipe(tmp_path / "one.toml", data), "--out", tmp_path / "run")
    assert (code, len(err.splitlines())) == (2, 1)
    assert says in err


def test_options_of_tables_are_reported_where_they_do_nothing():
    told: list[str] = []
    fedslr.load("digits", clients=5, target="y", test=0.5, warn=told.append)
    assert told == ["data: 'digits' ignores target, test"]
