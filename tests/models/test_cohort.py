"""K models as one tensor: the same outputs, gradients and running statistics as K plain modules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pfedlms
from pfedlms import rng
from pfedlms.models import Cohort, CohortModel

CPU = torch.device("cpu")
CLIENTS = 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dnn() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4)
    )


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


class Tied(nn.Module):
    """A weight under two names, a frozen layer, a frozen bias and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("shift", torch.arange(12.0) / 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.first(x.flatten(1)))) + self.shift
        return self.head(self.second(x))


FACTORIES = [dnn, convolutional, with_batch_norm, Tied]


class Setup:
    """A cohort whose clients have different weights, and a plain module for each, filled parameter by parameter."""

    def __init__(self, factory: type[nn.Module]) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            original = factory()
        self.plain = [copy.deepcopy(original) for _ in range(CLIENTS)]
        self.model = CohortModel(copy.deepcopy(original), CPU)
        self.cohort = self.model.cohort((0, 1, 2), (1, 1, 1), with_momentum=False)
        params = self.cohort.params + 0.3 * normal(*self.cohort.params.shape, seed=2)
        for module, own in zip(self.plain, params, strict=True):
            at = 0
            for parameter in module.parameters():  # trainable ones in registration order: what the flat vector holds
                if parameter.requires_grad:
                    parameter.data = own[at : at + parameter.numel()].view_as(parameter).clone()
                    at += parameter.numel()
            assert at == len(own)
        # Setting .data of a tied parameter keeps the tie, because the parameter object is the same.
        self.params, self.buffers = params, self.cohort.buffers
        self.x = normal(CLIENTS, 8, 3, 2, 2, seed=3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("factory", FACTORIES)
def test_outputs_and_gradients_are_those_of_plain_modules(factory: type[nn.Module], training: bool) -> None:
    setup = Setup(factory)
    weights = normal(CLIENTS, 8, 4, seed=4)
    leaf = setup.params.clone().requires_grad_()
    outputs, features = setup.model.forward(leaf, setup.buffers, setup.x, training=training)
    assert features is None
    (gradient,) = torch.autograd.grad((outputs * weights).sum(), leaf)
    for client, module in enumerate(setup.plain):
        module.train(training)
        expected = module(setup.x[client])
        torch.testing.assert_close(outputs[client], expected, rtol=1e-5, atol=1e-6)
        (expected * weights[client]).sum().backward()
        flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])
        torch.testing.assert_close(gradient[client], flat, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factory", [convolutional, with_batch_norm, Tied])
def test_running_statistics_are_updated_in_place_as_the_module_does(factory: type[nn.Module]) -> None:
    setup = Setup(factory)
    for step in range(3):
        x = normal(CLIENTS, 8, 3, 2, 2, seed=10 + step)
        setup.model.forward(setup.params, setup.buffers, x, training=True)
        for client, module in enumerate(setup.plain):
            module.train()(x[client])
    counted = 0
    for client, module in enumerate(setup.plain):
        for name, value in module.named_buffers():
            torch.testing.assert_close(setup.buffers[name][client], value)
            counted += int(value) if name.endswith("num_batches_tracked") else 0
    assert counted == 3 * CLIENTS  # the plain modules did keep statistics


@pytest.mark.parametrize("factory", FACTORIES)
def test_evaluation_leaves_running_statistics_alone(factory: type[nn.Module]) -> None:
    setup = Setup(factory)
    before = {name: value.clone() for name, value in setup.buffers.items()}
    setup.model.forward(setup.params, setup.buffers, setup.x, training=False)
    assert all(torch.equal(setup.buffers[name], value) for name, value in before.items())


@pytest.mark.parametrize("factory", FACTORIES)
def test_neither_the_module_nor_its_initial_values_are_changed(factory: type[nn.Module]) -> None:
    setup = Setup(factory)
    before = {name: value.clone() for name, value in setup.model.module.state_dict().items()}
    initial = setup.model.initial.clone()
    setup.model.forward(setup.params, setup.buffers, setup.x, training=True)
    assert all(torch.equal(value, before[name]) for name, value in setup.model.module.state_dict().items())
    assert torch.equal(setup.model.initial, initial)
    assert all(torch.equal(value, before[name]) for name, value in setup.model.initial_buffers.items())


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_client_alone_has_the_bits_it_has_in_a_cohort(factory: type[nn.Module]) -> None:
    """How clients are grouped does not change results: forward and gradient of a cohort of one against a cohort of
    three."""
    setup = Setup(factory)

    def results(chosen: slice) -> tuple[Tensor, Tensor]:
        leaf = setup.params[chosen].clone().requires_grad_()
        buffers = {name: value[chosen].clone() for name, value in setup.cohort.buffers.items()}
        outputs, _ = setup.model.forward(leaf, buffers, setup.x[chosen], training=True)
        return outputs.detach(), torch.autograd.grad(outputs.square().sum(), leaf)[0]

    together, alone = results(slice(0, 3)), results(slice(1, 2))
    assert torch.equal(together[0][1:2], alone[0])
    assert torch.equal(together[1][1:2], alone[1])


# --- features
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [dnn, convolutional, with_batch_norm])
def test_features_are_what_enters_the_last_linear_layer(factory: type[nn.Module]) -> None:
    setup = Setup(factory)
    outputs, features = setup.model.forward(setup.params, setup.buffers, setup.x, training=False, features=True)
    assert features is not None
    assert setup.model.feature_size == features.shape[2] == (20 if factory is convolutional else 6)
    for client, module in enumerate(setup.plain):
        module.eval()
        torch.testing.assert_close(features[client], module[:-1](setup.x[client]))
        torch.testing.assert_close(outputs[client], module(setup.x[client]))
    assert not setup.model.module[-1]._forward_pre_hooks  # the hook is gone


def test_gradient_flows_through_features() -> None:
    setup = Setup(dnn)
    leaf = setup.params.clone().requires_grad_()
    _, features = setup.model.forward(leaf, setup.buffers, setup.x, training=True, features=True)
    assert features is not None
    (gradient,) = torch.autograd.grad(features.square().sum(), leaf)
    setup.plain[1][:-1](setup.x[1]).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in setup.plain[1][:-1].parameters()])
    torch.testing.assert_close(gradient[1, : len(expected)], expected)
    assert not gradient[:, len(expected) :].any()  # the head comes after the features


def test_a_model_without_a_linear_layer_has_no_features() -> None:
    model = CohortModel(nn.Conv2d(1, 2, 1), CPU)
    cohort = model.cohort((0,), (1,), with_momentum=False)
    assert model.feature_size == 0
    with pytest.raises(ValueError, match="Conv2d has no linear layer"):
        model.forward(cohort.params, cohort.buffers, torch.zeros(1, 2, 1, 3, 3), training=False, features=True)


# --- state dict
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES)
def test_state_dict_fills_a_fresh_module(factory: type[nn.Module]) -> None:
    """Trained, tied, frozen parameters and buffers all arrive: the fresh module gives the client's own outputs."""
    setup = Setup(factory)
    setup.model.forward(setup.params, setup.buffers, setup.x, training=True)  # moves the running statistics
    expected, _ = setup.model.forward(setup.params, setup.buffers, setup.x, training=False)
    for client in range(CLIENTS):
        own = {name: value[client] for name, value in setup.buffers.items()}
        fresh = factory()
        fresh.load_state_dict(setup.model.state_dict(setup.params[client], own))
        torch.testing.assert_close(fresh.eval()(setup.x[client]), expected[client])


def test_state_dict_is_a_copy() -> None:
    setup = Setup(with_batch_norm)
    taken = setup.model.state_dict(setup.params[0], {name: value[0] for name, value in setup.buffers.items()})
    for value in taken.values():
        value.zero_()
    assert setup.params[0].any()
    assert (setup.buffers["2.running_var"][0] == 1).all()


def test_state_dict_with_a_buffer_under_two_names() -> None:
    module = nn.Linear(2, 2)
    shared = torch.arange(2.0)
    module.register_buffer("one", shared)
    module.register_buffer("two", shared)
    model = CohortModel(module, CPU)
    cohort = model.cohort((0,), (1,), with_momentum=False)
    taken = model.state_dict(cohort.params[0], {name: value[0] for name, value in cohort.buffers.items()})
    assert taken["two"].tolist() == [0.0, 1.0]


# --- modules torch.func cannot stack
# ----------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Looks at its data: the sign of a sum decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.flatten(1))
        return out if x.sum() > 0 else -2 * out


class Counting(Branching):
    """Takes a number out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)) * x.abs().max().item()


@pytest.mark.parametrize("factory", [Branching, Counting])
def test_a_module_that_cannot_be_stacked_warns_once_and_is_right(factory: type[nn.Module]) -> None:
    setup = Setup(factory)
    setup.x[1] = -setup.x[1].abs()  # client 1 takes the other branch
    setup.x[2] = setup.x[2].abs()
    leaf = setup.params.clone().requires_grad_()
    with pytest.warns(UserWarning, match="one after another, because torch.func cannot stack it"):
        outputs, _ = setup.model.forward(leaf, setup.buffers, setup.x, training=True)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), leaf)
    for client, module in enumerate(setup.plain):
        expected = module(setup.x[client])
        torch.testing.assert_close(outputs[client], expected)
        expected.square().sum().backward()
        torch.testing.assert_close(gradient[client], torch.cat([p.grad.flatten() for p in module.parameters()]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, features = setup.model.forward(setup.params, setup.buffers, setup.x, training=False, features=True)
    assert features is not None
    torch.testing.assert_close(features, setup.x.flatten(2))


def test_a_module_that_can_be_stacked_does_not_warn() -> None:
    setup = Setup(dnn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs, _ = setup.model.forward(setup.params, setup.buffers, setup.x, training=True)
    assert outputs.shape[:2] == setup.x.shape[:2]
    assert setup.model.stacks(setup.params, setup.buffers, setup.x)


def test_dropout_is_a_function_of_the_generator() -> None:
    """The first call finds out whether the module can be stacked; that must not show in the results, or a resumed run
    and a continued one would differ."""
    model = CohortModel(nn.Sequential(nn.Flatten(), nn.Linear(12, 32), nn.Dropout(0.5), nn.Linear(32, 4)), CPU)
    cohort = model.cohort((0, 1, 2), (1, 1, 1), with_momentum=False)
    x = normal(CLIENTS, 8, 3, 2, 2)
    with torch.random.fork_rng():
        outputs = []
        for _ in range(2):
            torch.manual_seed(3)
            outputs.append(model.forward(cohort.params, cohort.buffers, x, training=True)[0])
    assert torch.equal(outputs[0], outputs[1])


def test_clients_draw_different_dropout_masks() -> None:
    model = CohortModel(nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5)), CPU)
    cohort = model.cohort((0, 1), (1, 1), with_momentum=False)
    outputs, _ = model.forward(cohort.params, cohort.buffers, torch.ones(2, 1, 50), training=True)
    assert not torch.equal(outputs[0] == 0, outputs[1] == 0)


# --- the cohort
# -------------------------------------------------------------------------------------------------------------


def test_clients_start_from_the_initial_weights() -> None:
    module = with_batch_norm()
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    model = CohortModel(module, CPU)
    cohort = model.cohort((4, 7), (10, 30), with_momentum=True)
    assert cohort.ids == (4, 7)
    assert cohort.samples == (10, 30)
    assert torch.equal(cohort.params, torch.stack([expected, expected]))
    assert cohort.momentum.shape == cohort.params.shape
    assert not cohort.momentum.any()
    assert {name: tuple(value.shape) for name, value in cohort.buffers.items()} == {
        "2.running_mean": (2, 6), "2.running_var": (2, 6), "2.num_batches_tracked": (2,)
    }  # fmt: skip
    cohort.params[0] += 1  # clients share no memory, with each other or with the model
    assert torch.equal(cohort.params[1], expected)
    assert torch.equal(model.initial, expected)
    assert model.cohort((0,), (1,), with_momentum=False).momentum.shape == (1, 0)


def test_a_replaced_model_forgets_its_momentum() -> None:
    cohort = Cohort((0, 1), (1, 1), torch.zeros(2, 3), torch.ones(2, 3), {"b": torch.ones(2)})
    model = torch.tensor([1.0, 2.0, 3.0])
    new = cohort.with_model(model)
    assert new.params.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert not new.momentum.any()
    assert new.buffers is cohort.buffers
    new.params[0] += 1
    assert new.params[1].tolist() == model.tolist() == [1.0, 2.0, 3.0]
    assert not cohort.params.any()
    assert cohort.momentum.all()
    own = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    assert torch.equal(cohort.with_model(own).params, own)


def test_state_and_scratch_are_added_to_a_new_cohort() -> None:
    cohort = Cohort((0,), (1,), torch.zeros(1, 2), torch.zeros(1, 0), {})
    one = cohort.with_state(a=torch.ones(1)).with_scratch(s=torch.ones(2))
    two = one.with_state(b=torch.zeros(1)).with_scratch(s=torch.zeros(2))
    assert set(two.state) == {"a", "b"}
    assert two.scratch["s"].tolist() == [0.0, 0.0]
    assert one.scratch["s"].tolist() == [1.0, 1.0]
    assert set(one.state) == {"a"}
    assert not cohort.state
    assert not cohort.scratch


class BranchesInTraining(nn.Module):
    """Cannot be stacked, but only training shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.linear(x / float(x.abs().mean())) if self.training else self.linear(x)


def test_what_only_training_cannot_stack_is_found_in_evaluation_already() -> None:
    model = CohortModel(BranchesInTraining(), CPU)
    cohort = model.cohort((0, 1), (1, 1), with_momentum=False)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="one after another"):
        model.forward(cohort.params, cohort.buffers, x, training=False)
    outputs, _ = model.forward(cohort.params, cohort.buffers, x, training=True)
    assert outputs.shape == (2, 5, 4)


def test_the_first_evaluation_is_an_evaluation() -> None:
    """The trial of the first call runs in training mode; that must not last."""
    model = CohortModel(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)), CPU)
    cohort = model.cohort((0, 1), (1, 1), with_momentum=False)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    first, _ = model.forward(cohort.params, cohort.buffers, x, training=False)
    second, _ = model.forward(cohort.params, cohort.buffers, x, training=False)
    assert torch.equal(first, second)


def silenced() -> nn.Module:
    """A hook of the backward pass keeps everything before the Tanh as it is."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    module[2].register_full_backward_hook(lambda own, inputs, outputs: (0 * inputs[0],))
    return module


class Bag(nn.Module):
    """Pixels as words; word 0 is padding, whose vector is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 6, padding_idx=0), nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x.flatten(1).abs().long().clamp(max=7)).mean(dim=1))


@pytest.mark.parametrize(("factory", "name", "part"), [(silenced, "1.weight", slice(None)), (Bag, "words.weight", 0)])
def test_what_vmap_would_pass_over_is_obeyed(factory: Callable[[], nn.Module], name: str, part: Any) -> None:
    result = pfedlms.run("digits", factory, method="local", rounds=1, clients=3, weight_decay=0.0, seed=2)
    models = [model[name][part] for model in result.models]
    with torch.random.fork_rng():
        torch.manual_seed(rng.stream(2, "initial") % (1 << 63))
        initial = factory().state_dict()[name][part]
    assert all(torch.equal(model, initial) for model in models)


def test_a_first_layer_may_work_in_place() -> None:
    factory = lambda: nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(64, 10))  # noqa: E731 - an argument
    assert pfedlms.run("digits", factory, rounds=2, clients=3).accuracy > 50
