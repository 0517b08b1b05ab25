"""`run`: a method, a federation and a model in; a trained result out."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedslr import metrics, naming, schema
from fedslr.config import CUSTOM, DTYPES, Recipe, Settings, difference, dump, lasting
from fedslr.data import share_out
from fedslr.data.federation import Federation
from fedslr.deploy.ledger import FILE as LEDGER
from fedslr.engine import contract, distributed
from fedslr.engine.distributed import Group
from fedslr.engine.rounds import Simulation
from fedslr.errors import FedslrError, Interrupted
from fedslr.interrupts import Stop, stop_on_ctrl_c
from fedslr.matrix import is_matrix, matrix_shape
from fedslr.models import MODELS
from fedslr.record import Record, RunFolder, SharedFolder, read_records
from fedslr.report import percent, read_run
from fedslr.report.page import write_report
from fedslr.report.split import COUNTED, label_counts
from fedslr.track import Run as Tracked
from fedslr.track import Tracking
from fedslr.types import Algorithm, Loss, Params, Payload


class Result:
    """What a run leaves: its figures, its models and, if one was asked for, its folder."""

    def __init__(
        self,
        simulation: Simulation,
        records: list[dict[str, Any]],
        summary: dict[str, Any],
        out: Path | None = None,
    ) -> None:
        self._simulation = simulation
        self.records = records
        self.summary = summary
        self.out = simulation.folder.path if simulation.folder else out

    def __repr__(self) -> str:
        accuracy, s = self.summary["accuracy"], self.summary
        return (
            f"<{s['algorithm']} on {s['dataset']}, {s['rounds']} rounds: "
            f"personal models {percent(accuracy['personal'])}, global model {percent(accuracy['global'])}>"
        )

    @property
    def algorithm(self) -> Algorithm[Any, Any]:
        return self._simulation.algorithm

    @property
    def federation(self) -> Federation:
        return self._simulation.federation

    @property
    def global_params(self) -> Params:
        """The global model in full; for methods without one, the part the server holds."""
        shared = self._simulation.algorithm.global_model(self._simulation.server)
        return dict(contract.own(shared if shared is not None else self._simulation.payload))

    def personal_params(self, client: int) -> dict[str, Tensor]:
        """The parameters of one client's personal model."""
        return dict(contract.own(self._simulation.personal_params(self._checked(client))))

    def personal_parts(self, client: int) -> Payload:
        """What a client keeps of its personal model: factors, a sparse part, whatever the method holds."""
        state = self._simulation.state(self._checked(client))
        return self.algorithm.deployed(state, self._simulation.broadcast)

    def global_parts(self) -> Payload:
        """The global model as the server holds it: factors where the method has them."""
        return self.algorithm.shared(self._simulation.broadcast)

    def _checked(self, client: int) -> int:
        known = self._simulation.num_clients
        if not hasattr(client, "__index__") or not 0 <= client < known:
            raise FedslrError(f"client: got {client!r}, expected a whole number from 0 to {known - 1}")
        group = self._simulation.group
        if group.owner(client) != group.rank:
            raise FedslrError(f"client: {client} lives in the process of rank {group.owner(client)}; ask there")
        return int(client)

    def personal_model(self, client: int) -> nn.Module:
        """One client's personal model, ready to use."""
        return self._filled(self.personal_params(client))

    def global_model(self) -> nn.Module:
        """The global model, ready to use; an error for a method that has none."""
        if not self.has_global_model:
            raise FedslrError(f"{self.algorithm.name} has no global model; expected personal_model(client)")
        return self._filled(self.global_params)

    @property
    def rounds_left(self) -> int:
        """How many the run would still have gone on for; 0 if it came to its end."""
        return max(0, self._simulation.settings.rounds - self._simulation.done)

    @property
    def has_global_model(self) -> bool:
        return self.algorithm.global_model(self._simulation.server) is not None

    def _filled(self, params: Params) -> nn.Module:
        model = copy.deepcopy(self._simulation.task.model)
        model.load_state_dict(params, strict=False)
        return model.eval()


class Figures(NamedTuple):
    """What a summary says of a run besides its records."""

    algorithm: str
    dataset: str
    clients: int
    rounds: int
    seed: int
    sizes: metrics.Sizes
    seconds: Mapping[str, float]
    rank_full: Mapping[str, int]
    """The largest rank that every layer can have."""


def figures(simulation: Simulation) -> Figures:
    return Figures(
        simulation.algorithm.name,
        simulation.federation.name,
        simulation.num_clients,
        simulation.done,
        simulation.settings.seed,
        simulation.sizes(),
        simulation.seconds,
        full_ranks(simulation.start),
    )


def full_ranks(start: Params) -> dict[str, int]:
    """min(m, n) of the matrix π(x) of every layer that is one."""
    return {name: min(matrix_shape(tuple(x.shape))) for name, x in start.items() if is_matrix(x)}


def is_rerunnable(algorithm: Algorithm[Any, Any], federation: Federation, given: Mapping[str, str]) -> bool:
    """Whether config.toml alone is enough to do the run again: nothing was given that has no name in a recipe."""
    return not given and federation.options is not None and naming.is_found(type(algorithm))


def summarize(
    run: Figures, records: list[dict[str, Any]], rerunnable: bool, given: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The figures of a finished run, as summary.json has them; `given` is what config.toml has no name for."""
    last = records[-1]
    numbers = sum(r["numbers_down"] + r["numbers_up"] for r in records)
    return {
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "clients": run.clients,
        "rounds": run.rounds,
        "seed": run.seed,
        "rerunnable": rerunnable,
        **({"given": dict(given)} if given else {}),
        "accuracy": metrics.accuracy(records),
        "accuracy_best": metrics.accuracy(records, pick="best"),
        "accuracy_sampled": metrics.accuracy(records, clients="sampled"),
        "fairness": metrics.fairness(last),
        "parameters": run.sizes.summary(),
        "rank": last["rank"],
        "rank_full": {name: run.rank_full[name] for name in last["rank"] if name in run.rank_full},
        "bytes": {"down": sum(r["bytes_down"] for r in records), "up": sum(r["bytes_up"] for r in records)},
        "paper_gb": metrics.gigabytes(numbers),
        "seconds": {k: round(v, 6) for k, v in run.seconds.items()},
    }


def run(
    algorithm: Algorithm[Any, Any],
    federation: Federation,
    model: str | nn.Module = "cnn",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    loss: Loss | str = cross_entropy,
    on_round: Callable[[Record], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    warn: Callable[[str], None] | None = None,
    config: str | None = None,
    track: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train a federation and return its models and figures.

    A model is a name or an `nn.Module`, whose own weights are the starting point; a loss is a name or a function of
    scores and labels. `settings` are the fields of
    `fedslr.Settings`: rounds, clients_per_round, batch_size, epochs, personal_epochs, lr, lr_decay, weight_decay,
    selection (a name or a function, see `fedslr.engine.cohort`), seed, device, dtype, engine, compile, precision,
    store, memory_budget, diagnostics, evaluate_every, evaluate_clients, checkpoint_every, checkpoint_minutes. With
    `out` the run is written to a folder and can be resumed; `on_round` sees every finished round; when `should_stop`
    says so, the run saves and raises `Interrupted`, and at Ctrl-C it saves after the round it is in. `track` names
    trackers that are told every round: tensorboard, mlflow, wandb. In a script started by torchrun every process calls
    this, with the same arguments; clients are shared out, and the first process writes the folder.
    """
    if not isinstance(algorithm, Algorithm):
        raise FedslrError(f"algorithm: got {algorithm!r}, expected a method such as fedslr.FedSLR()")
    if not isinstance(federation, Federation):
        raise FedslrError("federation: expected what fedslr.load or Federation.from_arrays gives")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise FedslrError(f"out: got {out!r}, expected the path of a folder")
    if out is not None and not os.fspath(out):
        raise FedslrError("out: got nothing, expected the path of a folder")
    naming.require_usable(type(algorithm), folder=out is not None)
    functions = (("on_round", on_round), ("should_stop", should_stop), ("warn", warn))
    for name, function in (*functions, ("loss", None if isinstance(loss, str) else loss)):
        if function is not None and not callable(function):
            raise FedslrError(f"{name}: got {function!r}, expected a function")
    select = settings.get("selection") if callable(settings.get("selection")) else None
    known = "cross_entropy" if loss is cross_entropy else loss
    for name, asked in (("selection", settings.get("selection")), ("loss", known)):
        if asked == CUSTOM:
            raise FedslrError(f"{name}: for a custom one give the function itself")
    checked = schema.build(Settings, _plain({**settings, "loss": known})).settled()
    tell = warn or (lambda text: warnings.warn(text, stacklevel=3))
    text = config or dump(checked, algorithm, _data_table(federation), {"name": _model_name(model)})
    checked.cohort_size(len(federation.clients))
    own = None if isinstance(known, str) else known
    pressed = Stop()
    group = distributed.join(should_stop or pressed.__bool__)
    tracking = Tracking(_tracker_names(track), tell)
    folder = None if out is None else _open_together(group, Path(out), resume, text, algorithm.name, lasting(algorithm))
    # Whatever happens, and whichever of these fails: the folder is free again when all the others are done.
    with contextlib.ExitStack() as ending:
        if folder is not None:
            ending.callback(folder.close)
            if should_stop is None:
                ending.enter_context(stop_on_ctrl_c(pressed, tell))
            if group.first:
                ending.push(_reporting(folder.path, tell))
        ending.callback(tracking.finish, None)
        with naming.mistakes(algorithm):
            simulation = Simulation(algorithm, federation, model, checked, folder, own, tell, select, group)
        ending.callback(simulation.store.close)
        if resume:
            with naming.mistakes(algorithm):
                simulation.resume()
        else:
            simulation.begin()
        records = group.from_first(lambda: read_records(folder.path) if folder else [])
        finished = folder is not None and simulation.done == checked.rounds and has_results(folder.path)
        if folder is not None and not finished:
            folder.write_config(text)
            folder.write_labels(label_counts(federation, COUNTED).tolist())
            folder.forget_results()
        if group.first and simulation.done < checked.rounds:
            name = folder.path.name if folder else algorithm.name
            tracking.start(Tracked(name, text, folder.path if folder else None), records)
        for record in _rounds(simulation):
            records.append(asdict(record))
            tracking.log(records[-1])
            if on_round is not None:
                on_round(record)
            if group.stop() and simulation.done < checked.rounds:
                simulation.save()
                where = f"stopped after round {simulation.done} of {checked.rounds}"
                raise KeyboardInterrupt(f"{where}; go on with resume=True") if pressed else Interrupted(where)
        with naming.mistakes(algorithm):
            given = _given(simulation, model)
            again = is_rerunnable(algorithm, federation, given)
            result = Result(simulation, records, summarize(figures(simulation), records, again, given))
        if folder is not None and not finished:
            folder.write_summary(result.summary)
        tracking.finish(result.summary)
    if pressed:
        raise KeyboardInterrupt("the run came to its end before it could be stopped")
    return result


def _given(simulation: Simulation, model: str | nn.Module) -> dict[str, str]:
    """What a run was given that config.toml has no name for, but data: what tells it from others in a table."""
    named = {name: getattr(simulation.settings, name) for name in ("loss", "selection")}
    given = {name: simulation.functions[name] for name, text in named.items() if text == CUSTOM}
    if not isinstance(model, str):
        given["model"] = f"{type(model).__name__} {simulation.architecture}"
    return given


def _rounds(simulation: Simulation) -> Iterator[Record]:
    """The rounds of a simulation; not what is done with their records."""
    made = simulation.rounds()
    while True:
        with naming.mistakes(simulation.algorithm):
            record = next(made, None)
        if record is None:
            return
        yield record


def _reporting(folder: Path, tell: Callable[[str], None]) -> Callable[..., None]:
    """report.html of a run, however it ends. A picture is no reason to lose a run, nor to say more of a failed one."""

    def report(kind: type[BaseException] | None, *_: object) -> None:
        try:
            # A run that is not yet finished forgets its report when it goes on.
            if has_rounds(folder) and not (folder / "report.html").exists():
                write_report([folder], folder / "report.html")
        except Exception as error:
            if kind is None:
                tell(f"report.html could not be written: {type(error).__name__}: {error}")

    return report


def _tracker_names(track: Any) -> Sequence[str]:
    if not isinstance(track, list | tuple) or not all(isinstance(name, str) for name in track):
        raise FedslrError(f"track: got {track!r}, expected a list of names such as ['tensorboard']")
    return track


def run_recipe(recipe: Recipe, out: Path, *, warn: Callable[[str], None] | None = None, **options: Any) -> Result:
    """Run a recipe in a folder; `options` are those of `run` that are no settings."""
    recipe = replace(recipe, settings=recipe.settings.settled())
    return run(
        recipe.algorithm,
        # The first process decodes images for all.
        distributed.join().after_first(lambda: share_out(recipe.data, warn or warnings.warn)),
        recipe.model.name,
        out=out,
        config=recipe.to_toml(),
        warn=warn,
        **options,
        **asdict(recipe.settings),
    )


def _open_together(
    group: Group, path: Path, resume: bool, config: str, called: str, fixed: Collection[str]
) -> RunFolder:
    """The run folder of all processes, which the first one checks and writes to."""
    if not group.first:
        group.wait()
        return SharedFolder(path)
    folder = open_folder(path, resume, config, called, fixed)
    if group.size > 1:
        folder.share()
    group.wait()
    return folder


def open_folder(path: Path, resume: bool, config: str, called: str, fixed: Collection[str] = ()) -> RunFolder:
    """The run folder, refused where it holds another run, or this one without having been asked to go on."""
    try:
        if resume and not path.exists():
            raise FedslrError(f"resume: {path} holds no run to resume")
        if path.exists() and not path.is_dir():
            raise FedslrError(f"out: {path} is a file; choose a folder")
    except OSError as error:
        raise FedslrError(f"out: {path} cannot be used: {error.strerror}") from error
    folder = RunFolder(path)
    try:
        _check_folder(path, resume, config, called, fixed)
    except FedslrError:
        folder.close()
        raise
    return folder


def _check_folder(path: Path, resume: bool, config: str, called: str, fixed: Collection[str]) -> None:
    kept, begun = path / "config.toml", has_rounds(path)
    if not resume and (begun or (path / "summary.json").exists()):
        raise FedslrError(
            f"out: {path} already holds a run; resume it (--resume, resume=True) or choose another folder"
        )
    if (path / LEDGER).exists():
        raise FedslrError(f"out: {path} is the folder of a federation; go on with fedslr federation resume")
    if not kept.exists() and any(has_rounds(p.parent) for p in path.glob("*/config.toml")):
        raise FedslrError(f"out: {path} holds runs in folders of their own, a comparison's say; choose another folder")
    if resume and not kept.exists() and begun:
        raise FedslrError(f"resume: {kept} is missing, so nobody can tell which run this is; restore it")
    # Of an attempt that never finished a round nothing is kept, so that another may take its place.
    if resume and kept.exists() and begun:
        try:
            changed = difference(kept.read_text("utf-8"), config, called, fixed)
        except (OSError, ValueError) as error:
            raise FedslrError(f"resume: {kept} is damaged: {error}") from error
        if changed:
            raise FedslrError(f"resume: this is not the run in {path}: {changed}")


def changed(path: Path, recipe: Recipe) -> str | None:
    """What forbids going on with the rounds in a folder by a recipe; None if nothing does, or none can tell."""
    if not has_rounds(path):
        return None
    now = replace(recipe, settings=recipe.settings.settled()).to_toml()
    try:
        kept = (path / "config.toml").read_text("utf-8")
        return difference(kept, now, recipe.algorithm.name, lasting(recipe.algorithm))
    except (OSError, ValueError):
        return None


def has_results(path: Path) -> bool:
    """Whether what a finished run leaves is all there, and can be read."""
    try:
        read_run(path)
    except FedslrError:
        return False
    return (path / "labels.json").exists()


def has_rounds(path: Path) -> bool:
    """Whether a folder holds rounds of some run; an attempt killed before its first round leaves none."""
    metrics_file = path / "metrics.jsonl"
    manifests = path / "checkpoint"
    return (metrics_file.exists() and metrics_file.stat().st_size > 0) or any(manifests.glob("manifest-*.json"))


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Torch's own types as the names recipes use."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    plain = dict(settings)
    if isinstance(plain.get("dtype"), torch.dtype):
        plain["dtype"] = names.get(plain["dtype"], str(plain["dtype"]))
    if isinstance(plain.get("device"), torch.device):
        plain["device"] = str(plain["device"])
    for name in ("selection", "loss"):
        if callable(plain.get(name)):
            plain[name] = CUSTOM
    return plain


def _model_name(model: str | nn.Module) -> str:
    if isinstance(model, str):
        return model
    return next((name for name, kind in MODELS.items() if kind is type(model)), type(model).__name__)


def _data_table(federation: Federation) -> dict[str, Any]:
    return (
        dict(federation.options)
        if federation.options
        else {"name": federation.name, "clients": len(federation.clients)}
    )
