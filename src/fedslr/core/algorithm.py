"""The Algorithm protocol: the functions that a federated method consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from torch import Tensor

from fedslr.core import schema
from fedslr.core.problem import Problem
from fedslr.core.types import LocalData, Params, Payload, Round

Server = TypeVar("Server", bound=tuple[Any, ...])
Client = TypeVar("Client", bound=tuple[Any, ...])
Ledger = TypeVar("Ledger")

Phases = tuple[Literal["global", "personal"], ...]
"""Training phases of a client: "global" is `local_update`, "personal" is `personalize`."""


class LedgerChange(NamedTuple):
    """The mean ledger of all clients before and after the uploads of a round were booked."""

    before: Any
    after: Any


class Algorithm(ABC, Generic[Server, Client, Ledger]):
    """A federated method: a frozen dataclass of hyperparameters with a handful of pure functions.

    Engines call these functions. The functions touch no file, device, random generator or print. The words of the
    protocol are:

    - *w*: the parameters of the initial model, by name.
    - *state*: what the server or a client keeps between rounds, a NamedTuple of Params, or `()` for nothing.
    - *payload*: what a client receives in a round, a dictionary. Matrices may be `LowRank` factors in a broadcast;
      clients receive dense tensors.
    - *upload*: what a client sends back, with the keys and shapes of its payload. Models are sent as differences
      `v − w`.
    - *ledger*: a tree that a client and the server must agree on, such as a dual or a control variate, or `()`. `book`
      defines how a counted upload changes a ledger. Only the engine calls `book`: with every upload for the ledger of
      its client, and with the mean upload for the mean of all ledgers, which the server holds.
    - *problem*: the model, the loss and the weight decay, which give gradients.
    - *data*: a client's training data, which gives batches.
    - *round*: the round's number, step sizes and epochs.

    Raises:
        FedslrError: A hyperparameter has a wrong type or is out of its range.
    """

    name: ClassVar[str]
    """The method's name in tables and, for methods of the package, in recipes."""
    has_global_model: ClassVar[bool] = True
    """Whether `shared(payload)` is a complete model that every client could use."""
    planned: ClassVar[bool] = False
    """Whether a round depends on the total number of rounds. A run of such a method cannot be extended."""
    plain_sgd: ClassVar[Phases] = ()
    """The phases whose local steps are right for plain SGD only: no other optimizer, and no bound on gradients."""
    server_sees: ClassVar[Literal["mean", "each"]] = "mean"
    """"mean" if `aggregate` needs only the weighted mean of the uploads, "each" if it needs every upload."""

    def __post_init__(self) -> None:
        schema.check(self)

    # --- required -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def init_server(self, w: Params) -> Server:
        """Return the server's state before the first round, given the initial model."""

    @abstractmethod
    def init_client(self, w: Params) -> Client:
        """Return a client's state before its first round, given the initial model; `()` if clients keep nothing."""

    @abstractmethod
    def broadcast(self, server: Server, ledger: Ledger) -> Payload:
        """Return the payload that the server sends in a round.

        Args:
            server: The server's state.
            ledger: The mean ledger of all clients.
        """

    @abstractmethod
    def local_update(
        self, problem: Problem, client: Client, ledger: Ledger, payload: Payload, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """Train one client.

        Args:
            problem: The learning problem.
            client: The client's state.
            ledger: The client's ledger.
            payload: What the client received, with dense tensors.
            data: The client's training data.
            round: The round's number, step sizes and epochs.

        Returns:
            The client's new state, and its upload with the keys and shapes of the payload.
        """

    @abstractmethod
    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """Return the server's state after a round.

        Args:
            server: The server's state before the round.
            ledger: The mean ledger before and after the uploads of this round were booked.
            mean_upload: Σ ω·share·upload / Σ ω·share over the clients of the round. With `server_sees = "each"`, a
                mapping from a client's number to share·upload.
            round: The round's number and step sizes.
        """

    @abstractmethod
    def personal_model(self, problem: Problem, client: Client, payload: Payload, data: LocalData) -> Params:
        """Return all parameters of a client's personal model.

        Args:
            problem: The learning problem.
            client: The client's state.
            payload: What the client received last, or would receive now.
            data: The client's training data, on which the personal model may be trained.
        """

    # --- methods with a ledger ----------------------------------------------------------------------------------------

    def init_ledger(self, w: Params) -> Ledger:
        """Return the ledger of a new client: zeros, or `()` for a method without one."""
        return ()  # type: ignore[return-value]

    def book(self, ledger: Ledger, upload: Payload, share: Tensor, round: Round) -> Ledger:
        """Return the ledger after an upload was counted.

        Args:
            ledger: The ledger of a client with the client's upload, or the mean ledger with the mean upload.
            upload: The upload.
            share: The share of the upload that the server counted, from 0 to 1, as a float64 scalar tensor. The result
                must be affine in it, equal to `ledger` for a share of 0, and linear in ledger and upload together.
            round: The round's number and step sizes.
        """
        return ledger

    # --- defaults that few methods change -----------------------------------------------------------------------------

    def personalize(self, problem: Problem, client: Client, payload: Payload, data: LocalData, round: Round) -> Client:
        """Train the parts that never leave the client, after its upload was sent; return the client's new state.

        The arguments are those of `local_update`; `client` is the state that `local_update` returned.
        """
        return client

    def weight(self, num_examples: int) -> float:
        """Return the weight ω of a client in all means, given its number of training samples; 1 by default."""
        return 1.0

    def clipped(self, upload: Payload) -> Payload:
        """Return the part of an upload that a norm bound applies to; the whole upload by default."""
        return upload

    def address(self, client: Client) -> Payload:
        """Return what `addressed` needs of a client's state, such as a mask; called after `local_update`."""
        return {}

    def addressed(self, payload: Payload, address: Payload, number: int) -> Payload:
        """Return the payload of one client; the whole broadcast by default.

        Args:
            payload: The broadcast.
            address: What `address` returned for the client.
            number: The client's number.
        """
        return payload

    def shared(self, payload: Payload) -> Payload:
        """Return the part of a broadcast that is the global model; the whole broadcast by default.

        The size columns of tables count its parameters.
        """
        return payload

    def deployed(self, client: Client, payload: Payload) -> Payload:
        """Return the parts that a client keeps to run its personal model; `shared(payload)` by default.

        The size columns of tables count their parameters.
        """
        return self.shared(payload)

    has_diagnostics: ClassVar[bool] = False
    """Whether `diagnose` is implemented."""

    def diagnose(self, run: RunView) -> Diagnosis:
        """Return the quantities of the method's convergence theory after a round."""
        raise NotImplementedError

    def advise(self, run: Progress) -> str | None:
        """Return one line of advice if a run shows that the hyperparameters do not suit it; None by default.

        Engines call this after every evaluation. They pass the first advice of a run on as a warning.
        """
        return None

    @classmethod
    def personalizes(cls) -> bool:
        """Return whether clients continue to train after their upload."""
        return cls.personalize is not Algorithm.personalize

    @classmethod
    def averages(cls) -> bool:
        """Return whether `aggregate` does no more than to add the mean upload to the model of the server.

        An optimizer of the server then may replace the mean upload by its own step.
        """
        return False

    @classmethod
    def addresses(cls) -> bool:
        """Return whether clients receive different parts of the broadcast."""
        return cls.addressed is not Algorithm.addressed


class RunView(NamedTuple):
    """The state of the whole federation after a round, for `Algorithm.diagnose`. Lists have one entry per client."""

    problem: Problem
    server: Any
    mean_ledger: Any
    clients: list[Any]
    ledgers: list[Any]
    local_models: list[Params]
    """The models that the clients uploaded last."""
    data: list[Any]
    """The training data: objects with tensors `x` and `y`."""
    prepare: Any
    """A function from raw inputs to the inputs of the model."""
    round: Round


class Progress(NamedTuple):
    """The sizes, ranks and scores of a run at an evaluation, for `Algorithm.advise`."""

    round: Round
    """The round that was evaluated last."""
    dense: int
    """The parameters of the dense model."""
    shared: int
    """The parameters that the global model stores."""
    personal: float
    """The parameters that a client keeps for its personal model, as a mean over clients."""
    ranks: Mapping[str, int]
    """The rank of every layer that the server holds as factors."""
    full_ranks: Mapping[str, int]
    """The full rank of every layer."""
    history: Sequence[tuple[int, float]]
    """The number of finished rounds and the mean accuracy of the global model, for every evaluation."""


class Diagnosis(NamedTuple):
    """The quantities of a convergence theory by name, and a warning if they show that the theory does not apply."""

    figures: dict[str, float]
    warning: str | None = None
