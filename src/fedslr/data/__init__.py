"""Datasets, their partitions over clients, and batches. `load` returns a federation by the name of its dataset."""

from __future__ import annotations

from fedslr.data.client_data import ClientData
from fedslr.data.federation import Federation
from fedslr.data.loading import DATASETS, DataOptions, build_federation, decode_to_cache, load

__all__ = ["DATASETS", "ClientData", "DataOptions", "Federation", "build_federation", "decode_to_cache", "load"]
