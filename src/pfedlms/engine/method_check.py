"""`check_method`: whether a method keeps its contract, found out by small federations on the embedded digits.

Every check plays some rounds twice, in two ways that must not matter, and compares all messages and all state.
"""

from __future__ import annotations

import io
import random
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from pfedlms.data import FederatedData, Partitioning, from_pool, load_dataset
from pfedlms.engine.federation import Federation
from pfedlms.engine.method_watch import (
    Failed,
    Notes,
    answers_are_the_model,
    expect_same,
    odd_one_out,
    play_on,
    shared,
    watched,
)
from pfedlms.engine.training import TrainSettings
from pfedlms.errors import ConfigError, DivergedError, MethodError, UsageError, reason
from pfedlms.methods.contract import Method, Tracked
from pfedlms.models import CohortModel, build
from pfedlms.settings import problems
from pfedlms.wire.frames import HEADER_BYTES

CLIENTS, SEED, ROUNDS = 5, 3, 3
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
        lines = [f"{self.method}: {'all checks passed' if self.ok else f'{len(self.failed)} checks failed'}"]
        for check in self.checks:
            mark = {True: "ok", False: "FAILED", None: "not run"}[check.ok]
            text = textwrap.wrap(check.text, 120 - width - 12) or [""]
            lines += [
                f"  {check.name:<{width}}  {mark:<7} {text[0]}",
                *(f"{'':<{width + 12}}{more}" for more in text[1:]),
            ]
        return "\n".join(lines)


def check_method(method: type[Method], **settings: Any) -> Report:
    """Check a method with these settings of its own (defaults for all others), in well under a minute.

    >>> from pfedlms.methods.fedavg import FedAvg
    >>> check_method(FedAvg, server_step=0.5).ok
    True
    """
    if not isinstance(method, type):
        raise UsageError(f"check_method: got {method!r}, expected the class of a method")
    checks = [_checked("declaration", lambda: _declaration(method, settings))]
    if checks[0].ok:
        if wrong := problems("method", method.Settings, settings):
            raise ConfigError(wrong)
        battery = _Battery(method, settings)
        checks.append(_checked("rounds", battery.rounds))
        rest = (
            "determinism", "cohort_sizes", "models", "resume", "participation", "lost_messages", "real_bytes", "limits",
        )  # fmt: skip
        for name in rest:
            shown = name.replace("_", " ")
            played = checks[1].ok
            checks.append(_checked(shown, getattr(battery, name)) if played else Check(shown, None, ""))
    return Report(getattr(method, "name", method.__name__), tuple(checks))


def _checked(name: str, check: Callable[[], str]) -> Check:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Check(name, True, check())
    except Failed as error:
        return Check(name, False, str(error))
    except Exception as error:  # a method of somebody's own may raise anything
        return Check(name, False, f"raised {reason(error)}")


def _declaration(method: type[Method], settings: dict[str, Any]) -> str:
    for name in ("name", "paper", "personal", "Settings"):
        if not hasattr(method, name):
            raise Failed(f"the class has no `{name}`; set it, see the table of class attributes in docs/methods.md")
    chosen = method.Settings
    if not is_dataclass(chosen) or not getattr(chosen, "__dataclass_params__").frozen:  # noqa: B009 - not in its type
        raise Failed("Settings is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
    for each in fields(chosen):
        if "help" not in each.metadata:
            raise Failed(f"Settings.{each.name} is declared without limits and meaning; use setting(default, help, …)")
    defaults = {each.name: each.default for each in fields(chosen) if each.default is not MISSING}
    if wrong := problems("method", chosen, defaults):
        raise Failed(f"a default is outside its own limits: {wrong[0]}")
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10)
        return nn.Sequential(*layers)


@dataclass
class _Battery:
    method: type[Method]
    settings: dict[str, Any]

    def _play(self, rounds: int = ROUNDS, **options: Any) -> tuple[dict[str, Any], Notes]:
        """The federation's state after some rounds, and what was seen meanwhile."""
        federation, notes = self._federation(**options)
        federation.start()
        return play_on(federation, notes, rounds), notes

    def _federation(self, model: str = "dense", linked: bool = True, **options: Any) -> tuple[Federation, Notes]:
        names, notes = {each.name for each in fields(TrainSettings)}, Notes()
        train = TrainSettings(**{**_TRAIN, **{name: options.pop(name) for name in list(options) if name in names}})
        settings = {**self.settings, **options.pop("settings", {})}
        links: dict[str, Any] = {"link": notes.link, "answer_link": notes.answer_link} if linked else {}
        chosen, module = self.method.Settings(**settings), CohortModel(_module(model), torch.device("cpu"))
        made = Federation(watched(self.method, notes), chosen, module, _digits(), train, SEED, **links, **options)
        return made, notes

    def rounds(self) -> str:
        federation, notes = self._federation()
        federation.start()
        play_on(federation, notes, ROUNDS - 1)
        report = federation.play_round(evaluate_global=True)
        if not np.isfinite(report.loss):
            raise Failed("the loss is not finite after three rounds; lower what the method moves models by")
        return f"{ROUNDS} rounds of {CLIENTS} clients; names, shapes, dtypes and devices are those of the contract"

    def determinism(self) -> str:
        with _other_generators(1):
            first = self._play()
        with _other_generators(2):
            second = self._play()
        expect_same(first, second, "two runs with the same seed")
        return "two runs with one seed give the same messages and the same state"

    def cohort_sizes(self) -> str:
        one = self._play(cohort_size=1)
        for size in (3, 0):
            expect_same(one, self._play(cohort_size=size), f"cohorts of 1 and of {size or 'all'} clients")
        return f"cohorts of 1, 3 and {CLIENTS} clients give the same messages and the same state"

    def models(self) -> str:
        """Others than the small dense one: clients are trained in parts, or one after another."""
        for model in ("wide", "convolutional"):
            one, together = (self._play(1, model=model, cohort_size=size) for size in (1, 0))
            expect_same(one, together, f"clients of a {model} model, alone and together")
        return "the same with a wide model, whose clients are trained in parts, and with convolutions and batch norm"

    def resume(self) -> str:
        federation, notes = self._federation()
        federation.start()
        file = io.BytesIO()
        torch.save(play_on(federation, notes, 2), file)
        before = len(notes.frames)
        whole = play_on(federation, notes, 2)
        file.seek(0)
        resumed, later = self._federation(cohort_size=2)
        resumed.load(torch.load(file, weights_only=True))
        notes.frames = notes.frames[before:]
        expect_same((whole, notes), (play_on(resumed, later, 2), later), "a run and its resumption from a checkpoint")
        return "a run that is resumed from a checkpoint ends as the run that was not stopped"

    def participation(self) -> str:
        one, (state, notes) = (self._play(7, cohort_size=size, participation=0.6) for size in (1, 0))
        expect_same(one, (state, notes), "cohorts of 1 and of all participants, when 3 of 5 clients take part")
        for round, model in enumerate(notes.models):
            for client, kept in notes.states.get(round, {}).items() if issubclass(self.method, Tracked) else ():
                if model is not None and not torch.equal(kept["model"], model):
                    raise Failed(
                        f'client {client} has another state["model"] than the server after round {round + 1}, because '
                        "it was absent before; leave `tracks` true unless every answer is the model itself"
                    )
        _, everyone = self._play()
        for name in shared(everyone):
            for round, states in notes.states.items():
                rows = {client: kept[name] for client, kept in states.items()}
                if (odd := odd_one_out(rows)) is not None:
                    raise Failed(
                        f'state["{name}"] is the same with all clients while all take part; but when some are absent, '
                        f"client {odd} has other values after the answer of round {round + 1}: it missed "
                        'answers; send the whole value in every answer, or keep it as state["model"], see Tracked'
                    )
        hint = (
            "; hint: every answer is the model w itself, so set `tracks = False` if client_receive takes w from the "
            "answer: clients that come back then need nothing else, which saves bytes"
        )
        told = "3 of 5 clients take part in a round; clients that were absent receive what they need"
        return told + hint * (self.method.tracks and answers_are_the_model(notes))

    def lost_messages(self) -> str:
        one, together = (self._play(8, cohort_size=size, lost=0.1, quorum=0.0) for size in (1, 0))
        expect_same(one, together, "cohorts of 1 and of all clients, when a tenth of all messages is lost")
        return "a tenth of all messages is lost, and rounds go on"

    def real_bytes(self) -> str:
        (state, notes), (unlinked, _) = self._play(), self._play(linked=False)
        if notes.wrong:
            raise Failed(f"{notes.wrong[0]}; check the field's kind, its levels and its range")
        expect_same((state, notes), (unlinked, notes), "messages that are sent one by one and together")
        federation, counted = self._federation()
        federation.start()
        traffic = federation.play_round().traffic
        for name, frames in (("up", counted.frames), ("down", counted.answers)):
            sent, reported = sum(len(data) - HEADER_BYTES for _, data in frames), getattr(traffic, f"{name}_payload")
            if sent != reported:
                raise Failed(f"{sent} bytes were sent {name}, but {reported} were counted")
        up, down = (value / CLIENTS for value in (traffic.up_payload, traffic.down_payload))
        return f"messages arrive as they were sent: {up:,.0f} bytes up and {down:,.0f} down for each client and round"

    def limits(self) -> str:
        tried = 0
        for each in fields(self.method.Settings):
            for value in _extremes(each):
                tried += 1
                try:
                    self._play(1, settings={each.name: value})
                except Exception as error:
                    # A value may be of no use, or not go with the others; then the method or the run says so.
                    if isinstance(error, DivergedError | UsageError) and not isinstance(error, MethodError):
                        continue
                    raise Failed(
                        f"{each.name} = {value!r} is within the limits that Settings declares, but raises "
                        f"{reason(error)}; declare narrower limits (minimum, above, maximum, below, choices)"
                    ) from error
        return f"{tried} settings at the ends of their declared limits" if tried else "no setting has closed limits"


def _extremes(declared: Field[Any]) -> list[Any]:
    limits, choices = declared.metadata["limits"], declared.metadata["choices"]
    kind: Any = type(declared.default)
    found = [kind(limits[name]) for name in ("minimum", "maximum") if limits[name] is not None]
    found += [choice for choice in (choices() if choices else []) if ":" not in choice]
    return found + ([True, False] if isinstance(declared.default, bool) else [])


@contextmanager
def _other_generators(seed: int) -> Iterator[None]:
    """Global generators that no method may draw from, in some state; left as they were."""
    kept, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
        finally:
            random.setstate(kept)
            np.random.set_state(arrays)
