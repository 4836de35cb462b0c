"""K models as one tensor: every runner gives the outputs, gradients and running statistics of K plain modules, and each
module gets the right runner."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factories
import pfedlms
from factories import CPU, LABELS, squares
from pfedlms.errors import UsageError
from pfedlms.models import CohortModel, build, forward
from pfedlms.models.chain import Chain
from pfedlms.models.intake import check_trains
from pfedlms.models.one_by_one import OneByOne
from pfedlms.models.runner import FunctionalModule, Runner
from pfedlms.models.stacked import Stacked

GPU = torch.device("cuda")
CLIENTS, BATCH = 3, 8
Factory = Callable[[], nn.Module]
normal = partial(factories.normal, dtype=torch.float64)


def dnn() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4)
    )


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 32), nn.Dropout(0.5), nn.Linear(32, 4))


def on_last_axis() -> nn.Module:
    """A linear layer on sequences."""
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Flatten(), nn.Linear(30, 4, bias=False))


def partly_frozen() -> nn.Module:
    """Frozen parameters have no clients axis."""
    module = convolutional()
    for parameter in (module[0].weight, module[1].bias, module[4].weight):
        parameter.requires_grad_(False)
    return module


class Tied(nn.Module):
    """A layer used twice, a weight under two names, a frozen layer, a frozen bias and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.norm = nn.BatchNorm1d(12)
        self.second, self.twice = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("shift", torch.arange(12.0) / 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.first(x.flatten(1)))) + self.shift
        return self.head(self.twice(self.twice(self.second(x))))


class Assigning(nn.Module):
    """Assigns its buffers: a mean, whose value before is needed in the backward pass, and a number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.flatten(1))
        before = self.mean
        if self.training:
            self.mean, self.calls = 0.9 * self.mean + 0.1 * out.detach().mean(dim=0), self.calls + 1
        return out * before - self.mean / (1 + self.calls)


def normed_and_assigning() -> nn.Module:
    return nn.Sequential(convolutional()[:3], nn.Flatten(), nn.Linear(20, 12), Assigning())


FACTORIES = [dnn, on_last_axis, convolutional, partly_frozen, with_batch_norm, Tied, Assigning, normed_and_assigning]


class StackedAsOnGPU(Stacked):
    """Writes gradients into the flat gradient."""

    def has_short_operators(self, clients: int) -> bool:
        return True


RUNNERS: dict[str, Callable[[CohortModel], Runner | None]] = {
    "one by one": lambda model: OneByOne(model._functional, CPU, normal(BATCH, 3, 2, 2)),
    "stacked": lambda model: Stacked(model._functional, gpu_rules=False),
    "stacked as on a GPU": lambda model: StackedAsOnGPU(model._functional, gpu_rules=True),
    "as chosen": lambda model: model._runner,
}


class Setup:
    """A cohort whose clients have different weights, and a plain module for each, filled parameter by parameter; in
    float64, so that another order of sums does not show."""

    def __init__(self, factory: Factory, runner: Callable[[CohortModel], Runner | None] = RUNNERS["as chosen"]) -> None:
        original = factories.seeded(factory, 1).double()
        self.plain = [copy.deepcopy(original) for _ in range(CLIENTS)]
        self.model = CohortModel(copy.deepcopy(original), CPU)
        self.model._runner = runner(self.model)
        cohort = self.model.cohort((0, 1, 2), (1, 1, 1))
        self.params, self.buffers = cohort.params + 0.3 * normal(*cohort.params.shape, seed=2), cohort.buffers
        for module, own in zip(self.plain, self.params, strict=True):
            trained = [value for value in module.parameters() if value.requires_grad]  # in the order of the vector
            assert sum(value.numel() for value in trained) == len(own)
            nn.utils.vector_to_parameters(own.clone(), trained)
        self.x = normal(CLIENTS, BATCH, 3, 2, 2, seed=3)


def flat_gradient(module: nn.Module, value: Tensor) -> Tensor:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat([slope.flatten() for slope in torch.autograd.grad(value, trained, materialize_grads=True)])


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("factory", FACTORIES)
def test_every_runner_is_a_loop_over_plain_modules(factory: Factory, runner: Any) -> None:
    """Losses, gradients and running statistics of two training steps, then outputs of an evaluation, which does not
    change the statistics; neither the module nor the initial values change."""
    setup = Setup(factory, runner)
    model = setup.model
    before = copy.deepcopy((model.module.state_dict(), model.initial, model.initial_buffers))
    for step in range(2):
        x, out = normal(CLIENTS, BATCH, 3, 2, 2, seed=10 + step), torch.full_like(setup.params, torch.nan)
        losses = model.gradient(out, setup.params, setup.buffers, x, LABELS, squares)
        for client, module in enumerate(setup.plain):
            loss = module.train()(x[client]).square().sum() / 2
            torch.testing.assert_close(losses[client], loss.detach())
            torch.testing.assert_close(out[client], flat_gradient(module, loss))
    outputs, features = model.forward(setup.params, setup.buffers, setup.x, training=False)
    assert features is None
    for client, module in enumerate(setup.plain):
        torch.testing.assert_close(outputs[client], module.eval()(setup.x[client]))
        for name, value in module.named_buffers():
            torch.testing.assert_close(setup.buffers[name][client], value)
            assert not name.endswith("num_batches_tracked") or int(value) == 2  # the plain modules did keep statistics
    torch.testing.assert_close((model.module.state_dict(), model.initial, model.initial_buffers), before)


# --- features


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize(("factory", "width"), [(dnn, 6), (convolutional, 20), (with_batch_norm, 6)])
def test_features_are_the_inputs_of_the_last_linear_layer(factory: Factory, width: int, runner: Any) -> None:
    """In evaluation, and in training with a loss on them."""
    setup = Setup(factory, runner)
    outputs, features = setup.model.forward(setup.params, setup.buffers, setup.x, training=False, features=True)
    assert features is not None
    assert setup.model.feature_size == features.shape[2] == width
    out = torch.full_like(setup.params, torch.nan)
    losses = setup.model.gradient(out, setup.params, setup.buffers, setup.x, LABELS, squares, features=True)
    for client, module in enumerate(setup.plain):
        x = setup.x[client]
        torch.testing.assert_close(features[client], module.eval()[:-1](x))
        torch.testing.assert_close(outputs[client], module(x))
        seen = module.train()[:-1](x)
        loss = (seen.square().sum() + module[-1](seen).square().sum()) / 2
        torch.testing.assert_close(losses[client], loss.detach())
        torch.testing.assert_close(out[client], flat_gradient(module, loss))
    assert not setup.model.module[-1]._forward_pre_hooks  # the hook that catches them is removed


class Unused(nn.Module):
    """Its last linear layer is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(12, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.flatten(1))


def test_a_parameter_that_takes_no_part_has_no_gradient() -> None:
    setup = Setup(Unused)
    out = torch.full_like(setup.params, torch.nan)
    setup.model.gradient(out, setup.params, {}, setup.x, LABELS, squares)
    assert out[:, :52].all()
    assert not out[:, 52:].any()


@pytest.mark.parametrize(
    ("factory", "message"), [(partial(nn.Conv2d, 3, 2, 1), "Conv2d has no linear layer"), (Unused, "takes no part")]
)
def test_a_model_without_features_is_refused(factory: Factory, message: str) -> None:
    setup = Setup(factory)
    with pytest.raises(UsageError, match=message):
        setup.model.forward(setup.params, setup.buffers, setup.x, training=False, features=True)


# --- state dict


@pytest.mark.parametrize("factory", FACTORIES)
def test_state_dict_fills_a_fresh_module(factory: Factory) -> None:
    """Trained, tied, frozen parameters and buffers all arrive, as copies: the fresh module gives the client's own
    outputs."""
    setup = Setup(factory)
    setup.model.forward(setup.params, setup.buffers, setup.x, training=True)  # moves the running statistics
    expected, _ = setup.model.forward(setup.params, setup.buffers, setup.x, training=False)
    before = copy.deepcopy((setup.params, setup.buffers))
    for client in range(CLIENTS):
        own = {name: value[client] for name, value in setup.buffers.items()}
        fresh, taken = factory().double(), setup.model.state_dict(setup.params[client], own)
        fresh.load_state_dict(taken)
        for value in taken.values():
            value.zero_()
        torch.testing.assert_close(fresh.eval()(setup.x[client]), expected[client])
    torch.testing.assert_close((setup.params, setup.buffers), before)


def test_state_dict_with_a_buffer_under_two_names() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("one", torch.arange(2.0))
    module.register_buffer("two", module.one)
    model = CohortModel(module, CPU)
    taken = model.state_dict(model.initial, model.initial_buffers)
    assert taken["two"].tolist() == [0.0, 1.0]


def test_a_buffer_must_keep_its_shape_and_type() -> None:
    class Halving(Assigning):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 0.5
            return self.linear(x.flatten(1))

    setup = Setup(Halving)
    with pytest.raises(UsageError, match=r"assigns .* of shape \[\] to its buffer calls, expected torch.int64 of"):
        setup.model.forward(setup.params, setup.buffers, setup.x, training=True)


# --- the choice of a runner


class Branching(nn.Module):
    """Branches by the sign of a sum of its inputs."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.flatten(1))
        return out if x.sum() > 0 else -2 * out


class CountingInTraining(Branching):
    """Can be stacked in evaluation, but not in training."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.linear(x / float(x.abs().mean())) if self.training else self.linear(x)


class Remembering(Branching):
    """Subtracts the mean of its last call, which it keeps as a tensor that is no buffer."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.flatten(1))
        kept, self.kept = self.kept, out.detach().mean()
        return out if kept is None else out - kept


class Showing(Branching):
    """Leaves its outputs in an attribute that no call reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.linear(x.flatten(1))
        return self.shown


class OnlyForwards(torch.autograd.Function):
    """The identity; its backward pass reads a number out of a tensor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0] * float(slopes[0].sum() * 0 + 1)


class FailingBackwards(Branching):
    def forward(self, x: Tensor) -> Any:
        return OnlyForwards.apply(self.linear(x.flatten(1)))  # type: ignore[no-untyped-call]


def averaging() -> nn.Module:
    """A batch norm that reads the number of batches out of a tensor."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4, momentum=None))


def silenced() -> nn.Module:
    """A hook of the backward pass makes all gradients before the Tanh zero."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    module[2].register_full_backward_hook(lambda own, inputs, outputs: (0 * inputs[0],))
    return module


class Bag(nn.Module):
    """Pixels as words; word 0 is padding, whose vector is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 6, padding_idx=0), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x.flatten(1).abs().long().clamp(max=7)).mean(dim=1))


def frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 4))


REFUSED = (Branching, CountingInTraining, FailingBackwards, averaging)
# A module, and its runners on a CPU and on a GPU.
CHOICES: list[tuple[Factory, type[Runner], type[Runner]]] = [
    (dnn, Chain, Chain),
    (lambda: build("dnn", (3, 2, 2), 4, 8, 0), Chain, Chain),
    (frozen, Stacked, Stacked),
    (with_dropout, Stacked, Stacked),
    (Showing, Stacked, Stacked),
    (with_batch_norm, OneByOne, Stacked),
    (convolutional, OneByOne, Stacked),
    (lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 4)), OneByOne, Stacked),
    (Tied, OneByOne, Stacked),
    (silenced, OneByOne, OneByOne),
    (Bag, OneByOne, OneByOne),
    *((factory, OneByOne, OneByOne) for factory in REFUSED),
]


@pytest.mark.filterwarnings("ignore:model. clients are trained one after another")
@pytest.mark.parametrize(("factory", "cpu", "gpu"), CHOICES)
def test_each_module_gets_its_runner(factory: Factory, cpu: type[Runner], gpu: type[Runner]) -> None:
    """The trial needs no GPU."""
    single, sample = FunctionalModule(factory()), torch.ones(5, 3, 2, 2)
    params = {name: value for name, value in single.module.named_parameters() if value.requires_grad}
    for device, expected in ((CPU, cpu), (GPU, gpu)):
        assert type(forward.choose(single, device, params, sample)) is expected


@pytest.mark.parametrize("factory", REFUSED[:3])
def test_a_module_that_cannot_be_stacked_warns_once_and_is_right(factory: Factory) -> None:
    """The runner is chosen once, in an evaluation, also where only training cannot be stacked."""
    setup = Setup(factory)
    setup.x[1] = -setup.x[1].abs()  # client 1 takes the other branch
    setup.x[2] = setup.x[2].abs()
    with pytest.warns(UserWarning, match="one after another, because torch.func cannot stack it"):
        setup.model.forward(setup.params, setup.buffers, setup.x, training=False)
    out = torch.full_like(setup.params, torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = setup.model.gradient(out, setup.params, setup.buffers, setup.x, LABELS, squares)
    for client, module in enumerate(setup.plain):
        loss = module(setup.x[client]).square().sum() / 2
        torch.testing.assert_close(losses[client], loss.detach())
        torch.testing.assert_close(out[client], flat_gradient(module, loss))


@pytest.mark.parametrize("factory", [Remembering, lambda: nn.Sequential(convolutional()[:4], Remembering(20))])
def test_a_tensor_kept_from_one_call_to_the_next_is_refused(factory: Factory) -> None:
    x = Setup(factory).x[0].float()
    with pytest.raises(UsageError, match=r"leaves something of its samples to the next call.* as a persistent buffer"):
        check_trains(factory(), x)


class Caching(nn.Linear):
    """Computes a constant at its first call and keeps it."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((12,), 2.0)
        return super().forward(x * self.scale)


def test_a_cached_constant_is_no_state() -> None:
    check_trains(Caching(12, 4), normal(BATCH, 12).float())


class Shown(nn.Module):
    """Keeps its features for somebody to look at, and never reads them. A buffer and a counter change in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(12, 4), 0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("constant", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.constant is None:
            self.constant = torch.full((4,), 2.0)
        self.calls += 1
        self.features = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * self.features.mean(dim=0).detach()
        return (self.features - self.mean) * self.constant / self.calls


class Uncopied(Shown):
    """Keeps something that cannot be copied, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.later = (row for row in x)
        return super().forward(x)


@pytest.mark.parametrize("factory", [Shown, Uncopied])
def test_a_tensor_that_no_call_reads_is_no_state(factory: Factory) -> None:
    check_trains(factory(), normal(BATCH, 12).float())


def test_a_module_that_keeps_tensors_can_be_copied_after_it_was_stacked() -> None:
    """Also one that makes a buffer at its first call."""
    model = CohortModel(Shown(), CPU)
    with torch.no_grad():
        model.module(normal(BATCH, 12).float())
    cohort = model.cohort((0, 1, 2), (1, 1, 1))
    model.forward(cohort.params, cohort.buffers, normal(CLIENTS, BATCH, 12).float(), training=True)
    assert type(model._runner) is Stacked
    state = model.state_dict(cohort.params[1], {name: value[1] for name, value in cohort.buffers.items()})
    module = copy.deepcopy(model.module)
    module.load_state_dict(state)
    assert torch.equal(module.mean, cohort.buffers["mean"][1])
    assert module.constant.tolist() == [2.0] * 4


class Moving(nn.Linear):
    """Assigns one buffer to another, which is registered after it."""

    def __init__(self) -> None:
        super().__init__(12, 4)
        self.register_buffer("now", torch.zeros(()))
        self.register_buffer("before", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.before = self.now
        self.now = self.now + 1
        return super().forward(x.flatten(1))


def test_a_buffer_assigned_to_another_keeps_its_value() -> None:
    setup = Setup(Moving)
    for _ in range(2):
        setup.model.forward(setup.params, setup.buffers, setup.x, training=True)
    assert setup.buffers["now"].tolist() == [2.0] * CLIENTS
    assert setup.buffers["before"].tolist() == [1.0] * CLIENTS


@pytest.mark.parametrize("factory", [with_dropout, lambda: nn.Sequential(with_dropout(), nn.LayerNorm(4))])
def test_the_trial_changes_no_result(factory: Factory) -> None:
    """Neither outputs nor random numbers: otherwise a resumed run would differ from one that was not stopped."""
    cohort = CohortModel(factory(), CPU).cohort((0, 1, 2), (1, 1, 1))
    x = normal(CLIENTS, BATCH, 12).float()
    for training in (False, True):
        model, outputs = CohortModel(factory(), CPU), []  # the trial is at the first use
        for _ in range(2):
            with torch.random.fork_rng():
                torch.manual_seed(3)
                outputs.append(model.forward(cohort.params, cohort.buffers, x, training=training)[0])
        assert torch.equal(*outputs)


def test_clients_draw_different_dropout_masks() -> None:
    model = CohortModel(nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5)), CPU)
    cohort = model.cohort((0, 1), (1, 1))
    outputs, _ = model.forward(cohort.params, cohort.buffers, torch.ones(2, 1, 50), training=True)
    assert not torch.equal(outputs[0] == 0, outputs[1] == 0)


@pytest.mark.parametrize("name", ["dnn", "resnet", "gru", "transformer"])
@pytest.mark.parametrize("runner", ["stacked as on a GPU", "as chosen"])
def test_products_in_bfloat16_give_nearly_the_same_gradient_in_float32(name: str, runner: str) -> None:
    """A relative error below 20 % in fourteen layers, and not zero."""
    words = name in ("gru", "transformer")
    shape = (6,) if words else (3, 8, 8)
    x = torch.arange(4 * 6).view(2, 2, 6) % 7 if words else normal(2, 2, *shape).float()
    gradients = []
    for half in (False, True):
        model = CohortModel(build(name, shape, 7, 16, key=1), CPU, half=half)
        model._runner = RUNNERS[runner](model)
        params = model.initial.expand(2, -1).clone()
        gradients.append(torch.zeros_like(params))
        losses = model.gradient(gradients[-1], params, {}, x, torch.zeros(2, 0), squares)
        assert losses.dtype == torch.float32
    assert 1e-6 < (gradients[1] - gradients[0]).norm() / gradients[0].norm() < 0.2


def test_a_first_layer_may_work_in_place() -> None:
    factory = lambda: nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(64, 10))  # noqa: E731 - an argument
    assert pfedlms.run("digits", factory, rounds=2, clients=3).accuracy > 50


def test_an_embedding_with_sparse_gradients_has_the_gradient_of_a_dense_one() -> None:
    tokens, gradients = torch.arange(24).reshape(CLIENTS, BATCH) % 5, []
    for sparse in (False, True):
        model = CohortModel(nn.Sequential(nn.Embedding(6, 4, sparse=sparse)), CPU)
        cohort = model.cohort((0, 1, 2), (1, 1, 1))
        cohort.params[:] = normal(CLIENTS, 24).float()
        gradients.append(torch.full_like(cohort.params, torch.nan))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # clients with sparse gradients are trained one after another
            model.gradient(gradients[-1], cohort.params, {}, tokens, LABELS, squares)
    torch.testing.assert_close(gradients[1], gradients[0])


class Constrained(nn.Linear):
    """Limits the norms of its weights, as networks for EEG do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, maxnorm=9)
        return super().forward(x)


class Clamped(nn.Linear):
    """Writes where autograd does not count it."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Constrained(12, 4), Clamped(12, 4), nn.Embedding(5, 4, max_norm=9)])
def test_a_call_that_writes_into_its_parameters_is_refused(layer: nn.Module) -> None:
    x = torch.ones(BATCH, 12) if isinstance(layer, nn.Linear) else torch.ones(BATCH, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"writes into its parameter 0\.weight.* with a changed copy"):
        check_trains(nn.Sequential(layer), x)


class Flattened(nn.GRU):
    """Moves its weights together, as `flatten_parameters` does on a GPU only."""

    def flatten_parameters(self) -> None:
        for weight in self.parameters():
            weight.data = weight.data.clone()

    def forward(self, x: Tensor) -> Any:
        self.flatten_parameters()
        return super().forward(x)[0]


def test_recurrent_layers_may_move_their_weights() -> None:
    check_trains(Flattened(12, 4), torch.ones(BATCH, 3, 12))


class Centred(nn.Linear):
    """Subtracts a running mean of its samples."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(12, 4)
        self.register_buffer("mean", torch.zeros(12), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x - self.mean)


class Positional(nn.Linear):
    """Makes a table at its first call, which is the same for all samples."""

    def __init__(self) -> None:
        super().__init__(12, 4)
        self.register_buffer("table", torch.zeros(12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.table.any():
            self.table = torch.arange(x.shape[1]).float()
        return super().forward(x + self.table)


def test_a_buffer_that_training_changes_must_be_persistent() -> None:
    """Else the models that a run returns would be without it. One that does not depend on samples is made anew."""
    x = normal(BATCH, 12).float()
    check_trains(Centred(persistent=True), x)
    check_trains(Positional(), x)
    with pytest.raises(UsageError, match=r"its state dict lacks it; .* persistent buffer"):
        check_trains(Centred(persistent=False), x)


def test_local_steps_have_gradients_where_the_caller_has_switched_them_off() -> None:
    model = CohortModel(dnn(), CPU)
    cohort, x = model.cohort((0, 1, 2), (1, 1, 1)), normal(CLIENTS, BATCH, 12).float()
    expected, out = torch.empty_like(cohort.params), torch.empty_like(cohort.params)
    model.gradient(expected, cohort.params, {}, x, LABELS, squares)
    with torch.no_grad():
        model.gradient(out, cohort.params, {}, x, LABELS, squares)
    assert torch.equal(out, expected)
