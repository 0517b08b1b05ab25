"""Columns of a table as inputs: categories as indicators, missing values filled in, numbers standardised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedslr.core import schema
from fedslr.core.errors import FedslrError
from fedslr.core.schema import one_of
from fedslr.data.decoded_cache import Array
from fedslr.data.hold_out import check_part, parts
from fedslr.data.partitions import Indices

scopes = one_of("federation", "client", "none")
"""The samples that give a numeric column its mean and standard deviation: all training samples, or a client's own."""
MAX_CATEGORIES, MAX_MIXED_CATEGORIES = 50, 10
"""A text column with more categories is refused: it holds names or dates, and would become as many inputs. The second
limit is for columns in which most categories are numbers: they are numbers with a text for missing values."""


class Features(NamedTuple):
    """The inputs that the columns of a table become."""

    x: Array
    names: list[str]
    numeric: Array
    """Whether an input is a numeric column; the others are indicators of a category."""
    missing: dict[str, int]
    """The number of missing values of every column that has any."""


def encode(columns: Mapping[str, Array]) -> Features:
    """Return the inputs of all samples.

    A column of floating-point numbers stays as it is; its missing values are NaN. Any other column holds texts, or None
    for missing values, and becomes a 0/1 indicator of every category; all indicators of a missing value are 0.
    """
    x: list[Array] = []
    names: list[str] = []
    numeric: list[bool] = []
    missing: dict[str, int] = {}
    for name, column in columns.items():
        is_number = column.dtype.kind == "f"
        absent = np.isnan(column) if is_number else np.array([text is None for text in column])
        if absent.any():
            missing[name] = int(absent.sum())
        categories = [None] if is_number else _categories(name, column[~absent])
        x += [column if is_number else column == category for category in categories]
        names += [name if is_number else f"{name}={category}" for category in categories]
        numeric += [is_number] * len(categories)
    return Features(np.stack(x, axis=1).astype(np.float64), names, np.array(numeric), missing)


def _categories(name: str, texts: Array) -> list[str]:
    """Return the different texts of a column; refuse a column that is not one of categories."""
    found = sorted(set(texts.tolist()))
    others = [text for text in found if not _is_number(text)]
    mixed = 0 < len(others) < len(found) / 2
    if len(found) > (MAX_MIXED_CATEGORIES if mixed else MAX_CATEGORIES):
        advice = f"replace '{others[0]}' by an empty cell" if mixed else "name other columns in features"
        raise FedslrError(
            f"column '{name}': got {len(found)} different texts, of which {len(found) - len(others)} are numbers; "
            f"expected numbers, or at most {MAX_CATEGORIES} categories; {advice}"
        )
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def fill_and_standardize(features: Features, rows: Sequence[Mapping[str, Indices]], standardize: str) -> Array:
    """Return the inputs without missing values, with numeric inputs standardised.

    The median of the training samples replaces a missing number. Numbers are standardised by the mean and the standard
    deviation of the training samples: of all clients, or of each client by its own. A column without any training value
    becomes 0.
    """
    # scikit-learn takes a second to import.
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scales = [] if standardize == "none" else [StandardScaler()]
    pipeline = make_pipeline(SimpleImputer(strategy="median", keep_empty_features=True), *scales)
    x = features.x.copy()
    if not features.numeric.any():
        return x
    for group in [[client] for client in rows] if standardize == "client" else [rows]:
        train = x[np.concatenate([client[""] for client in group])][:, features.numeric]
        places = np.ix_(np.concatenate([part for client in group for part in client.values()]), features.numeric)
        x[places] = pipeline.fit(train).transform(np.where(np.isnan(train).all(axis=0), np.nan, x[places]))
    return x


def table_clients(
    columns: Mapping[str, Array],
    y: Array,
    rows: Sequence[Indices],
    standardize: str | None,
    test: float,
    validation: float,
    seed: int,
    warn: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return every client's arrays, held out and standardised, and the names of the inputs; `rows` are its samples."""
    standardize = schema.check_value("standardize", standardize or "none", Annotated[str, scopes])
    test, validation = check_part("test", test), check_part("validation", validation)
    features = encode(columns)
    divided = [parts(y, mine, test, validation, seed, client) for client, mine in enumerate(rows)]
    x = fill_and_standardize(features, divided, standardize)
    if features.missing:
        listed = ", ".join(f"{name} {count}" for name, count in features.missing.items())
        warn(
            f"some of {len(y)} samples have missing values ({listed}); fedslr replaces missing numbers by the median "
            "of the training samples, and gives a missing category the indicators 0"
        )
    arrays = [{f"{n}{s}": a[i] for s, i in mine.items() for n, a in (("x", x), ("y", y))} for mine in divided]
    return arrays, features.names
