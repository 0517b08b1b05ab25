"""The clients of a federation on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedslr.data.client_data import ClientData
from fedslr.data.federation import Federation


class ClientsOnDevice(Sequence[ClientData]):
    """Clients whose data is read, validated and sent to a device whenever it is used."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        self.federation, self.device, self.dtype = federation, device, dtype
        self.input_shape = federation.input_shape

    def __len__(self) -> int:
        return len(self.federation.clients)

    def __getitem__(self, client: Any) -> Any:
        data = self.federation.clients[client]
        self.federation.validate(client, data)
        return data.to(self.device, self.dtype)


def clients_on_device(federation: Federation, device: torch.device, dtype: torch.dtype) -> Sequence[ClientData]:
    """Return a federation's clients on a device: at once if they are in memory, otherwise when they are used."""
    if isinstance(federation.clients, list | tuple):
        return [c.to(device, dtype) for c in federation.clients]
    return ClientsOnDevice(federation, device, dtype)
