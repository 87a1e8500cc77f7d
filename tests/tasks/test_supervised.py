"""Any model on any data: sources, splits, initialisation, dropout, batch norm, evaluation, and what is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from metamd.tasks import config_hash, starting_at, supervised
from metamd.tasks.base import Shuffle
from metamd.tasks.models import LeNet, ResNet18
from metamd.tasks.sources import divide
from metamd.tasks.supervised import FunctionalModel, hashed_uniform, trained
from tests.helpers import dropout_model, images, labelled, norm_model, plain_model


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(family: Any, seed: int = 0, **config: Any) -> Any:
    return family.build({**family.sample(generator(seed)), **config})


class Pairs(Dataset[Any]):
    """A map-style dataset with an augmentation that draws from the global generator."""

    def __init__(self, inputs: Tensor, targets: Tensor, noise: float = 0.0) -> None:
        self.inputs, self.targets, self.noise = inputs, targets, noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.inputs[i] + self.noise * torch.randn(()), int(self.targets[i])


def test_all_forms_of_one_dataset_give_the_same_task(tmp_path: Path) -> None:
    inputs, targets = labelled(40)
    np.savez(tmp_path / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    np.savez(tmp_path / "other.npz", images=inputs.numpy(), labels=targets.numpy())
    forms = [
        (inputs, targets),
        (inputs.numpy(), targets.numpy()),
        TensorDataset(inputs, targets),
        Pairs(inputs, targets),
        tmp_path / "data.npz",
        str(tmp_path / "other.npz"),
    ]
    batches = []
    for form in forms:
        family = supervised(plain_model, {"mine": form}, batch_size=8)  # type: ignore[dict-item]
        batches.append(draw(family).batch(3))
    for batch in batches:
        assert torch.equal(batch["inputs"], batches[0]["inputs"])
        assert torch.equal(batch["targets"], batches[0]["targets"])


def test_a_dataset_is_read_once_and_the_callers_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    family = supervised(dropout_model, {"mine": Pairs(*labelled(40), noise=1.0)}, batch_size=8)
    task = draw(family)
    task.evaluate(task.init())
    task.loss(task.init(), task.batch(0))
    assert torch.equal(before, torch.get_rng_state())


def test_datasets_that_are_held_out_are_on_the_other_side_alone() -> None:
    data = {name: labelled(40) for name in ("a", "b", "c")}
    family = supervised(plain_model, data, batch_size=8, hold_out="b")
    whole = supervised(plain_model, data, batch_size=8)
    other = family.held_out()
    assert (family.domains, other.domains) == (("a", "c"), ("b",))
    assert {family.sample(generator(i))["dataset"] for i in range(20)} == {"a", "c"}
    assert set(family.describe()["datasets"]) == {"a", "c"}
    assert set(other.describe()["datasets"]) == {"b"}
    assert family.describe()["hold_out"] == ["b"]
    assert "hold_out" not in whole.describe(), "records of families that hold out nothing stay as they are"
    assert torch.equal(draw(other).batch(0)["inputs"], draw(whole, dataset="b").batch(0)["inputs"])
    with pytest.raises(ValueError, match="asks for the dataset 'b'; this family has a, c"):
        draw(family, dataset="b")
    with pytest.raises(ValueError, match="supervised holds out no dataset"):
        whole.held_out()
    with pytest.raises(ValueError, match="hold_out must name datasets, got 'd'"):
        supervised(plain_model, data, batch_size=8, hold_out=["a", "d"])
    with pytest.raises(ValueError, match="hold_out names every dataset"):
        supervised(plain_model, data, batch_size=8, hold_out=list(data))


def rows(part: Tensor) -> set[bytes]:
    return {x.numpy().tobytes() for x in part}


def overlap(splits: Any) -> int:
    sets = [rows(inputs) for inputs, _ in splits.values()]
    return sum(len(a & b) for i, a in enumerate(sets) for b in sets[:i])


def test_splits_are_disjoint_complete_and_fixed_by_their_seed() -> None:
    inputs, targets = labelled(50)
    one, again, other = (
        supervised(plain_model, {"mine": (inputs, targets)}, batch_size=8, split_seed=s).data["mine"]  # type: ignore[attr-defined]
        for s in (0, 0, 1)
    )
    assert [len(x) for x, _ in one.values()] == [40, 5, 5]
    assert overlap(one) == 0
    assert set().union(*(rows(x) for x, _ in one.values())) == rows(inputs)
    assert all(torch.equal(one[s][0], again[s][0]) for s in one)
    assert rows(one["test"][0]) != rows(other["test"][0])
    assert overlap({"train": (inputs, targets), "test": (inputs[:3], targets[:3])}) == 3  # the count does notice


def test_given_splits_are_kept() -> None:
    family = supervised(plain_model, {"mine": {"train": labelled(30), "test": labelled(7, 1)}}, batch_size=8)
    task = draw(family)
    assert len(task.splits["train"][0]) == 30
    assert task.evaluate(task.init(), "test").accuracy in {i / 7 for i in range(8)}
    with pytest.raises(ValueError, match="splits train, test, got 'validation'"):
        task.evaluate(task.init(), "validation")


@pytest.mark.parametrize(("examples", "batch_size"), [(10, 10), (10, 3), (7, 1), (8, 4)])
def test_an_epoch_shows_no_example_twice(examples: int, batch_size: int) -> None:
    shuffle, per_epoch = Shuffle(examples, batch_size, 0), examples // batch_size
    epochs = [torch.cat([shuffle.indices(e * per_epoch + i) for i in range(per_epoch)]) for e in range(3)]
    assert all(len(set(e.tolist())) == per_epoch * batch_size for e in epochs)
    assert examples < 7 or not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("examples", [1, 2, 3, 9, 10, 101])
def test_divisions_are_partitions(examples: int) -> None:
    parts = divide(examples, (0.8, 0.1, 0.1), seed=3)
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(examples))
    assert len(parts["train"])


def test_initialisations_are_those_of_make_model_and_new_for_every_task() -> None:
    family = images(plain_model)
    config = family.sample(generator())
    with torch.random.fork_rng():
        torch.manual_seed(config["init_seed"])
        expected = dict(plain_model().named_parameters())
    start = family.build(config).init()
    assert all(torch.equal(start[n], p) for n, p in expected.items())
    assert not torch.equal(draw(family, 1).init()["1.weight"], start["1.weight"])


def test_a_shared_start_is_shared() -> None:
    start = {n: torch.full_like(p, 0.1) for n, p in plain_model().named_parameters()}
    family = starting_at(images(plain_model), start)
    for seed in range(3):
        assert all(torch.equal(x, start[n]) for n, x in draw(family, seed).init().items())
    assert family.describe()["start"] == "shared"


def test_both_datasets_are_drawn() -> None:
    family = images(plain_model)
    assert {family.sample(generator(s))["dataset"] for s in range(20)} == {"a", "b"}


def test_frozen_parameters_are_not_trained() -> None:
    def tuned() -> nn.Module:
        model = plain_model()
        model[1].requires_grad_(False)  # type: ignore[index]
        return model

    family = images(tuned)
    task = draw(family)
    assert set(task.init()) == {"3.weight", "3.bias"}
    assert set(grad(task.loss)(task.init(), task.batch(0))) == {"3.weight", "3.bias"}
    assert not family.shared_loss  # every task froze weights of its own
    assert task.evaluate(task.init()).loss > 0


# Dropout


def keep_rate(p: float, seed: int, size: int = 200_000) -> Tensor:
    return hashed_uniform(torch.tensor(seed, dtype=torch.int32), (size,), torch.device("cpu")) >= p


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_hashed_masks_look_random(seed: int) -> None:
    # 200,000 numbers, fixed seeds: each bound is five standard errors.
    u = hashed_uniform(torch.tensor(seed, dtype=torch.int32), (200_000,), torch.device("cpu"))
    v = hashed_uniform(torch.tensor(seed ^ 1, dtype=torch.int32), (200_000,), torch.device("cpu"))
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 19 + 5 * (2 * 19) ** 0.5
    for other in (v, u.roll(1), u.roll(64), u.roll(1000)):
        assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < 5 / 200_000**0.5
    assert keep_rate(0.3, seed).float().mean() == pytest.approx(0.7, abs=5 * (0.21 / 200_000) ** 0.5)


def ones_through(model: nn.Module, step: int, shape: tuple[int, ...]) -> Tensor:
    """The outputs at one step for inputs of ones: the mask, scaled."""

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.detach())
        return outputs.mean()

    seen: list[Tensor] = []
    family = supervised(
        lambda: model_with_scale(model), {"a": (torch.ones(20, *shape), torch.zeros(20))}, loss_fn, batch_size=10
    )
    task = draw(family)
    task.loss(task.init(), task.batch(step))
    return seen[-1]


def model_with_scale(model: nn.Module) -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(())), model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.scale * x)

    return Scaled()


def test_dropout_keeps_the_mean_and_changes_with_the_step_alone() -> None:
    one = ones_through(nn.Dropout(0.25), 3, (1000,))
    assert one.unique().tolist() == pytest.approx([0, 4 / 3])
    assert one.mean() == pytest.approx(1, abs=5 * (1 / 3 / 10_000) ** 0.5)
    assert torch.equal(one, ones_through(nn.Dropout(0.25), 3, (1000,)))
    assert not torch.equal(one, ones_through(nn.Dropout(0.25), 4, (1000,)))


def test_spatial_dropout_drops_whole_channels_and_two_layers_have_two_masks() -> None:
    maps = ones_through(nn.Dropout2d(0.5), 0, (50, 4, 4))
    assert torch.equal(maps.amax((2, 3)), maps.amin((2, 3)))
    assert 0.3 < float((maps > 0).float().mean()) < 0.7
    twice = ones_through(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 0, (1000,))
    assert float((twice > 0).float().mean()) == pytest.approx(0.25, abs=0.03)  # one mask twice would keep a half


def test_dropout_is_off_in_evaluation() -> None:
    task = draw(images(dropout_model))
    params = task.init()
    assert "seed" in task.batch(0)
    assert task.evaluate(params) == task.evaluate(params)
    assert "seed" not in draw(images(norm_model)).batch(0)


# Batch norm


def test_inside_the_loop_batch_norm_uses_the_batch_and_changes_nothing() -> None:
    task = draw(images(norm_model))
    params, batch = task.init(), task.batch(2)
    model = norm_model()
    model.load_state_dict(params, strict=False)
    expected = F.cross_entropy(model(batch["inputs"]), batch["targets"])
    assert torch.allclose(task.loss(params, batch), expected)
    assert not list(task.model.buffers())


def test_evaluation_uses_the_statistics_of_the_whole_training_split() -> None:
    task = draw(images(norm_model))
    params = {n: x + 0.3 * torch.randn(x.shape, generator=generator()) for n, x in task.init().items()}
    model = norm_model().eval()
    model.load_state_dict(params, strict=False)
    model.requires_grad_(False)
    conv, norm = model[0], model[1]  # type: ignore[index]
    maps = conv(task.splits["train"][0]).transpose(0, 1).flatten(1)
    norm.running_mean, norm.running_var = maps.mean(1), maps.var(1)
    inputs, targets = task.splits["test"]
    outputs = model(inputs)
    found = task.evaluate(params)
    assert found.loss == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-5)
    assert found.accuracy == float((outputs.argmax(1) == targets).double().mean())
    norm.reset_running_stats()  # what evaluation without calibration would use
    assert found.loss != pytest.approx(float(F.cross_entropy(model(inputs), targets)), rel=1e-3)


def test_evaluation_forgets_statistics_that_came_with_the_model() -> None:
    def stale() -> nn.Module:
        model = norm_model()
        model[1].running_mean.fill_(9.0)  # type: ignore[index, union-attr, operator]
        model[1].num_batches_tracked.fill_(5)  # type: ignore[index, union-attr, operator]
        return model

    clean, used = draw(images(norm_model)), draw(images(stale))
    assert used.evaluate(clean.init()) == clean.evaluate(clean.init())


def test_evaluation_of_many_examples_is_their_mean() -> None:
    inputs, targets = labelled(2501)
    task = draw(supervised(plain_model, {"a": {"train": (inputs, targets)}}, batch_size=8))
    model = plain_model().requires_grad_(False)
    model.load_state_dict(task.init())
    outputs, found = model(inputs), task.evaluate(task.init(), "train")
    assert found.loss == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-6)
    assert found.accuracy == int((outputs.argmax(1) == targets).sum()) / 2501


def test_norms_that_make_model_froze_stay_frozen() -> None:
    def frozen() -> nn.Module:
        model = norm_model()
        model[1].eval()  # type: ignore[index]
        return model

    task = draw(images(frozen))
    assert task.model[1].running_mean is not None
    params, batch = task.init(), task.batch(0)
    alone = {k: v[:1] for k, v in batch.items()}
    per_example = [task.loss(params, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(8)]
    assert torch.allclose(torch.stack(per_example).mean(), task.loss(params, batch))
    assert torch.isfinite(task.loss(params, alone))


@pytest.mark.parametrize("make", [LeNet, lambda: ResNet18(1, width=8), lambda: ResNet18(1, width=8, norm="group")])
def test_the_papers_models_run(make: Callable[[], nn.Module]) -> None:
    data = labelled(30, shape=(1, 28, 28))
    task = draw(supervised(make, {"mine": data}, batch_size=4))
    slopes = vmap(grad(task.loss), in_dims=(None, 0))(task.init(), {k: v[None] for k, v in task.batch(0).items()})
    assert all(bool(torch.isfinite(g).all()) for g in slopes.values())
    assert 0 <= task.evaluate(task.init()).accuracy <= 1


# Regression, tokens, accuracy


def test_regression_has_no_accuracy_and_follows_the_models_dtype() -> None:
    g = generator()
    data = torch.randn(40, 3, generator=g, dtype=torch.float64), torch.randn(40, 1, generator=g, dtype=torch.float64)
    for loss_fn in (F.mse_loss, nn.MSELoss()):
        task = draw(supervised(lambda: nn.Linear(3, 1), {"mine": data}, loss_fn, batch_size=8))
        assert task.batch(0)["inputs"].dtype == torch.float32
        assert task.evaluate(task.init()).accuracy is None
        model = nn.Linear(3, 1)
        model.load_state_dict(task.init())
        expected = F.mse_loss(model(task.batch(0)["inputs"]), task.batch(0)["targets"])
        assert torch.allclose(task.loss(task.init(), task.batch(0)), expected)


def test_sequences_of_tokens_have_an_accuracy_per_token() -> None:
    tokens = torch.randint(5, (30, 7), generator=generator())

    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x)).transpose(1, 2)

    task = draw(supervised(Next, {"text": (tokens, tokens)}, batch_size=8))
    params = task.init()
    for t in range(100):
        slope = grad(task.loss)(params, task.batch(t))
        params = {n: x - 1.0 * slope[n] for n, x in params.items()}
    assert task.evaluate(params).accuracy == 1.0


def test_descriptions_tell_other_data_apart() -> None:
    one, two = (supervised(plain_model, {"mine": labelled(40, s)}, batch_size=8) for s in (0, 1))
    assert one.describe()["datasets"]["mine"]["hash"] != two.describe()["datasets"]["mine"]["hash"]
    assert config_hash(one.describe()) == config_hash(
        supervised(plain_model, {"mine": labelled(40)}, batch_size=8).describe()
    )


# Bad input


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(3)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(36, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x.flatten(1))


class Words(Pairs):
    def __getitem__(self, i: int) -> Any:
        return "word", 0


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(3), 0


DATA = {"a": labelled(40)}
SHARED = plain_model()
OWN = torch.Generator().manual_seed(0)


def own_generator() -> nn.Module:
    model = plain_model()
    nn.init.normal_(model[1].weight, generator=OWN)  # type: ignore[index, arg-type]
    return model


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((plain_model, {}), "at least one dataset, got none"),
        ((plain_model, [labelled(40)]), "must map names to data, got list"),
        ((plain_model, {"a": labelled(40), "b": labelled(40, shape=(1, 5, 5))}), r"one kind: 'a' has inputs \(1, 6, 6\)"),
        ((plain_model, {"a": ([1, 2], [0, 1])}), "must hold tensors, got list"),
        ((plain_model, {"a": 7}), "got int"),
        ((plain_model, {"a": (torch.zeros(4, 36), torch.zeros(3))}), "4 inputs and 3 targets"),
        ((plain_model, {"a": (torch.zeros(0, 36), torch.zeros(0))}), "must have examples, got none"),
        ((plain_model, {"a": (torch.zeros(4, 36),)}), "two parts, inputs and targets, got 1"),
        ((plain_model, {"a": "nowhere.npz"}), "existing .npz file, got nowhere.npz"),
        ((plain_model, {"a": {"test": labelled(40)}}), "must be 'train' and"),
        ((plain_model, {"a": Endless()}), "must have a length"),
        ((plain_model, {"a": Words(*labelled(4))}), "must be an .input, target. pair of tensors"),
        ((plain_model(), DATA), "got a model. Pass lambda"),
        ((lambda: SHARED, DATA), "the same one twice"),
        ((lambda: 3, DATA), "must return a torch.nn.Module, got int"),
        ((nn.Flatten, DATA), "parameters that require a gradient, got none"),
        ((own_generator, DATA), "draw from torch's global generator alone"),
        ((lambda: nn.Linear(5, 3), DATA), "must run on a batch of dataset 'a'"),
        ((lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), DATA), "has the label 2. Make a model with 3 outputs"),
        ((lambda: nn.Sequential(nn.Flatten(), Noisy(36, 3)), DATA), "draws random numbers"),
        ((Counting, DATA), "changes its buffers"),
        ((plain_model, DATA, lambda outputs, targets: outputs), r"without dimensions, got \(4, 3\)"),
    ],
)
def test_bad_input_is_a_sentence(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        supervised(*arguments, batch_size=8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 33}, "between 1 and the 32 training examples of 'a', got 33"),
        ({"batch_size": 0}, "got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"shares": (0.5, 0.1, 0.1)}, "sum to 1"),
    ],
)
def test_bad_options_are_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        supervised(plain_model, DATA, **{"batch_size": 8, **options})


def test_evaluating_other_parameters_is_a_sentence() -> None:
    task = draw(images(plain_model))
    params = task.init()
    params["3.wieght"] = params.pop("3.weight")
    with pytest.raises(ValueError, match=r"3\.weight, 3\.wieght"):
        task.evaluate(params)


def test_random_attention_is_refused_and_quiet_attention_runs() -> None:
    class Attention(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(6, 2, 8, dropout=dropout, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x[:, 0]).mean(1)

    data = {"a": labelled(20)}
    with pytest.raises(ValueError, match="dropout inside attention"):
        supervised(lambda: Attention(0.1), data, batch_size=4)
    task = draw(supervised(lambda: Attention(0.0), data, batch_size=4))
    assert torch.isfinite(task.loss(task.init(), task.batch(0)))


def test_an_unknown_dataset_in_a_config_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="asks for the dataset 'c'; this family has a, b"):
        draw(images(plain_model), dataset="c")


def test_an_npz_file_of_other_arrays_is_a_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", one=np.zeros(3))
    with pytest.raises(ValueError, match=r"'inputs' and 'targets', got \['one'\]"):
        supervised(plain_model, {"a": tmp_path / "odd.npz"})


# a model as a function of its parameters


class Shared(nn.Module):
    """One weight under two names, a frozen one, and a recurrent layer that keeps lists of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.memory = nn.GRU(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.memory(self.second(self.frozen(self.first(x))))[0]


def agrees(call: Callable[..., Tensor], model: nn.Module) -> bool:
    """Outputs and gradients are those of torch's functional_call, and the model is left as it was."""
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    params = {n: torch.randn_like(p).requires_grad_() for n, p in trained(model).items()}
    x = torch.randn(5, 4)
    found, expected = call(params, x), functional_call(model, params, (x,))
    slopes = [torch.autograd.grad(y.square().sum(), list(params.values())) for y in (found, expected)]
    same = all(torch.allclose(a, b) for a, b in zip(*slopes, strict=True))
    left = all(torch.equal(p, own[n]) and isinstance(p, nn.Parameter) for n, p in model.named_parameters())
    return torch.allclose(found, expected) and same and left


class OneNameOnly(FunctionalModel):
    """Forgets that a weight can be in two places."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._places = list({name: (where, leaf, name) for where, leaf, name in self._places}.values())


def test_a_model_is_called_as_torch_calls_it() -> None:
    torch.manual_seed(0)
    model = Shared()
    assert agrees(FunctionalModel(model), model)
    assert not agrees(OneNameOnly(model), model)


def test_a_call_that_fails_leaves_the_model_as_it_was() -> None:
    model = nn.Linear(4, 2)
    own = dict(model.named_parameters())
    with pytest.raises(RuntimeError):
        FunctionalModel(model)({n: p.detach() for n, p in own.items()}, torch.randn(5, 3))
    with pytest.raises(KeyError):
        FunctionalModel(model)({"weight": own["weight"].detach()}, torch.randn(5, 4))
    assert all(p is own[n] for n, p in model.named_parameters())


@pytest.mark.parametrize("targets", [torch.rand(20, 1), torch.rand(20), torch.rand(20, 3), -torch.ones(20, 3) / 3])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_numbers_are_no_classes(targets: Tensor, loss_fn: Any) -> None:
    """Cross entropy of one output is zero, whatever the numbers are: a training that does nothing."""
    outputs = targets.shape[1] if targets.dim() > 1 else 1
    model = partial(nn.Linear, 4, outputs)
    assert outputs > 1 or float(F.cross_entropy(model()(torch.rand(20, 4)), torch.rand(20, 1)).detach()) == 0
    with pytest.raises(
        ValueError, match=r"The loss is cross entropy, whose targets are classes.*For regression, pass loss_fn"
    ):
        supervised(model, {"mine": (torch.rand(20, 4), targets)}, loss_fn, batch_size=5)
    supervised(model, {"mine": (torch.rand(20, 4), targets.reshape(20, -1))}, F.mse_loss, batch_size=5)


def test_probabilities_are_targets_of_cross_entropy() -> None:
    targets = torch.rand(20, 3).softmax(1)
    assert supervised(partial(nn.Linear, 4, 3), {"mine": (torch.rand(20, 4), targets)}, batch_size=5).steps == 500
