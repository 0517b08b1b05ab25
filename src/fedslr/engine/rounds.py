"""The loop of a run: sample, train, aggregate, evaluate, record, checkpoint. Engines do the training."""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fedslr import models
from fedslr.algorithms import theory
from fedslr.channel import layout
from fedslr.channel.model_size import Sizes, parameters, parameters_of
from fedslr.channel.transport import Encoded, Measured
from fedslr.core import factored, tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import CheckpointError, FedslrError, WireError
from fedslr.core.group import Group
from fedslr.core.problem import Task
from fedslr.core.states import plain, restore
from fedslr.core.types import Loss, Params, Payload, Round
from fedslr.data.federation import Federation, placed
from fedslr.engine import contract, preflight, selection
from fedslr.engine.batched import TOGETHER, Batched
from fedslr.engine.choice import choose
from fedslr.engine.cohort_batches import Unbatchable
from fedslr.engine.settings import Settings
from fedslr.storage.checkpoint import NO_MODELS, Checkpoints, Generation, require_checkpoint
from fedslr.storage.client_store import ClientStore
from fedslr.storage.record import Record
from fedslr.storage.run_folder import RunFolder
from fedslr.storage.statistics import Evaluation
from fedslr.tasks import losses

LARGE = 1000.0
"""An input beyond this is of no scale that models are trained on."""
CHANCES = 5
"""How often a model is asked the same, to see whether it answers by chance."""
ALIKE = 0.02
"""How far answers of one model may be apart, as a share of the largest: products of a GPU may be rounded."""
PHASES = ("train", "aggregate", "evaluate", "checkpoint")
COUNTED = ("bytes_down", "bytes_up", "numbers_down", "numbers_up")


class Announced(NamedTuple):
    """What the server sends to all, its size, and what clients receive of it."""

    broadcast: Payload
    size: layout.Size
    payload: Payload


class Simulation:
    """A federation that trains in this process, or in several. Every byte that would travel is counted."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        federation: Federation,
        model: str | nn.Module,
        settings: Settings,
        folder: RunFolder | None = None,
        loss: Loss | None = None,
        warn: Callable[[str], None] = lambda text: None,
        select: selection.Select | None = None,
        group: Group | None = None,
    ) -> None:
        self.group = group or Group()
        self.algorithm, self.federation, self.settings = algorithm, federation, settings
        self.folder, self.warn = folder, warn
        self.num_clients = len(federation.clients)
        self.cohort_size = settings.cohort_size(self.num_clients)
        self.select = select or selection.find(settings.selection)
        self.examples = [len(c.y) for c in federation.clients]
        drawn = functools.partial(selection.draw, self.select, self.cohort_size, self.examples, settings.seed)
        # Every cohort is drawn once, a round before it trains.
        self._cohort = functools.lru_cache(2)(drawn)
        self.evaluated = selection.evaluated(settings.evaluate_clients, self.num_clients, settings.seed)
        self.diagnosed = theory.require_supported(algorithm) if settings.diagnostics else None

        module = models.build(model, federation.input_shape, federation.num_classes, settings.seed)
        device, dtype = settings.torch_device(), settings.torch_dtype()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels and graphs go where the current device is
        module = module.to(device, dtype)
        loss = loss or losses.find(settings.loss)
        for warning in preflight.check(module, federation, loss):
            warn(warning)
        self.task = Task(module, loss, settings.weight_decay)
        self.task.copies = preflight.works_in_place(module, federation)
        clients = placed(federation, device, dtype)
        prepared = federation.crop_padding, federation.normalization
        usual = -(-self.cohort_size // self.group.size)
        self.engine = choose(settings, algorithm, self.task, clients, self.examples, *prepared, usual)
        self.post = Measured() if device.type == "cuda" else Encoded(self.task.params())

        self.start = self.task.params()
        self.server = algorithm.init_server(contract.own(self.start), self.num_clients)
        fresh = algorithm.init_client(self.start)
        contract.require_states(self.server, fresh, kept=folder is not None)
        self.client_kind = type(fresh)
        self.done = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._ahead: Future[tuple[Any, Announced]] | None = None
        """The next server, where it is made while clients still train."""
        self._expected: list[Any] | None = None
        """The states of the next cohort, where an engine has been told of them."""
        self._step_warned = False
        self._saved, self._saved_at = 0, monotonic()
        self._check_group()
        self._open_store(device)
        self.announced = self._announced(self.server)

    # --- one round ---------------------------------------------------------------------------------------------------

    def rounds(self) -> Iterator[Record]:
        """Run what is left of the run, a record for every finished round."""
        while self.done < self.settings.rounds:
            yield self._round()
        self.store.flush()

    def _round(self) -> Record:
        s, before = self.settings, dict(self.seconds)
        round = s.round(self.done)
        sampled = self._cohort(self.done)
        record = Record(round=self.done + 1, lr=round.lr, clients=sampled)

        with self._timed("train"):
            if self.done + 1 < s.rounds:
                self.store.prefetch(self.group.mine(self._cohort(self.done + 1)))
            mine = self.group.mine(sampled)
            mean = self._pool(self._train(mine, round, record) if mine else None, mine, record)
        with self._timed("aggregate"):
            try:
                made = self._aggregate(mean, len(sampled)) if self._ahead is None else self._ahead.result()
                self.server, self.announced = made
                self._ahead = None
            except (WireError, LinAlgError) as error:
                why = str(error).splitlines()[0]
                lower = contract.what_to_lower(self.algorithm)
                raise FedslrError(f"round {self.done + 1}: the global model diverged: {why}; lower {lower}") from error
        self.done += 1
        record.rank = self.algorithm.ranks(self.server)
        if s.is_evaluated(self.done):
            with self._timed("evaluate"):
                record.add_evaluation(self.evaluate(), self.evaluated if s.evaluate_clients else None)
                record.add_sizes(self.sizes())
                if self.diagnosed is not None:
                    record.diagnostics = self._diagnose(self.diagnosed, round)
        record.seconds_by = {p: round_to_us(self.seconds[p] - before[p]) for p in PHASES[:3]}
        record.seconds = round_to_us(sum(record.seconds_by.values()))
        if self.folder is not None:
            self.folder.append(record)
            if self._is_due():
                self.save()
        return record

    def _train(self, sampled: list[int], round: Round, record: Record) -> Payload:
        """The cohort trains; the weighted mean of what it uploads, unless the server is at work on it already."""
        if isinstance(self.engine, Batched):
            try:
                return self._train_together(self.engine, sampled, round, record)
            except Unbatchable as error:
                self._train_apart(self.engine, error)
                record.bytes_down = record.numbers_down = 0
        return self._train_each(sampled, round, record)

    def _train_apart(self, engine: Batched, error: Unbatchable) -> None:
        """From here on one client after another, unless another engine was asked for."""
        if self.settings.engine != "auto" or self.settings.compile:
            asked = "compile: got true" if self.settings.compile else f"engine: got '{self.settings.engine}'"
            raise FedslrError(
                f"{asked}, but the clients of this run cannot be trained together ({error}); "
                f"expected engine = 'auto' or 'eager'{', compile = false' if self.settings.compile else ''}"
            ) from error
        if self.device.type == "cuda":
            self.warn("the clients of this run cannot be trained together; they train one after another")
        self.engine, self._expected = engine.one_by_one(), None

    def _train_each(self, sampled: list[int], round: Round, record: Record) -> Payload:
        mean = tree.Mean()
        for client, weight in zip(sampled, self._weights(sampled), strict=True):
            with self._named(round, client):
                state = self.state(client)
                state, upload = self.engine.local_update(client, state, self._send_to(state, record), round)
                factored.require_finite({"state": plain(state)})
                contract.require_upload(upload, self.payload)
                size, received = self.post.send(upload)
            record.count_up(size)
            mean.add(received, weight)
            self._keep(client, state, upload)
        return mean.value()

    def _train_together(self, engine: Batched, sampled: list[int], round: Round, record: Record) -> Payload:
        states, self._expected = self._expected or [self.state(client) for client in sampled], None
        payloads = [self._send_to(state, record) for state in states]
        weights = self._weights(sampled)
        made = engine.train(sampled, states, payloads, round)
        contract.require_upload(made.uploads, self.payload, stacked=True)
        # From here to where sizes are read nothing waits for a GPU, if it has room for all states: it is done while
        # clients still train.
        if self.group.size == 1:
            self._ahead = engine.meanwhile(lambda: self._aggregate(made.mean(weights), len(sampled)))
        read = self.post.survey(made.uploads, plain(made.states), made.clients)
        kept = made.each()
        try:
            for slot, (client, state) in enumerate(zip(sampled, kept, strict=True)):
                self._keep(client, state, made.upload(slot) if self.settings.diagnostics else {})
            self._expect_next(engine)
        finally:
            # Before anything that comes of it, such as a file that takes no such numbers: whose training diverged.
            sizes, broken = read()
            for slot in broken:
                with self._named(round, sampled[slot]):
                    factored.require_finite({"state": plain(kept[slot]), **made.upload(slot)})
        for size in sizes:
            record.count_up(size)
        return made.mean(weights) if self._ahead is None else {}

    def _weights(self, mine: list[int]) -> Sequence[float]:
        """How much the clients of this process count, of a cohort in which somebody does."""
        every = {c: self.algorithm.weight(self.examples[c]) for c in self._cohort(self.done)}
        contract.checked_weights(list(every.values()))
        own = [every[c] for c in mine]
        # Where none here counts, whatever their mean is counts nothing among those of other processes.
        return own if any(own) else [1.0] * len(own)

    def _expect_next(self, engine: Batched) -> None:
        """Let an engine that looks ahead prepare the next round."""
        if not engine.looks_ahead or self.done + 1 == self.settings.rounds:
            return
        mine = self.group.mine(self._cohort(self.done + 1))
        if mine:
            self._expected = [self.state(client) for client in mine]
            engine.expect(mine, self._expected, self.settings.round(self.done + 1))

    def _aggregate(self, mean: Payload, cohort_size: int) -> tuple[Any, Announced]:
        now = (self.settings.seed, self.done)
        server = contract.aggregated(self.algorithm, self.server, mean, cohort_size, self.start, *now)
        return server, self._announced(server)

    def _pool(self, mean: Payload | None, mine: list[int], record: Record) -> Payload:
        """The mean over the clients of all processes, whose messages are counted too."""
        weight = sum(self.algorithm.weight(self.examples[c]) for c in mine)
        pooled, counts = self.group.mean(mean, weight, [getattr(record, name) for name in COUNTED], self.device)
        for name, count in zip(COUNTED, counts, strict=True):
            setattr(record, name, count)
        return pooled

    def _keep(self, client: int, state: Any, upload: Payload) -> None:
        kept = {"state": plain(state)}
        if self.settings.diagnostics:
            kept["local"] = tree.add(self.payload, upload)
        self.store.put(client, kept, self.done + 1)

    @contextmanager
    def _named(self, round: Round, client: int) -> Iterator[None]:
        """Whatever goes wrong here, went wrong in this client's round."""
        where = f"round {round.number + 1}, client {client}"
        try:
            yield
        except WireError as error:
            x = self.federation.inputs(self.federation.clients[client].x)
            largest = float(x.abs().max()) if x.is_floating_point() else 0.0
            scale = f", or inputs of a smaller scale (its largest is {largest:.3g})" if largest > LARGE else ""
            helps = f"a lower lr helps (now {round.lr:g}){scale}"
            raise FedslrError(f"{where}: training diverged: {error}; {helps}") from error
        except Exception as error:
            error.add_note(f"in {where} ({self.algorithm.name})")
            raise

    def _announced(self, server: Any) -> Announced:
        broadcast = contract.checked_broadcast(self.algorithm.broadcast(server))
        return Announced(broadcast, *self.post.send(broadcast))

    def _send_to(self, state: Any, record: Record) -> Payload:
        """What one client is sent: the broadcast that all share, or, where the method addresses it, a part of it."""
        mine = self.algorithm.addressed(self.broadcast, state)
        size, payload = self.announced[1:] if mine is self.broadcast else self.post.send(mine)
        record.count_down(size)
        return payload

    # --- what a run knows --------------------------------------------------------------------------------------------

    @property
    def broadcast(self) -> Payload:
        return self.announced.broadcast

    @property
    def payload(self) -> Payload:
        return self.announced.payload

    @property
    def device(self) -> torch.device:
        return next(iter(self.start.values())).device

    def state(self, client: int) -> Any:
        """A client's state; as it began if it never trained."""
        kept = self.store.get(client)
        return self.algorithm.init_client(self.start) if kept is None else restore(self.client_kind, kept["state"])

    def local_model(self, client: int) -> Params:
        """The model a client last uploaded; the initial one if it never trained."""
        kept = self.store.get(client)
        return self.start if kept is None else kept["local"]

    def personal_params(self, client: int) -> Params:
        return self.engine.personal_model(client, self.state(client), self.payload)

    def evaluate(self) -> Evaluation:
        shared = self.algorithm.global_model(self.server)
        if shared is not None:
            shared = contract.checked_model("global_model", shared, self.start)
        found = self._evaluate(self.group.mine(self.evaluated), shared)
        together = None if found.global_ is None else self.group.each(self.evaluated, found.global_)
        return Evaluation(together, self.group.each(self.evaluated, found.personal))

    def _evaluate(self, mine: list[int], shared: Params | None) -> Evaluation:
        """Some clients, each with its own model and with the shared one."""
        if not mine:
            return Evaluation(None if shared is None else [], [])
        if isinstance(self.engine, Batched):
            try:
                return self._evaluate_together(self.engine, shared, mine)
            except Unbatchable as error:
                self._train_apart(self.engine, error)
        personal = [self.engine.accuracy(self.personal_params(c), [c])[0] for c in mine]
        return Evaluation(None if shared is None else self.engine.accuracy(shared, mine), personal)

    def _evaluate_together(self, engine: Batched, shared: Params | None, mine: list[int]) -> Evaluation:
        """Some clients' models at a time; the answers are read back when all have been given."""
        groups = _groups(mine)
        personal = [engine.personal_accuracy(g, [self.state(c) for c in g], self.payload) for g in groups]
        ours = None if shared is None else [engine.shared_accuracy(shared, g) for g in groups]
        tested = [len(self.federation.clients[c].y_test) for c in mine]

        def shares(right: list[torch.Tensor]) -> list[float | None]:
            return [r / n if n else None for r, n in zip(torch.cat(right).tolist(), tested, strict=True)]

        return Evaluation(None if ours is None else shares(ours), shares(personal))

    def sizes(self) -> Sizes:
        """Numbers that models need, as the disk gives them back, so that a resumed run says the same."""
        dense = sum(x.numel() for x in self.start.values())
        mine = self.group.mine(self.evaluated)
        sent = factored.compact(self.broadcast)
        personal = [
            size
            for group in _groups(mine)
            for size in parameters_of([factored.compact(self.algorithm.deployed(self.state(c), sent)) for c in group])
        ]
        return Sizes(dense, parameters(self.algorithm.shared(sent)), self.group.each(self.evaluated, personal))

    def _diagnose(self, algorithm: theory.Supported, round: Round) -> dict[str, float]:
        objectives = [theory.Objective(self.task, c.x, c.y, self.federation.normalization) for c in self.engine.clients]
        states, local = zip(*((self.state(c), self.local_model(c)) for c in range(self.num_clients)), strict=True)
        with self.engine.seeded(0, round.number), torch.enable_grad():
            found = theory.diagnose(algorithm, self.server, states, local, objectives, round.lr)
        bound = found["eta_g_bound"]
        if algorithm.eta_g > bound and not self._step_warned:
            self._step_warned = True
            self.warn(
                f"eta_g = {algorithm.eta_g:g} is above 1/(2L) = {bound:.3g}, with L as estimated in round "
                f"{round.number + 1}: the convergence theory does not cover it"
            )
        return found

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[phase] += perf_counter() - begun

    def _check_group(self) -> None:
        """Several processes must have been given the same run, and one they can share out."""
        if self.group.size == 1:
            return
        if self.settings.diagnostics:
            raise FedslrError("diagnostics: they need all clients in one process; run without torchrun")
        if self.group.size > self.num_clients:
            raise FedslrError(
                f"torchrun: {self.group.size} processes for {self.num_clients} clients; expected at most one for each"
            )
        if self.settings.device.startswith("cuda:"):
            raise FedslrError(
                f"device: got '{self.settings.device}', but each process has its own; expected auto, cuda or cpu"
            )
        start = hashlib.sha256(b"".join(_bytes(x) for x in self.start.values())).hexdigest()
        given = (self.fingerprint, self.model_fingerprint, start, repr(self.algorithm), repr(self.settings))
        if any(other != given for other in self.group.gather(given)):
            raise FedslrError("torchrun: the processes were given different data, models or settings; seed them alike")

    # --- checkpoint and resume ---------------------------------------------------------------------------------------

    def _open_store(self, device: torch.device) -> None:
        self.checkpoints: Checkpoints | None = None
        clients: Path | None = None
        if self.folder is not None:
            self.checkpoints = Checkpoints(self.folder.path / "checkpoint", self.group)
            clients = self.checkpoints.clients
        elif self.settings.memory_bytes() is not None:
            clients = Path(tempfile.mkdtemp(prefix="fedslr-"))
        self.store = ClientStore(clients, device, self.settings.memory_bytes())
        if self.folder is None and clients is not None:
            weakref.finalize(self, _discard, self.store, clients)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells whether a resumed run has the data it began with."""
        digest = hashlib.sha256(repr(self.federation.normalization or "").encode())
        for client in self.federation.clients:
            for part in (client.x, client.y, client.x_test, client.y_test):
                digest.update(str(tuple(part.shape)).encode())
                digest.update(_bytes(part))
        return digest.hexdigest()

    @functools.cached_property
    def _first_answers(self) -> list[float] | None:
        return self._answers(self.start)

    @property
    def architecture(self) -> str:
        """What tells a model from others, whatever its weights are."""
        shapes = [(name, tuple(p.shape)) for name, p in self.task.model.named_parameters()]
        return hashlib.sha256(repr((repr(self.task.model), shapes)).encode()).hexdigest()[:8]

    @functools.cached_property
    def model_fingerprint(self) -> str:
        """The model's layers and what of it does not train; its weights are in the checkpoint."""
        digest = hashlib.sha256(repr(self.task.model).encode())
        for name, x in self.task.model.state_dict().items():
            if name not in self.start:
                digest.update(name.encode() + _bytes(x))
        return digest.hexdigest()

    @torch.no_grad()
    def _answers(self, start: Params) -> list[float] | None:
        """What the initial model says of two samples: its code is in no file. None where it says it by chance."""
        x = preflight.shown(self.task.model, self.federation, self.federation.clients[0].x[:2].clone())
        try:
            said = []
            for seed in range(CHANCES):
                with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                    torch.manual_seed(seed)
                    said.append(self.task.outputs(start, x.clone()).flatten())
        except Exception:  # a probe: whatever is wrong with such a batch, training may never see one
            return None
        same = all(torch.equal(said[0], one) for one in said) and bool(said[0].isfinite().all())
        return said[0].tolist() if same else None

    def save(self) -> None:
        if self.checkpoints is None or self.folder is None or self._saved == self.done:
            return
        with self._timed("checkpoint"):
            notes = {
                "metrics": self.folder.sync(),
                "seconds": self.seconds,
                "data": self.fingerprint,
                "crop_padding": self.federation.crop_padding,
                "model": self.model_fingerprint,
                "answers": self._first_answers,
                "functions": self.functions,
            }
            server = {"server": plain(self.server), "start": self.start}
            self.checkpoints.save(self.done, server, self.store, notes)
            self._saved, self._saved_at = self.done, monotonic()

    def _is_due(self) -> bool:
        """Whether the round that is done is to be saved: the last one, or one that the rounds and the clock allow.

        After a round that the clock held back it is the next one for which there is time. Several processes go by the
        clock of the first.
        """
        every, minutes = self.settings.checkpoint_every, self.settings.checkpoint_minutes
        if self.done == self.settings.rounds:
            return True
        if self.done % every != 0 and self.done - self._saved <= every:
            return False
        return not minutes or self.group.from_first(lambda: monotonic() - self._saved_at >= 60 * minutes)

    def begin(self) -> None:
        """Start in a clean folder: what an earlier attempt left before its first checkpoint is dropped."""
        if self.folder is not None:
            self.folder.rewind(None)
            self.store.load({}, set(), self.group.mine)
            self.group.wait()

    def resume(self) -> bool:
        """Go back to the last finished round on disk; False if there is none."""
        if self.checkpoints is None or self.folder is None:
            raise FedslrError("resume: there is no run folder to resume from; give one with out")
        found = self.checkpoints.load(self.warn)
        if found is None:
            if (self.folder.path / "summary.json").exists():
                raise CheckpointError(
                    f"{self.folder.path}: this run is finished, but its checkpoint/ is not there, so there is nothing "
                    "to go on from; its figures are left as they are, choose another --out"
                )
            if self.folder.has_lines():
                self.warn(
                    f"there is no checkpoint in {self.folder.path}, so this run starts again from the first round"
                )
            self.begin()
            return False
        generation, kept = found
        if generation.rounds > self.settings.rounds:
            raise FedslrError(f"rounds: got {self.settings.rounds}, but the run already has {generation.rounds}")
        self._compare_functions(generation.notes.get("functions", {}))
        self._go_back_to(generation, kept)
        self.folder.rewind(generation.notes["metrics"])
        self.checkpoints.restore(self.store, generation)
        return True

    def look_into(self, folder: Path) -> None:
        """Take the models that the newest checkpoint of a run folder holds. Nothing there is changed."""
        # A folder that nobody trained in is not to be given a checkpoint folder by being looked at.
        checkpoints = Checkpoints(require_checkpoint(folder))
        found = checkpoints.load(self.warn, clients=False)
        if found is None:
            raise CheckpointError(NO_MODELS.format(folder))
        generation, kept = found
        self.store = ClientStore(checkpoints.clients, self.device, budget=0)
        self.store.entries = dict(generation.clients)
        self._go_back_to(generation, kept)

    def _go_back_to(self, generation: Generation, kept: dict[str, Any]) -> None:
        self._check_resumable(generation, kept)
        kept = factored.to_device(kept, self.device)
        self.start = kept["start"]
        self.server = restore(type(self.server), kept["server"])
        self.done = self._saved = generation.rounds
        self._ahead = self._expected = None
        self.seconds = {**self.seconds, **generation.notes["seconds"]}
        self.announced = self._announced(self.server)

    @property
    def functions(self) -> dict[str, str]:
        """What a run is given that no file can hold: only its name is kept."""
        given = {"algorithm": type(self.algorithm), "loss": self.task.loss_function, "selection": self.select}
        return {name: _called(thing) for name, thing in given.items()}

    def _compare_functions(self, before: dict[str, str]) -> None:
        for name, now in self.functions.items():
            if before.get(name, now) != now:
                self.warn(f"resume: {name} is {now}, but the run began with {before[name]}")

    def _check_resumable(self, generation: Generation, kept: dict[str, Any]) -> None:
        cropped = generation.notes.get("crop_padding", self.federation.crop_padding)
        if generation.notes["data"] != self.fingerprint or cropped != self.federation.crop_padding:
            raise CheckpointError(
                "the data are not the ones this run began with; expected the same: restore them, or begin another run"
            )
        before = {k: (tuple(x.shape), x.dtype) for k, x in kept["start"].items()}
        same = before == {k: (tuple(x.shape), x.dtype) for k, x in self.start.items()}
        if not same or generation.notes["model"] != self.model_fingerprint:
            raise CheckpointError("the model is not the one this run began with; expected the same")
        said = generation.notes.get("answers")
        if said is not None and not _are_near(said, self._answers(factored.to_device(kept["start"], self.device))):
            raise CheckpointError(
                "the model does not say what the one said that this run began with: its code has changed; restore it"
            )


def _are_near(said: Sequence[float], says: Sequence[float] | None) -> bool:
    """Whether answers are the same up to what other machines and kernels make of them; so are those that are none."""
    if says is None or len(said) != len(says):
        return says is None
    before, now = torch.tensor(said), torch.tensor(says)
    return bool((before - now).abs().max() <= ALIKE * before.abs().max().clamp(min=1e-6))


def _groups(clients: list[int]) -> list[list[int]]:
    """Clients whose models are looked at together."""
    return [clients[i : i + TOGETHER] for i in range(0, len(clients), TOGETHER)]


def _discard(store: ClientStore, folder: Path) -> None:
    """Whatever a run without a folder of its own put on the disk."""
    store.close()
    shutil.rmtree(folder, ignore_errors=True)


def _called(function: Any) -> str:
    """What a function is called, and where it is from."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _bytes(x: torch.Tensor) -> bytes:
    """What a tensor is made of, whatever its element type."""
    return x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def round_to_us(seconds: float) -> float:
    return round(seconds, 6)
