"""`check_method` checks by small federations on the embedded digits whether a method follows its contract.

Every check plays some rounds twice, in two ways that must not matter, and compares all messages and all state.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedlms import rng
from pfedlms.cohort import Cohort, Tensors
from pfedlms.data import FederatedData, Partitioning, from_pool, load_dataset
from pfedlms.engine import guard
from pfedlms.engine.federation import Federation
from pfedlms.engine.transport import Event
from pfedlms.errors import ConfigError, DivergedError, MethodError, UsageError, reason
from pfedlms.methods import check_name
from pfedlms.methods.contract import Exchange, Method, Task, Tracked
from pfedlms.models import CohortModel, build
from pfedlms.settings import find_problems
from pfedlms.train_settings import TrainSettings
from pfedlms.wire.frames import HEADER_BYTES

CLIENTS, SEED, ROUNDS = 5, 3, 3
_CPU = torch.device("cpu")
_TRAIN = {"local_steps": 3, "batch_size": 16, "learning_rate": 0.05, "momentum": 0.5, "weight_decay": 1e-4}


@dataclass(frozen=True)
class Check:
    """One line of a report."""

    name: str
    ok: bool | None
    """None: not run, because the method does not even play its rounds."""
    text: str
    """What was checked, or what is wrong and what to do."""


@dataclass(frozen=True)
class Report:
    """What `check_method` found; `print(report)` shows it as a table."""

    method: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.ok is False)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        failed = f"{len(self.failed)} check{'s' * (len(self.failed) != 1)} failed"
        lines = [f"{self.method}: {'all checks passed' if self.ok else failed}"]
        for check in self.checks:
            mark = {True: "ok", False: "FAILED", None: "not run"}[check.ok]
            text = textwrap.wrap(check.text, 120 - width - 12) or [""]
            lines += [
                f"  {check.name:<{width}}  {mark:<7} {text[0]}",
                *(f"{'':<{width + 12}}{more}" for more in text[1:]),
            ]
        return "\n".join(lines)


class CheckFailed(Exception):
    """A check found something wrong; the message says what."""


def check_method(method: type[Method], **settings: Any) -> Report:
    """Check a method with these settings of its own (defaults for all others), in well under a minute.

    >>> from pfedlms.methods.fedavg import FedAvg
    >>> check_method(FedAvg, server_step=0.5).ok
    True
    """
    if not isinstance(method, type):
        raise UsageError(f"check_method: got {method!r}, expected the class of a method")
    checks = [_run_check("declaration", lambda: _declaration(method, settings))]
    if checks[0].ok:
        if wrong := find_problems("method", method.Settings, settings):
            raise ConfigError(wrong)
        battery = _Battery(method, settings)
        checks.append(_run_check("rounds", battery.rounds))
        rest = (
            "determinism", "cohort_sizes", "separate_ends", "models", "resume", "participation", "lost_messages",
            "unequal_steps", "real_bytes", "limits",
        )  # fmt: skip
        for name in rest:
            shown = name.replace("_", " ")
            played = checks[1].ok
            checks.append(_run_check(shown, getattr(battery, name)) if played else Check(shown, None, ""))
    return Report(getattr(method, "name", method.__name__), tuple(checks))


def _run_check(name: str, check: Callable[[], str]) -> Check:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Check(name, True, check())
    except CheckFailed as error:
        return Check(name, False, str(error))
    except Exception as error:  # a method of somebody's own may raise anything
        return Check(name, False, _failure(error))


def _failure(error: Exception) -> str:
    return str(error) if isinstance(error, CheckFailed) else f"raises {reason(error)}"


def _declaration(method: type[Method], settings: dict[str, Any]) -> str:
    for name in ("name", "paper", "personal"):
        if not hasattr(method, name):
            raise CheckFailed(f"the class has no `{name}`; see the table of class attributes in docs/methods.md")
    guard.refuse_misspelt(method, Method, Tracked)
    check_name(method.name)
    chosen = method.Settings
    for each in fields(chosen):
        if "help" not in each.metadata:
            raise CheckFailed(f"Settings.{each.name} is declared without meaning; use setting(default, help, …)")
    defaults = {each.name: each.default for each in fields(chosen) if each.default is not MISSING}
    if wrong := find_problems("method", chosen, defaults):
        raise CheckFailed(f"a default is outside its own limits: {wrong[0]}")
    return "name, paper, personal and settings are declared"


# --- the battery ------------------------------------------------------------------------------------------------------


@cache
def _digits() -> FederatedData:
    return from_pool(*load_dataset("digits"), Partitioning(CLIENTS, 0.5, 0))


def _module(kind: str) -> nn.Module:
    """Small and dense; so wide that its clients are trained in parts; with features computed one client at a time."""
    data = _digits()
    if kind != "convolutional":
        return build("dnn", data.shape, data.classes, {"dense": 20, "wide": 3000}[kind], key=1)
    with rng.forked_generators(_CPU, 1):
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10)
        return nn.Sequential(*layers)


@dataclass
class Recorder:
    """Records the messages and the state of a federation while it plays."""

    states: dict[int, dict[int, Tensors]] = field(default_factory=dict)
    """By round and client: `state` after its last answer."""
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    """Clients' messages, with the sender."""
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    servers: list[Tensors] = field(default_factory=list)
    """The server's state after every round."""
    answered: set[str] = field(default_factory=set)
    """Entries of `state` that some answer changed."""
    hears: bool = False
    """Whether an answer left something in `heard`, which may change `state` later."""
    read: set[str] = field(default_factory=set)
    """What the method read of its task."""

    def link(self, data: bytes, client: int) -> bytes:
        self.frames.append((client, data))
        return data

    def answer_link(self, data: bytes, client: int) -> bytes:
        self.answers.append((client, data))
        return data

    def watch(self, exchange: Exchange[Any]) -> None:
        """Record the clients' state after every answer."""
        receive = exchange.client_receive

        def receive_and_record(cohort: Cohort, values: Tensors, round: int) -> Cohort:
            after = receive(cohort, values, round)
            if isinstance(after, Cohort):
                self.hears |= bool(after.heard)
                self.answered |= {n for n, old in cohort.state.items() if not torch.equal(old, after.state.get(n, old))}
                for row, client in enumerate(after.ids):
                    state = {name: value[row].clone() for name, value in after.state.items() if value.ndim}
                    self.states.setdefault(round, {})[client] = state
            return after

        object.__setattr__(exchange, "client_receive", receive_and_record)

    def play(self, federation: Federation, rounds: int) -> dict[str, Any]:
        """The federation's state after some more rounds."""
        for _ in range(rounds):
            federation.play_round()
            self.servers.append(federation.state()["server"])
        return federation.state()


class _StrictFederation(Federation):
    """A federation in which whatever is sent must be valid. (Messages that the battery itself loses are no events.)"""

    def _warn(self, events: Iterable[Event]) -> None:
        for event in events:
            raise CheckFailed(f"{event}. All that a method sends must be valid: finite, and as its fields declare it")


@dataclass
class _Battery:
    method: type[Method]
    settings: dict[str, Any]
    train: dict[str, Any] = field(default_factory=lambda: dict(_TRAIN))

    def _play(self, rounds: int = ROUNDS, **options: Any) -> tuple[dict[str, Any], Recorder]:
        """The federation's state after some rounds, and what was recorded."""
        federation, recorder = self._federation(**options)
        return recorder.play(federation, rounds), recorder

    def _federation(
        self, model: str = "dense", linked: bool = True, separate: bool = False, **options: Any
    ) -> tuple[Federation, Recorder]:
        names, recorder = {each.name for each in fields(TrainSettings)}, Recorder()
        train = TrainSettings(**{**self.train, **{name: options.pop(name) for name in list(options) if name in names}})
        settings = {**self.settings, **options.pop("settings", {})}
        links: dict[str, Any] = {"link": recorder.link, "answer_link": recorder.answer_link} if linked else {}
        chosen, module = self.method.Settings(**settings), CohortModel(_module(model), _CPU)
        made = _StrictFederation(
            _recorded(_with_separate_ends(self.method) if separate else self.method, recorder),
            chosen,
            module,
            _digits(),
            train,
            SEED,
            **links,
            **options,
        )
        return made, recorder

    def rounds(self) -> str:
        try:
            federation, recorder = self._federation()
        except UsageError as error:
            if isinstance(error, MethodError):
                raise
            self.train["momentum"] = 0.0  # what a method refuses most often
            federation, recorder = self._federation()
        recorder.play(federation, ROUNDS - 1)
        report = federation.play_round(evaluate_global=True)
        if not np.isfinite(report.loss):
            raise CheckFailed("the loss is not finite after three rounds; lower what the method moves models by")
        played = f"{ROUNDS} rounds of {CLIENTS} clients" + ", without momentum, which it refuses" * (
            not self.train["momentum"]
        )
        return f"{played}; names, shapes, dtypes and devices are those of the contract"

    def determinism(self) -> str:
        with rng.forked_generators(_CPU, 1):
            first = self._play()
        with rng.forked_generators(_CPU, 2):
            second = self._play()
        _expect_same(first, second, "two runs with the same seed")
        return "two runs with one seed give the same messages and the same state"

    def cohort_sizes(self) -> str:
        one = self._play(cohort_size=1)
        for size in (3, 0):
            _expect_same(one, self._play(cohort_size=size), f"cohorts of 1 and of {size or 'all'} clients")
        return f"cohorts of 1, 3 and {CLIENTS} clients give the same messages and the same state"

    def separate_ends(self) -> str:
        one, apart = (self._play(cohort_size=1, separate=each) for each in (False, True))
        _expect_same(one, apart, "one object of the method for all, and one for the server and each client")
        return "the server and each client have an object of the method, and nothing passes between them by way of it"

    def models(self) -> str:
        """Others than the small dense one: clients are trained in parts, or one after another."""
        for model in ("wide", "convolutional"):
            one, together = (self._play(1, model=model, cohort_size=size) for size in (1, 0))
            _expect_same(one, together, f"clients of a {model} model, alone and together")
        return "the same with a wide model, whose clients are trained in parts, and with convolutions and batch norm"

    def resume(self) -> str:
        federation, recorder = self._federation()
        file = io.BytesIO()
        torch.save(recorder.play(federation, 2), file)
        recorder.frames.clear()
        whole = recorder.play(federation, 2)
        file.seek(0)
        resumed, later = self._federation(cohort_size=2)
        resumed.load(torch.load(file, weights_only=True))
        _expect_same((whole, recorder), (later.play(resumed, 2), later), "a run and its resumption from a checkpoint")
        return "a run that is resumed from a checkpoint ends as the run that was not stopped"

    def participation(self) -> str:
        one, (state, recorder) = (self._play(7, cohort_size=size, participation=0.6) for size in (1, 0))
        _expect_same(one, (state, recorder), "cohorts of 1 and of all participants, when 3 of 5 clients take part")
        for round, model in enumerate(server.get("model") for server in recorder.servers):
            for client, kept in recorder.states.get(round, {}).items() if issubclass(self.method, Tracked) else ():
                if model is not None and not torch.equal(kept["model"], model):
                    raise CheckFailed(
                        f'client {client}, which was absent, has another state["model"] than the server after round '
                        f"{round + 1}; leave `tracks` true unless every answer is the model itself"
                    )
        _, everyone = self._play()
        for name in _entries_in_common(everyone):
            if not all(_in_common(name, states) for states in recorder.states.values()):
                raise CheckFailed(
                    f'state["{name}"] is the same with all clients while all take part, but not once some have missed '
                    'answers; send the whole value in every answer, or keep it as state["model"], see Tracked'
                )
        return "3 of 5 clients take part in a round; clients that were absent receive what they need"

    def lost_messages(self) -> str:
        one, together = (self._play(8, cohort_size=size, lost=0.1, quorum=0.0) for size in (1, 0))
        _expect_same(one, together, "cohorts of 1 and of all clients, when a tenth of all messages is lost")
        return "a tenth of all messages is lost, and rounds go on"

    def unequal_steps(self) -> str:
        options: dict[str, Any] = {"local_epochs": 0.3, "schedule": "step", "decay": 0.5, "decay_every": 1}
        try:
            one, together = (self._play(cohort_size=size, **options) for size in (1, 0))
        except UsageError as error:
            if isinstance(error, MethodError):
                raise
            return f"not played, because the method refuses train.local_epochs or a schedule: {error}"
        _expect_same(one, together, "cohorts of 1 and of all clients, when clients take unequal steps")
        read, better = together[1].read, {"learning_rate": "rate(phase)", "local_steps": "steps_of(samples)"}
        notes = [
            f"it reads task.{name} and never task.{call}, that of one phase or client; is that meant?"
            for name, call in better.items()
            if name in read and call.partition("(")[0] not in read
        ]
        return ". Note: ".join(["clients take unequal numbers of steps, with a schedule of η", *notes])

    def real_bytes(self) -> str:
        (state, recorder), (unlinked, _) = self._play(), self._play(linked=False)
        _expect_same((state, recorder), (unlinked, recorder), "messages that are sent one by one and together")
        federation, counted = self._federation()
        traffic = federation.play_round().traffic
        for name, frames in (("up", counted.frames), ("down", counted.answers)):
            sent, reported = sum(len(data) - HEADER_BYTES for _, data in frames), getattr(traffic, f"{name}_payload")
            if sent != reported:
                raise CheckFailed(f"{sent} bytes were sent {name}, but {reported} were counted")
        up, down = (value / CLIENTS for value in (traffic.up_payload, traffic.down_payload))
        return f"bytes that are sent are counted: {up:,.0f} bytes up and {down:,.0f} down for each client and round"

    def limits(self) -> str:
        tried = 0
        for each in fields(self.method.Settings):
            for value in _values_at_limits(each):
                tried += 1
                try:
                    self._play(1, settings={each.name: value})
                except Exception as error:
                    # A value may be of no use, or not go with the others; then the method or the run says so.
                    if isinstance(error, DivergedError | UsageError) and not isinstance(error, MethodError):
                        continue
                    raise CheckFailed(
                        f"{each.name} = {value!r} is within the limits that Settings declares, but "
                        f"{_failure(error)}; declare narrower limits (minimum, above, maximum, below, choices)"
                    ) from error
        return f"{tried} settings at the ends of declared limits"


def _recorded(method: type[Method], recorder: Recorder) -> type[Method]:
    """The method, whose exchanges `recorder` watches."""

    class Watched(Task):
        def __getattribute__(self, name: str) -> Any:
            recorder.read.add(name)
            return super().__getattribute__(name)

    def __init__(self: Method, task: Task, settings: Any) -> None:
        method.__init__(self, Watched(**vars(task)), settings)
        for exchange in self.exchanges:
            recorder.watch(exchange)

    return _derived(method, __init__)


def _with_separate_ends(method: type[Method]) -> type[Method]:
    """The method, of which every client has an object of its own, if cohorts have one client each; that of the server
    is `self`."""

    def __init__(self: Method, task: Any, settings: Any) -> None:
        method.__init__(self, task, settings)
        own = cache(lambda client: method(task, settings))
        for name in ("client_start", "client_rest", "objective", "after_training", "global_model"):
            setattr(self, name, _passed_on(name, own))
        for index, exchange in enumerate(self.exchanges):
            for name in ("client_send", "client_receive"):
                end = partial(lambda index, client: own(client).exchanges[index], index)
                object.__setattr__(exchange, name, _passed_on(name, end))

    return _derived(method, __init__)


def _passed_on(name: str, end: Callable[[int], Any]) -> Callable[..., Any]:
    """The function `name` of the object that `end` returns for the client of the cohort at hand."""
    return lambda cohort, *others: getattr(end(cohort.ids[0]), name)(cohort, *others)


def _derived(method: type[Method], __init__: Callable[..., None]) -> type[Method]:
    return type(method.__name__, (method,), {"__init__": __init__, "__module__": method.__module__})


def _values_at_limits(declared: Field[Any]) -> list[Any]:
    limits, choices = declared.metadata["limits"], declared.metadata["choices"]
    kind: Any = type(declared.default)
    values = [kind(limits[name]) for name in ("minimum", "maximum") if limits[name] is not None]
    values += [choice for choice in (choices() if choices else []) if ":" not in choice]
    return values + ([True, False] if isinstance(declared.default, bool) else [])


def _entries_in_common(recorder: Recorder) -> list[str]:
    """Entries of `state` that all clients have in common after every answer, and that answers change from round to
    round."""
    rounds = list(recorder.states.values())
    if not rounds:
        return []
    first, last = rounds[0][0], rounds[-1][0]
    changed = [
        name
        for name, own in first.items()
        if (name in recorder.answered or recorder.hears)
        and own.is_floating_point() and own.ndim and not torch.equal(own, last[name])
    ]  # fmt: skip
    return [name for name in changed if all(_in_common(name, states) for states in rounds)]


def _in_common(name: str, states: dict[int, Tensors]) -> bool:
    """Whether all clients have the same entry of `state`."""
    first, *others = (own[name] for own in states.values())
    return all(torch.equal(first, other) for other in others)


# --- comparing --------------------------------------------------------------------------------------------------------

_WHY = (
    "Results must follow from a client's own rows, the messages, the seed and the round alone: mark per-client tensors "
    "of an objective with PerClient; take no sum or mean over the clients axis; name random streams by seed, round and "
    "client (pfedlms.rng); keep nothing on `self`, in global variables or of a tensor that was given; in server_add, "
    "add in float64, plain or times whole numbers, or one client after another"
)


def _expect_same(one: tuple[dict[str, Any], Recorder], other: tuple[dict[str, Any], Recorder], what: str) -> None:
    if (path := _difference(one[0], other[0])) is not None:
        raise CheckFailed(f"{what} differ in {path}. {_WHY}")
    if one[1].frames != other[1].frames:
        raise CheckFailed(f"{what} differ in a message of a client. {_WHY}")


def _difference(one: Any, other: Any) -> str | None:
    """The path at which two nested values first differ; None if they are equal."""
    mine, yours = dict(_parts(one)), dict(_parts(other))
    return next((path for path in mine | yours if not _equal(mine.get(path), yours.get(path))), None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All that nested dicts and lists hold, by path."""
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _parts(part, f"{path}.{key}".lstrip("."))
