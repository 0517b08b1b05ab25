"""UCI Heart Disease: 920 patients of four hospitals (Detrano et al., 1989). The tables are part of the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedslr.data import tables
from fedslr.data.decoded_cache import Array
from fedslr.data.federation import Federation
from fedslr.data.hold_out import TEST_PART

FOLDER = Path(__file__).with_name("heart")
HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "Long Beach"}
NUMBERS = {
    "X1": "age",
    "X2": "male",
    "X4": "blood pressure",
    "X5": "cholesterol",
    "X6": "high fasting sugar",
    "X8": "heart rate",
    "X9": "exercise angina",
    "X10": "ST depression",
    "X12": "vessels",
}
NEVER_ZERO = ("X4", "X5")
"""Measurements whose zeros are missing values: all cholesterol values of Switzerland, and some of Long Beach."""
CATEGORIES = {
    "X3": ("chest pain", {1: "typical", 2: "atypical", 3: "other", 4: "none"}),
    "X7": ("ECG", {0: "normal", 1: "ST-T", 2: "hypertrophy"}),
    "X11": ("slope", {1: "up", 2: "flat", 3: "down"}),
    "X13": ("thallium", {3: "normal", 6: "fixed", 7: "reversible"}),
}
MISSING = -9


def heart(
    test: float = TEST_PART,
    validation: float = 0.0,
    standardize: str | None = "federation",
    seed: int = 0,
    warn: Callable[[str], None] = lambda text: None,
) -> Federation:
    """Return the four hospitals as clients; the label is whether a patient has heart disease.

    A fifth of every hospital's patients is held out for testing. Missing values are replaced as in
    `Federation.from_frame`.
    """
    columns = read_columns()
    hospital = columns.pop("hospital")
    rows = [np.flatnonzero(hospital == number) for number in range(len(HOSPITALS))]
    y = (columns.pop("disease") > 0).astype(np.int64)
    clients, names = tables.table_clients(columns, y, rows, standardize, test, validation, seed, warn)
    return Federation.from_arrays(
        clients,
        name="heart",
        class_names=["no disease", "disease"],
        client_names=list(HOSPITALS.values()),
        feature_names=names,
    )


def read_columns() -> dict[str, Array]:
    """Return the columns of all patients: numbers with NaN, and texts with None, for missing values."""
    parts = [np.genfromtxt(FOLDER / f"{name}.csv", delimiter=",", names=True) for name in HOSPITALS]
    raw = np.concatenate(parts)
    hospital = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    columns: dict[str, Array] = {"hospital": hospital, "disease": raw["X14"]}
    for code, name in NUMBERS.items():
        missing = (raw[code] == MISSING) | ((raw[code] == 0) & (code in NEVER_ZERO))
        columns[name] = np.where(missing, np.nan, raw[code])
    for code, (name, texts) in CATEGORIES.items():
        columns[name] = np.array([texts.get(int(value)) for value in raw[code]], object)
    return columns
