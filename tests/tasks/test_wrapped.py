"""Tasks that begin at one given model."""

import pickle

import pytest
import safetensors.torch
import torch
from torch import nn

from metamd import Diagonal, meta_train, tasks
from metamd.cli.main import main
from metamd.inner.run import run_inner
from metamd.inner.together import run_many
from metamd.learning.meta import refinement
from metamd.tasks import vision
from metamd.tasks.base import config_hash
from metamd.tasks.vision import leave_one_out
from metamd.tasks.wrapped import Counted, NearestStart, read_parameters, starting_at
from tests.loopback import needs_data


def point(value=1.0):
    return {"theta": torch.tensor([value, -value], dtype=torch.float64)}


def drawn(family, seed=0):
    return family.build(family.sample(torch.Generator().manual_seed(seed)))


def test_every_task_begins_at_the_start_and_is_otherwise_the_same():
    plain, shared = tasks.quadratic(), starting_at(tasks.quadratic(), point())
    for seed in range(3):
        old, new = drawn(plain, seed), drawn(shared, seed)
        assert torch.equal(new.init()["theta"], point()["theta"])
        assert old.config == new.config
        assert torch.equal(old.loss(point(2.0), old.batch(0)), new.loss(point(2.0), new.batch(0)))
    assert not torch.equal(old.init()["theta"], new.init()["theta"])


def test_a_run_that_moves_its_start_leaves_it_to_the_others():
    task = drawn(starting_at(tasks.quadratic(), point()))
    task.init()["theta"].zero_()
    assert torch.equal(task.init()["theta"], point()["theta"])


def test_shared_starts_run_together_and_alone_alike():
    family = starting_at(tasks.quadratic(steps=20), point())
    built = [drawn(family, s) for s in range(3)]
    potential = Diagonal().bind(family.example())
    many = run_many(built, potential, lr=0.01)
    for task, run in zip(built, many, strict=True):
        torch.testing.assert_close(run.end["theta"], run_inner(task, potential, lr=0.01).end["theta"])


def test_meta_training_from_a_shared_start_differs_and_says_so():
    learned = meta_train(starting_at(tasks.quadratic(), point()), Diagonal(), outer_steps=2, tasks_per_step=2)
    assert learned.header.family["start"] == "shared"
    fresh = meta_train(tasks.quadratic(), Diagonal(), outer_steps=2, tasks_per_step=2)
    assert not torch.equal(learned.potential.log_d["theta"], fresh.potential.log_d["theta"])


def test_the_hash_in_the_description_is_of_the_start():
    first, again, other = (starting_at(tasks.quadratic(), point(v)).describe()["start_hash"] for v in (1.0, 1.0, 2.0))
    assert first == again != other


def test_a_family_that_wraps_another_keeps_what_counts_in_it():
    for family in (tasks.quadratic(), tasks.rosenbrock()):
        plain = family.example()
        wrapped = (starting_at(family, plain), Counted(family), Counted(starting_at(family, plain)))
        assert all(w.counts_digits == family.counts_digits for w in wrapped)
        assert all((refinement(w) is None) == (refinement(family) is None) for w in wrapped)
        assert Counted(family).drawn() == family.drawn()


def test_a_shared_task_pickles():
    task = pickle.loads(pickle.dumps(drawn(starting_at(tasks.quadratic(), point()))))
    assert torch.equal(task.init()["theta"], point()["theta"])


def test_a_task_begins_at_the_nearest_solution_that_is_not_its_own():
    family = tasks.quadratic()
    configs = [family.sample(torch.Generator().manual_seed(seed)) for seed in range(4)]
    places = {config_hash(config): place for config, place in zip(configs, (0.0, 1.0, 3.0, 1.8), strict=True)}

    def distance(one, other):
        return abs(places[config_hash(one)] - places[config_hash(other)])

    known = [(config, point(float(i))) for i, config in enumerate(configs[:3])]
    calls = []

    def found():
        calls.append(1)
        return known

    warm = NearestStart(family, found, distance)
    for config, nearest in zip(configs, (1, 0, 1, 1), strict=True):
        task = warm.build(config)
        task.init()["theta"].zero_()  # a run moves its own copy
        assert torch.equal(task.init()["theta"], point(float(nearest))["theta"])
        assert torch.equal(task.loss(point(2.0), task.batch(0)), family.build(config).loss(point(2.0), task.batch(0)))
    assert len(calls) == 1
    assert warm.describe()["start"] == "nearest solution"
    with pytest.raises(ValueError, match="Solve two at least"):
        NearestStart(family, lambda: known[:1], distance).build(configs[0])


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("kind", ["bare", "model", "state_dict", "ddp", "safetensors"])
def test_checkpoints_of_every_kind_are_read(tmp_path, kind):
    state = model().state_dict()
    if kind == "safetensors":
        path = tmp_path / "start.safetensors"
        safetensors.torch.save_file(state, path)
    else:
        path = tmp_path / "start.pt"
        prefixed = {f"module.{n}": x for n, x in state.items()}
        torch.save({"bare": state, "ddp": prefixed}.get(kind, {kind: state, "epoch": 3}), path)
    family = tasks.supervised(model, {"a": (torch.randn(40, 4), torch.arange(40) % 3)}, batch_size=10, steps=5)
    start = drawn(starting_at(family, path)).init()
    assert start.keys() == state.keys()
    assert all(torch.equal(start[n], state[n]) for n in state)


def test_bad_starts_are_refused_with_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"'theta' should be \(2,\) and is \(3,\)"):
        starting_at(tasks.quadratic(), {"theta": torch.zeros(3)})
    with pytest.raises(ValueError, match="and is missing"):
        starting_at(tasks.quadratic(), {})
    with pytest.raises(ValueError, match="start must be finite"):
        starting_at(tasks.quadratic(), {"theta": torch.tensor([torch.nan, 0.0])})
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        starting_at(tasks.quadratic(), tmp_path / "absent.pt")
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="could not be read as a checkpoint"):
        starting_at(tasks.quadratic(), broken)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="must hold parameters by name"):
        starting_at(tasks.quadratic(), tmp_path / "list.pt")
    with pytest.raises(ValueError, match="has no held-out side"):
        starting_at(tasks.quadratic(), point()).held_out()
    with pytest.raises(TypeError, match="needs a family of image domains"):
        list(leave_one_out(starting_at(tasks.quadratic(), point())))


def test_a_checkpoint_that_would_execute_something_is_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"theta": Hostile()}, tmp_path / "hostile.pt")
    with pytest.raises(ValueError, match="could not be read"):
        read_parameters(tmp_path / "hostile.pt")


def test_the_command_line_takes_a_start(tmp_path, capsys):
    torch.save(point(0.5), tmp_path / "start.pt")
    where = ["--start", str(tmp_path / "start.pt"), "--out", str(tmp_path / "q.safetensors")]
    with pytest.raises(SystemExit) as stop:
        main(["train", "quadratic", "--outer-steps", "1", "--tasks", "2", "--json", *where])
    assert stop.value.code == 0
    assert '"start": "shared"' in capsys.readouterr().out


@pytest.mark.real_data
@needs_data
def test_adapting_rotated_mnist_begins_at_a_model_that_knows_another_angle():
    family = tasks.adapt_rotated_mnist(
        angles=(0, 45, 90), hold_out=0, images=200, steps=3, pretraining_steps=60, pretrained_at=45
    )
    held = family.held_out()
    start = drawn(family).init()
    assert all(torch.equal(start[n], x) for n, x in drawn(held).init().items())
    config = {"family": family.name, "init_seed": 1, "batch_seed": 2}
    at = {a: family.family._side(a, held=True).build({**config, "domain": a}) for a in ("45", "90")}
    assert at["45"].evaluate(start).accuracy > 0.7 > at["90"].evaluate(start).accuracy
    assert family.describe()["pretrained_at"] == 45
    sides = list(leave_one_out(family))
    assert [s.family.hold_out for s in sides] == ["0", "45", "90"]
    assert all(s.start["first.weight"] is family.start["first.weight"] for s in sides)


@pytest.mark.real_data
@needs_data
def test_no_task_has_an_image_that_the_model_was_pretrained_on(monkeypatch):
    seen = {}
    real = vision.Domain

    def spy(source, rows, *rest):
        if set(rows) == {"train"}:  # the domain that the model is pretrained on has nothing else
            seen["rows"] = set(rows["train"].tolist())
        return real(source, rows, *rest)

    monkeypatch.setattr(vision, "Domain", spy)
    family = tasks.adapt_rotated_mnist(angles=(0, 90), images=300, steps=3, pretraining_steps=1)
    assert not seen, "the model was trained before it was needed"
    assert family.start.keys() == family.example().keys()
    rows = family.family.collection.domain("90").rows
    assert not seen["rows"] & set(rows["train"].tolist())
    assert not seen["rows"] & set(rows["validation"].tolist())
    assert len(seen["rows"]) + 300 + len(rows["validation"]) == 60_000


def test_adaptation_refuses_to_take_all_images():
    with pytest.raises(ValueError, match="so that some are left to pretrain on; got None"):
        tasks.adapt_rotated_mnist(images=None)
