"""Wrong methods are refused with a message that names them: when they run, or by `check_method`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import factories
from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.method_check import check_method
from pfedlms.errors import ConfigError, MethodError, UsageError
from pfedlms.methods import METHODS
from pfedlms.methods.contract import FieldMeans, Means, Method, Objective, PerClient, Task, Tracked, go_on_from
from pfedlms.methods.ditto import Ditto
from pfedlms.methods.fedavg import Average, FedAvg
from pfedlms.methods.fedprox import FedProx, Proximal
from pfedlms.methods.local import Local
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message, Signs


def test_an_exchange_that_several_methods_hold_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights and checks of one run are not those of the next one."""
    weights: list[list[int]] = []
    kept: list[Average] = []

    class Weighed(Average):
        def server_add(self, total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
            weights.append(list(samples))
            return super().server_add(total, ids, samples, values)

    class Cached(FedAvg):
        name = "cached"

        def __init__(self, task: Task, settings: Any) -> None:
            super().__init__(task, settings)
            kept[:] = kept or [Weighed(task, settings)]
            self.exchanges = tuple(kept)

    monkeypatch.setitem(METHODS, "cached", Cached)
    for chosen in ("samples", "uniform", "samples"):
        factories.federation("cached", weights=chosen).play_round()
    first, uniform, last = weights
    assert first == last != uniform == [1] * len(first)


# --- methods that break the contract ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong(Objective):
    """An objective whose methods are the given functions."""

    gradient_of: Any = None
    step_of: Any = None
    loss_of: Any = None
    held: Any = None
    needs_features = True

    def gradient(self, params: Tensor) -> Any:
        return self.gradient_of(params) if self.gradient_of else None

    def after_step(self, params: Tensor, step: int) -> Any:
        return self.step_of(params) if self.step_of else params

    def loss(self, features: Tensor, labels: Tensor) -> Any:
        return self.loss_of(features) if self.loss_of else super().loss(features, labels)


def with_objective(**wrong: Any) -> type[Method]:
    class Trained(Local):
        name = "wrong"

        def objective(self, cohort: Cohort, round: int) -> Objective:
            own = {key: value(cohort) for key, value in wrong.items() if key == "held"}
            return Wrong(**{**wrong, **own})

    return Trained


def with_objective_kind(kind: type[Objective]) -> type[Method]:
    return type("Trained", (Local,), {"name": "wrong", "objective": lambda self, cohort, round: kind()})


class LossNotAskedFor(Local):
    name = "unasked"

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return type("Unasked", (Wrong,), {"needs_features": False})()  # type: ignore[no-any-return]


class MeanOfTheCohort(Local):
    """Measures another shared model for other sizes of cohorts."""

    name = "mean"

    def global_model(self, cohort: Cohort) -> Tensor:
        return cohort.params.mean(dim=0)


class OwnAsShared(Ditto):
    name = "own-as-shared"

    def global_model(self, cohort: Cohort) -> Tensor:
        return cohort.state["own"]


@dataclass(frozen=True)
class Drifting(Objective):
    """Moves its anchor in every step, which is the clients' state."""

    anchor: PerClient

    def gradient(self, params: Tensor) -> Tensor:
        return 0.1 * (params - self.anchor.value.lerp_(params, 0.1))


@dataclass(frozen=True)
class Idle(Objective):
    def grad(self, params: Tensor) -> Tensor:
        return params


class WithoutEffect(Local):
    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Idle()


class WritesItsField(Local):
    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Drifting(PerClient(cohort.params.clone()))


class MissingAnswer(FedProx):
    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Proximal(PerClient(cohort.heard["nothing"]), 0.1)


class UnmarkedSecond(Ditto):
    def after_training(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
        work.train(cohort, Proximal(cohort.params, 0.1), phase)  # type: ignore[arg-type]
        return cohort


def working(call: Any) -> type[Method]:
    """A method that calls `call(cohort, work, phase)` after every training."""

    class Working(Local):
        name = "working"

        def after_training(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
            call(cohort, work, phase)
            return cohort

    return Working


class Averaged(FieldMeans):
    """↑ θ_k      ↓ w = Σ p_k θ_k"""

    kinds = (0, 1)

    def __init__(self, task: Task, settings: Any) -> None:
        self.up, self.down = (Message(kind, (Floats("model", task.layout.dim),)) for kind in self.kinds)

    def client_send(self, cohort: Cohort, round: int, work: Any) -> Any:
        return cohort, {"model": cohort.params}

    def server_reply(self, server: Tensors, total: Means, round: int) -> Any:
        model = total["model"].result().float()
        return {"model": model}, {"model": model}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Any:
        return go_on_from(cohort, values["model"])


class InPlace(Averaged):
    """Writes into the server's state, which begins as the task's own w⁰."""

    def server_reply(self, server: Tensors, total: Means, round: int) -> Any:
        server["model"].copy_(total["model"].result())
        return server, {"model": server["model"]}


class WritesItsAnswer(Averaged):
    """The same values are given to the next cohort."""

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Any:
        return go_on_from(cohort, values["model"].add_(0.0))


class Averaging(Tracked):
    name, paper, personal = "averaging", "a test", False
    about_last_steps, tracks = True, False

    def client_start(self, cohort: Cohort) -> Cohort:
        return super().client_start(cohort).with_state(shared=cohort.params)


def changed(kind: Any, changes: dict[str, Any]) -> Any:
    """A class whose functions return what `changes` make of their results."""

    def wrapped(right: Any, change: Any) -> Any:
        def call(*given: Any) -> Any:
            found = right(*given)
            return change(*found) if isinstance(found, tuple) else change(found)

        return call

    return type(kind.__name__, (kind,), {name: wrapped(getattr(kind, name), own) for name, own in changes.items()})


def averaging(function: str = "", change: Any = None) -> type[Method]:
    """A right method, except for the result of one function of it or of its exchange `Mean`."""
    changes, own = {function: change} if function else {}, hasattr(Averaging, function)
    method: type[Method] = changed(Averaging, changes if own else {})
    method.exchange = changed(type("Mean", (Averaged,), {}), {} if own else changes)
    return method


def with_exchange(kind: type[Averaged]) -> type[Method]:
    method = averaging()
    method.exchange = kind
    return method


def with_kinds(*kinds: int) -> type[Method]:
    return with_exchange(type("Numbered", (Averaged,), {"kinds": kinds}))


class Forgetful(Averaged):
    def server_add(self, total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
        super().server_add(total, ids, samples, values)


class Changes(Averaged):
    """↑ θ_k − w      ↓ Σ p_k (θ_k − w), by which clients and server move w"""

    def client_send(self, cohort: Cohort, round: int, work: Any) -> tuple[Cohort, Tensors]:
        return cohort, {"model": cohort.params - cohort.state["model"]}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        change = total["model"].result().float()
        return {"model": server["model"] + change}, {"model": change}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return go_on_from(cohort, cohort.state["model"] + values["model"])


class Stepped(Averaged):
    """↑ w − η ∇f_k(w)      ↓ their mean"""

    def client_send(self, cohort: Cohort, round: int, work: Any) -> tuple[Cohort, Tensors]:
        model = cohort.state["model"]
        return cohort, {"model": model - 0.1 * work.mean_gradient(cohort, model, round + 1)}


class Recalls(Averaged):
    """Takes a default where the last round's values have ended."""

    def client_send(self, cohort: Cohort, round: int, work: Any) -> tuple[Cohort, Tensors]:
        return cohort, {"model": cohort.params + cohort.heard.get("pull", 0.0)}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return super().client_receive(cohort, values, round).with_heard(pull=values["model"])


class GradientNotReturned(Local):
    name = "unreturned"

    def objective(self, cohort: Cohort, round: int) -> Objective:
        class Unreturned(Objective):
            def gradient(self, params: Tensor) -> None:  # type: ignore[override]
                0.1 * params

        return Unreturned()


class SometimesNone(Local):
    """Its gradient is None while there is nothing to pull towards, which is right."""

    name = "sometimes"

    def objective(self, cohort: Cohort, round: int) -> Objective:
        class Later(Objective):
            def gradient(self, params: Tensor) -> Tensor | None:
                return None if round < 1 else 0.1 * params

        return Later()


class Hasty(Local):
    name = "hasty"

    def __init__(self, task: Task, settings: Any) -> None:
        """Without that of its base."""


class WritesInitial(Local):
    name = "overwriting"

    def after_training(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
        self.task.initial.copy_(cohort.params[0])
        return cohort


class Copied(Tracked):
    """`tracks = False` from an example whose answers are w itself."""

    name, paper, personal = "copied", "a test", False
    about_last_steps, tracks = True, False
    Settings, exchange = Local.Settings, Changes


class SendsBeforeTheAnswer(Copied):
    """The answer is w itself, but clients use w before they receive it."""

    about_last_steps, exchange = False, Stepped


# A function, a change of its result, and the message.
WRONG_RESULT: dict[str, tuple[str, Any, str]] = {
    "no pair": ("client_send", lambda c, v: v, "raised ValueError: not enough values to unpack"),
    "clients dropped": ("client_send", lambda c, v: (c.rows(slice(0, 1)), v), r"got clients \(0,\)"),
    "state added": ("client_send", lambda c, v: (c.with_state(late=c.params), v), "state: .*'late'"),
    "state retyped": ("client_send", lambda c, v: (c.with_state(shared=c.params.double()), v), "shared: got .*float64"),
    "message too short": ("client_send", lambda c, v: (c, {"model": v["model"][:, 1:]}), r"'model': got .*\[5, 1509\]"),
    "field not declared": ("client_send", lambda c, v: (c, {**v, "more": c.params}), "got values for .*'more'"),
    "server without a key": ("server_reply", lambda s, v: s["nothing"], "raised KeyError: 'nothing'"),
    "server state is a number": ("server_reply", lambda s, v: ({"model": 0.0}, v), "model: got a float"),
    "answer with rows": ("server_reply", lambda s, v: (s, {"model": v["model"][None]}), r"'model': .*\[1, 1510\]"),
    "server begins with a number": (
        "server_start",
        lambda s: {**s, "n": 0},
        "n: got a int, expected a dict of tensors",
    ),
    "params without rows": ("client_receive", lambda c: replace(c, params=c.params[0]), r"params: got .*\[1510\]"),
    "nothing returned": ("client_receive", lambda c: None, "got a NoneType"),
    "state without rows": ("client_start", lambda c: c.with_state(shared=c.params[0]), r'"shared"\]: got .*\[1510\]'),
    "rest without rows": ("client_rest", lambda c: c.with_state(shared=c.state["shared"][0]), "state: shared: got"),
    "params written": ("client_send", lambda c, v: (c, {"model": c.params.mul_(0.5)}), "writes into a tensor"),
    "state written": (
        "client_send",
        lambda c, v: (c, {"model": c.state.update(shared=c.params) or c.params}),
        "writes into a tensor or a dict",
    ),
}
REFUSED = {
    "gradient of one row": (with_objective(gradient_of=lambda p: p[:1]), r"Wrong\.gradient: got .*\[1, 1510\]"),
    "gradient written": (with_objective(gradient_of=lambda p: p.mul_(0.1)), r"Wrong\.gradient: writes into a tensor"),
    "field of the objective written": (WritesItsField, r"Drifting: writes into a tensor"),
    "gradient not returned": (GradientNotReturned, r"Unreturned\.gradient: got a NoneType, .*return the gradient"),
    "w⁰ written": (WritesInitial, r"after_training: writes into a tensor"),
    "a value of the last round": (with_exchange(Recalls), r"Recalls\.client_send: got 'pull' of the round before"),
    "server written": (with_exchange(InPlace), r"InPlace\.server_reply: writes into a tensor"),
    "answer written": (with_exchange(WritesItsAnswer), r"WritesItsAnswer\.client_receive: writes into a tensor"),
    "losses of a later step": (
        working(lambda cohort, work, phase: work.losses(cohort, cohort.params, phase, 3)),
        "after_training: raised ValueError: step: got 3, expected a whole number from 0 to 2",
    ),
    "gradient of a phase before the start": (
        working(lambda cohort, work, phase: work.mean_gradient(cohort, cohort.params, phase - 1)),
        "phase: got -1",
    ),
    "loss without needs_features": (LossNotAskedFor, r"Unasked\.loss would never be called"),
    "an objective without effect": (WithoutEffect, r"objective: Idle changes nothing; define gradient, loss or after"),
    "step in float64": (with_objective(step_of=Tensor.double), r"Wrong\.after_step: got torch.float64"),
    "loss summed over clients": (with_objective(loss_of=Tensor.sum), r"Wrong\.loss: got .*\[\].*expected .*\[5\]"),
    "unmarked inside a dict": (with_objective(held=lambda c: {"a": [1, c.params]}), r"Wrong\.held\['a'\]\[1\]: got"),
    "marked without rows": (with_objective(held=lambda c: PerClient(c.params[0])), r"Wrong\.held: got .*\[5, …\]"),
    "unmarked in a second training": (UnmarkedSecond, r"Proximal\.anchor: got .*PerClient"),
    "another model at the server": (
        averaging("server_reply", lambda s, v: ({"model": s["model"] + 1}, v)),
        r"Mean\.client_receive: .*not the server's",
    ),
    "kinds 0 and 0": (with_kinds(0, 0), r"Numbered\.down: got kind 0, expected Message\(1, "),
    "value that no answer has": (MissingAnswer, r"objective: raised KeyError: 'nothing'"),
    "total not returned": (with_exchange(Forgetful), r"Forgetful\.server_add: got a NoneType, expected the total"),
    "gradient of other rows": (
        with_objective(gradient_of=lambda p: p + torch.zeros(2, p.shape[1])),
        r"Wrong\.gradient: raised The size of tensor a .*PerClient",
    ),
    "tracks copied": (Copied, r'Changes\.client_receive: uses .*state\["model"\].*leave `tracks` true'),
    "sends before the answer": (SendsBeforeTheAnswer, r'Stepped\.client_send: uses .*state\["model"\]'),
    **{name: (averaging(call, change), f"{call}: .*{text}") for name, (call, change, text) in WRONG_RESULT.items()},
}


def federation(method: type[Method], **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, method.name, method)
        return factories.federation(method.name, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_breaks_the_contract_is_refused_by_name(name: str) -> None:
    method, message = REFUSED[name]
    with pytest.raises(MethodError, match=f"^method {method.name}: .*{message}"):
        factories.played(federation(method, participation=0.6 if name == "rest without rows" else 1.0), 2)
    report = check_method(method)
    assert not report.ok
    assert f"method {method.name}: " in report.failed[0].text
    assert "_Watched" not in str(report)


@pytest.mark.parametrize("clients", [1, 2, 10])
def test_a_shared_tensor_may_have_as_many_rows_as_there_are_clients(clients: int) -> None:
    """FedProto has ten classes and ten clients, pFedLMS two layers and two clients."""
    for method in ("fedproto", "pfedlms", "pfed1bs"):
        played = factories.federation(method, factories.digits(clients))
        assert played.play_round().participants == tuple(range(clients))


def test_a_model_in_a_field_of_the_objective_is_not_overwritten() -> None:
    """Steps write into their models; a model that `after_step` returns from a field is copied before."""

    class Projected(Local):
        name = "projected"

        def objective(self, cohort: Cohort, round: int) -> Objective:
            return Held(PerClient(cohort.params))

    @dataclass(frozen=True)
    class Held(Objective):
        start: PerClient

        def after_step(self, params: Tensor, step: int) -> Tensor:
            return self.start.value

    played = federation(Projected, local_steps=4)
    played.start()
    before = played.state()["params"].clone()
    played.play_round()
    assert torch.equal(played.state()["params"], before)


# --- methods that only `check_method` refuses -------------------------------------------------------------------------


class MeanOfCohort(Local):
    name = "meanfield"

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Proximal(PerClient(cohort.params.mean(dim=0).expand_as(cohort.params)), 0.1)


class Random(Local):
    name = "random"

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Proximal(PerClient(torch.randn_like(cohort.params)), 0.1)


class Remembers(Averaging):
    """Keeps clients' state in an attribute, which no checkpoint has."""

    exchange = Averaged

    def __init__(self, task: Task, settings: Any) -> None:
        super().__init__(task, settings)
        self.seen = 0

    def objective(self, cohort: Cohort, round: int) -> Objective:
        self.seen += 0 in cohort.ids
        return Proximal(PerClient(torch.zeros_like(cohort.params)), 0.01 * self.seen)


class TooWide(Local):
    name = "wide"

    @dataclass(frozen=True)
    class Settings:
        levels: int = setting(4, "of a symbol", minimum=0, maximum=256)

    def __init__(self, task: Task, settings: Any) -> None:
        super().__init__(task, settings)
        self.share = 1 / settings.levels


class NoHelp(Local):
    name = "nohelp"

    @dataclass(frozen=True)
    class Settings:
        strength: float = 0.1


class Box(Averaged):
    """Declares a bit for each parameter and passes whole models through an attribute."""

    def __init__(self, task: Task, settings: Any) -> None:
        super().__init__(task, settings)
        self.up, self.box = Message(0, (Signs("model", task.layout.dim),)), dict[tuple[int, int], Tensor]()

    def client_send(self, cohort: Cohort, round: int, work: Any) -> Any:
        self.box |= {(round, client): own for client, own in zip(cohort.ids, cohort.params, strict=True)}
        return cohort, {"model": cohort.params}

    def server_open(self, server: Tensors, round: int) -> Any:
        return round, super().server_open(server, round)

    def server_add(self, total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
        round, means = total
        models = [self.box.get((round, client), row) for client, row in zip(ids, values["model"], strict=True)]
        return round, super().server_add(means, ids, samples, {"model": torch.stack(models)})

    def server_reply(self, server: Tensors, total: Any, round: int) -> Any:
        return super().server_reply(server, total[1], round)


class Leak(Averaged):
    """Clients pass a model to each other through an attribute."""

    leaked: Tensor | None = None

    def client_send(self, cohort: Cohort, round: int, work: Any) -> Any:
        if 0 in cohort.ids:
            self.leaked = cohort.params[:1]
        return cohort, {"model": cohort.params}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Any:
        after = go_on_from(cohort, values["model"])
        return after if self.leaked is None else after.with_state(shared=self.leaked.expand_as(after.params))


class SumOfFloat32(Averaged):
    """Its sum has other last bits if messages come in other groups."""

    def server_open(self, server: Tensors, round: int) -> Any:
        return 0.0

    def server_add(self, total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
        return total + values["model"].sum(dim=0)

    def server_reply(self, server: Tensors, total: Any, round: int) -> Any:
        return {"model": total / 5}, {"model": total / 5}


class Misspelt(Local):
    name = "misspelt"

    def after_train(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
        return cohort.with_model(cohort.params * 0)


def sends_nan(cohort: Cohort, values: Tensors) -> Any:
    """Client 0 sends NaN."""
    wrong = torch.tensor([client == 0 for client in cohort.ids])
    return cohort, {"model": values["model"].masked_fill(wrong.unsqueeze(1), torch.nan)}


def test_a_gradient_without_memory_is_no_fault_of_the_method() -> None:
    def fail(params: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        factories.played(federation(with_objective(gradient_of=fail)), 1)


def test_a_run_of_a_misspelt_method_is_refused() -> None:
    with pytest.raises(
        MethodError, match=r"^method misspelt: `Misspelt\.after_train` is never read .*`after_training`"
    ):
        federation(Misspelt)


FAILING = {
    "passes values to the server through itself": (with_exchange(Box), "separate ends", "for all, .* differ in server"),
    "passes values to clients through itself": (with_exchange(Leak), "separate ends", "differ in state.shared"),
    "a client sends NaN": (
        averaging("client_send", sends_nan),
        "rounds",
        r"round 1: client 0 is left out of this exchange: DecodeError: field 'model': .*must be valid: finite",
    ),
    "depends on the cohort": (MeanOfCohort, "cohort sizes", "cohorts of 1 and of 3 clients differ in"),
    "measures the mean of those at hand": (MeanOfTheCohort, "rounds", "global_model: got other models for other"),
    "adds in float32": (with_exchange(SumOfFloat32), "cohort sizes", "differ in server.*in float64"),
    "a misspelt function": (Misspelt, "declaration", r"`Misspelt\.after_train` is never read .* mean `after_training`"),
    "a misspelt function of its objective": (
        with_objective_kind(type("Clamped", (Wrong,), {"after_steps": Wrong.after_step})),
        "rounds",
        r"`Clamped\.after_steps` is never read \(did you mean `after_step`",
    ),
    "a misspelt function of its exchange": (
        with_exchange(type("Half", (Averaged,), {"client_recieve": Averaged.client_receive})),
        "rounds",
        r"`Half\.client_recieve` is never read \(did you mean `client_receive`",
    ),
    "a name that is a path": (type("Path", (Local,), {"name": "a/b"}), "declaration", "got the name 'a/b', expected"),
    "measures own models as shared": (OwnAsShared, "rounds", "got other models for other clients or cohorts"),
    "draws from torch's generator": (Random, "determinism", "two runs with the same seed differ in"),
    "keeps state in an attribute": (Remembers, "resume", r"from a checkpoint differ in server.model\. Results must"),
    "absent clients miss changes": (
        averaging("client_receive", lambda c: c.with_state(shared=c.state["shared"] + c.params)),
        "participation",
        r'state\["shared"\] is the same with all clients',
    ),
    "limits too wide": (TooWide, "limits", "levels = 0 is within the limits that Settings declares, but raises"),
    "a setting without help": (NoHelp, "declaration", "Settings.strength is declared without meaning"),
}


@pytest.mark.parametrize("name", FAILING)
def test_check_method_reports_what_is_wrong(name: str) -> None:
    method, check, message = FAILING[name]
    report = check_method(method)
    assert not report.ok
    failed = len(report.failed)
    assert str(report).startswith(f"{report.method}: {'1 check' if failed == 1 else f'{failed} checks'} failed\n")
    found = {each.name: each.text for each in report.failed}
    assert check in found, str(report)
    assert re.search(message, found[check]), found[check]


@pytest.mark.parametrize("tracks", [True, False])
def test_a_right_method_passes(tracks: bool) -> None:
    """test_battery.py checks the methods of the registry."""
    whole: Any = averaging()
    whole.tracks = tracks
    whole.sketches, whole.global_state = 3, lambda self: self.sketches  # which is used, so it is not misspelt
    assert str(check_method(whole)).startswith("averaging: all checks passed")


def test_a_gradient_may_be_none_in_some_rounds() -> None:
    assert factories.played(federation(SometimesNone), 2)


def test_a_method_without_its_task_is_refused() -> None:
    with pytest.raises(MethodError, match=r"method hasty: got no task, .*call super\(\).__init__\(task, settings\)"):
        federation(Hasty)


def test_a_method_may_refuse_momentum() -> None:
    """Scaffold does so by itself; the report says that nothing was played with momentum."""

    class Plain(Local):
        name = "plain"

        def __init__(self, task: Task, settings: Any) -> None:
            if task.momentum:
                raise UsageError("train.momentum: plain steps only")
            super().__init__(task, settings)

    report = check_method(Plain)
    assert report.ok
    assert "5 clients, without momentum, which it refuses; names" in str(report)


def test_constants_that_change_in_a_run_are_noted() -> None:
    """η of all phases and E of all clients where those of this phase and this client may be meant."""

    class Scaled(Local):
        name = "scaled"

        def objective(self, cohort: Cohort, round: int) -> Objective:
            path = self.task.learning_rate * self.task.local_steps
            return Proximal(PerClient(cohort.params), path)

    class Exact(Scaled):
        def objective(self, cohort: Cohort, round: int) -> Objective:
            return Proximal(PerClient(cohort.params), self.task.rate(round + 1) * self.task.steps_of(100))

    (noted,), (silent,) = (
        [each.text for each in check_method(kind).checks if each.name == "unequal steps"] for kind in (Scaled, Exact)
    )
    assert "Note: it reads task.learning_rate and never task.rate(phase)" in noted
    assert "Note: it reads task.local_steps and never task.steps_of(samples)" in noted
    assert "Note" not in silent


def test_what_clients_count_may_be_alike_while_all_take_part() -> None:
    class Counting(Ditto):
        name = "counting"

        def client_start(self, cohort: Cohort) -> Cohort:
            return super().client_start(cohort).with_state(trained=torch.zeros_like(cohort.params[:, :1]))

        def client_rest(self, cohort: Cohort) -> Cohort:
            return super().client_rest(cohort).with_state(trained=cohort.state["trained"])

        def after_training(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
            return super().after_training(cohort.with_state(trained=cohort.state["trained"] + 1), phase, work)

    assert check_method(Counting).ok


def test_choices_of_a_setting_may_be_names_or_a_function() -> None:
    class Chosen(Local):
        name = "chosen"

        @dataclass(frozen=True)
        class Settings:
            rule: str = setting("mean", "how", choices=("mean", "median"))
            other: str = setting("a", "how", choices=lambda: ["a"])

    assert "3 settings at the ends of declared limits" in str(check_method(Chosen))
    with pytest.raises(ConfigError, match=r"method\.rule: got 'mode', expected one of: mean, median"):
        check_method(Chosen, rule="mode")


def test_check_method_refuses_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"method\.strength: got -1"):
        check_method(Ditto, strength=-1)
