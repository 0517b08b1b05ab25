"""The Algorithm protocol: the functions that a federated method consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from torch import Tensor

from fedslr.core import schema
from fedslr.core.errors import FedslrError
from fedslr.core.problem import Problem
from fedslr.core.types import LocalData, Params, Payload, Round

Server = TypeVar("Server", bound=tuple[Any, ...])
Client = TypeVar("Client", bound=tuple[Any, ...])
Ledger = TypeVar("Ledger")


class LedgerChange(NamedTuple):
    """The mean ledger before and after the uploads of a round were booked."""

    before: Any
    after: Any


class Algorithm(ABC, Generic[Server, Client, Ledger]):
    """A federated method: hyperparameters (a frozen dataclass) and a handful of pure functions.

    Engines run these functions. They touch no file, device, random generator or print. Server and client states are
    NamedTuples of Params, or `()`. A ledger is a tree of Params, or `()`.

    Uploads are differences `v − w`, never models. A *ledger* is what a client and the server must agree on, such as a
    dual or a control variate. `book` says how counting an upload changes a ledger. The engine alone calls `book`: for
    the ledger of every client, and with the mean upload for the mean of all ledgers, which the server holds.
    """

    name: ClassVar[str]
    """The method's name in tables and, for methods of the package, in recipes."""
    has_global_model: ClassVar[bool] = True
    """Whether `shared(broadcast)` is a complete model that every client could use."""
    planned: ClassVar[bool] = False
    """Whether a round depends on the total number of rounds. Such a run cannot be made longer."""
    server_sees: ClassVar[Literal["mean", "each"]] = "mean"
    """"mean" if the weighted mean of the uploads is enough for `aggregate`, "each" if it needs every upload."""

    def __post_init__(self) -> None:
        schema.check(self)

    # --- required -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def init_server(self, w: Params) -> Server:
        """Return the server state before the first round, from the initial model `w`."""

    @abstractmethod
    def init_client(self, w: Params) -> Client:
        """Return the state of a client before its first round, from the initial model; `()` if it keeps nothing."""

    @abstractmethod
    def broadcast(self, server: Server, ledger: Ledger) -> Payload:
        """Return the payload of a round; `ledger` is the mean over all clients.

        Matrices may be `LowRank` factors. Clients receive them multiplied out.
        """

    @abstractmethod
    def local_update(
        self, problem: Problem, client: Client, ledger: Ledger, payload: Payload, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """Train one client; return its new state and its upload, a tree of the form of its payload."""

    @abstractmethod
    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """Return the server state after a round.

        Args:
            server: The state before the round.
            ledger: The mean ledger before and after the uploads of this round were booked.
            mean_upload: Σ ω·share·upload / Σ ω·share over the clients of the round. With `server_sees = "each"` it is
                a mapping from a client's number to share·upload instead.
            round: The round's number and step sizes.
        """

    @abstractmethod
    def personal_model(self, problem: Problem, client: Client, payload: Payload, data: LocalData) -> Params:
        """Return a client's personal model, from its state and its payload. It may adapt on the client's data."""

    # --- methods with a ledger ----------------------------------------------------------------------------------------

    def init_ledger(self, w: Params) -> Ledger:
        """Return the ledger of a new client: zeros, or `()` for a method without one."""
        return ()  # type: ignore[return-value]

    def book(self, ledger: Ledger, upload: Payload, share: Tensor, round: Round) -> Ledger:
        """Return the ledger after `share` of an upload was counted; affine in `share`, a float64 scalar tensor."""
        return ledger

    # --- defaults that few methods change -----------------------------------------------------------------------------

    def personalize(self, problem: Problem, client: Client, payload: Payload, data: LocalData, round: Round) -> Client:
        """Train what never leaves the client, after its upload was sent; return the client's new state."""
        return client

    def weight(self, num_examples: int) -> float:
        """Return the weight ω of a client in all means; 1 unless the method says otherwise."""
        return 1.0

    def clipped(self, upload: Payload) -> Payload:
        """Return the part of an upload that a norm bound applies to; all of it unless the method says otherwise."""
        return upload

    def address(self, client: Client) -> Payload:
        """Return what the server must know of a client for `addressed`, such as a mask; read after `local_update`."""
        return {}

    def addressed(self, payload: Payload, address: Payload, number: int) -> Payload:
        """Return the part of a broadcast that the client of this number is sent; all of it by default."""
        return payload

    def shared(self, payload: Payload) -> Payload:
        """Return the part of a broadcast that is the global model; the size columns count its parameters."""
        return payload

    def deployed(self, client: Client, payload: Payload) -> Payload:
        """Return the parts that a client keeps to run its personal model; the size columns count their parameters."""
        return self.shared(payload)

    has_diagnostics: ClassVar[bool] = False
    """Whether `diagnose` is implemented."""

    def diagnose(self, run: RunView) -> Diagnosis:
        """Return the quantities of the method's convergence theory after a round."""
        raise FedslrError(f"diagnostics: {self.name} has no convergence theory here; set diagnostics = false")

    @classmethod
    def personalizes(cls) -> bool:
        """Return whether clients go on to train after their upload."""
        return cls.personalize is not Algorithm.personalize

    @classmethod
    def addresses(cls) -> bool:
        """Return whether clients are sent different parts of the broadcast."""
        return cls.addressed is not Algorithm.addressed


class RunView(NamedTuple):
    """The whole federation after a round, for `Algorithm.diagnose`. Lists have one entry per client."""

    problem: Problem
    server: Any
    mean_ledger: Any
    clients: list[Any]
    ledgers: list[Any]
    local_models: list[Params]
    """The model that each client last uploaded."""
    data: list[Any]
    """The training data: objects with tensors `x` and `y`."""
    prepare: Any
    """A function from raw inputs to the inputs of the model."""
    round: Round


class Diagnosis(NamedTuple):
    """Quantities by name, and a warning if they show that the theory does not apply."""

    figures: dict[str, float]
    warning: str | None = None
