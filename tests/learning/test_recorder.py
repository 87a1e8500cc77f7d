import copy
import io
import math

import pytest
import torch
from torch import nn

import metamd
from metamd import Diagonal, MetaMD
from metamd.potentials.tying import stored_shape, tied_shape
from tests.helpers import equal_parameters, random_geometry, small_model, train

STEPS = 20


class Recorder(metamd.Recorder):
    """Records the squares of all coordinates, unless a tying is given; products of weights have a file of their own."""

    def __init__(self, optimiser, *, tying="parameter", **options):
        super().__init__(optimiser, tying=tying, **options)


OPTIMISERS = {
    "SGD": lambda model: torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda model: torch.optim.Adam(model.named_parameters(), lr=0.01),
    "MetaMD": lambda model: MetaMD(model.named_parameters(), Diagonal(), lr=0.05),
    "MetaMD, 3 pieces": lambda model: MetaMD(model.named_parameters(), random_geometry(model), lr=0.05),
    "no foreach, maximize": lambda model: torch.optim.SGD(model.named_parameters(), lr=1e-3, maximize=True, foreach=False),
}


def batch(t, dtype=torch.float64):
    g = torch.Generator().manual_seed(t)
    x = torch.randn(8, 5, generator=g, dtype=torch.float64).to(dtype)
    return x, torch.stack([x[:, 0], x[:, 1] * x[:, 2], x[:, 3].sin()], 1)


def gradients(model, t, scale=1.0):
    x, y = batch(t, next(model.parameters()).dtype)
    model.zero_grad()
    loss = (model(x) - y).square().mean()
    (scale * loss).backward()
    return loss


def by_hand(model, optimiser, steps=STEPS, seen=None):
    """Train, and add up squares with plain loops; `seen` changes the gradients before the step, as clipping does."""
    sums = {n: torch.zeros(1, *p.shape, dtype=p.dtype) for n, p in model.named_parameters()}
    rms = {}
    for t in range(steps):
        gradients(model, t)
        if seen:
            seen(model)
        for n, p in model.named_parameters():
            if p.grad is not None:
                sums[n][0] += p.grad * p.grad
                rms.setdefault(n, float((p.grad**2).mean().sqrt()))
        optimiser.step()
    return sums, rms


def close(a, b, tolerance=1e-12):
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=tolerance, atol=0) for n in a)


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
def test_sums_start_end_and_first_gradients_are_those_of_a_plain_loop(make):
    model = small_model(dtype=torch.float64)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimiser = make(model)
    recorder = Recorder(optimiser, batch_size=8, name="one")
    sums, rms = by_hand(model, optimiser)
    run = recorder.finish()
    assert close(run.squares, sums)
    assert close(run.start, before, 0)
    assert close(run.end, dict(model.named_parameters()), 0)
    assert run.gradient_rms == pytest.approx(rms, rel=1e-12)
    assert (run.steps, run.batch_size, run.name, run.optimiser) == (STEPS, 8, "one", type(optimiser).__name__)
    assert not close(run.squares, {n: 1.01 * s for n, s in sums.items()}), "the comparison must be able to fail"


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
def test_training_is_not_changed_and_the_optimiser_is_left_as_it_was(make):
    plain, watched = small_model(), small_model()
    one, two = make(plain), make(watched)
    hooks = len(two._optimizer_step_pre_hooks), len(two._optimizer_step_post_hooks)
    recorder = Recorder(two)
    assert train(plain, one, 10) == train(watched, two, 10)
    assert equal_parameters(plain, watched)
    recorder.detach()
    recorder.detach()
    assert hooks == (len(two._optimizer_step_pre_hooks), len(two._optimizer_step_post_hooks))
    train(watched, two, 3)
    assert recorder.steps == 10


@pytest.mark.parametrize("tying", ["channel", "column", "tensor", "role"])
def test_a_tied_record_is_the_full_one_added_up(tying):
    model = small_model(dtype=torch.float64)
    optimiser = torch.optim.Adam(model.named_parameters(), lr=0.01)
    full, tied = Recorder(optimiser), Recorder(optimiser, tying=tying)
    by_hand(model, optimiser)
    full, tied = full.finish(), tied.finish()
    for n, p in model.named_parameters():
        shape = tuple(p.shape)
        assert tied.squares[n].shape == (1, *stored_shape(tying, shape))
        summed = full.squares[n].sum_to_size(1, *tied_shape(tying, shape)).reshape(tied.squares[n].shape)
        assert torch.allclose(tied.squares[n], summed, rtol=1e-12)
    assert close(full.tied_squares(tying), tied.tied_squares(tied.tying))
    with pytest.raises(ValueError, match=f"recorded with the tying '{tying}', from which 'parameter' cannot be computed"):
        tied.tied_squares("parameter")


# what people do between backward and step


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class BeforeClipping(Recorder):
    """Broken: takes what backward left, before anybody else touched it."""

    def _before(self, optimiser, args, kwargs):
        for p in self._params.values():
            if not hasattr(p, "_seen"):
                p._seen = {}
                p.register_post_accumulate_grad_hook(lambda q: q._seen.update(grad=q.grad.clone()))
        result = super()._before(optimiser, args, kwargs)
        self._pending = {n: p._seen["grad"] ** 2 for n, p in self._params.items() if p._seen} or self._pending
        return result


class AfterTheStep(Recorder):
    """Broken: looks at the gradients after the optimiser had them."""

    def _after(self, optimiser, args, kwargs):
        self._stage()
        super()._after(optimiser, args, kwargs)


class CountsRefused(Recorder):
    """Broken: counts a step when it begins."""

    def _before(self, optimiser, args, kwargs):
        result = super()._before(optimiser, args, kwargs)
        super()._after(optimiser, args, kwargs)
        return result


class IgnoresScaler(Recorder):
    """Broken: knows nothing of optimisers that unscale and skip by themselves."""

    def _stage(self):
        held = {k: self.optimiser.__dict__.pop(k) for k in ("grad_scale", "found_inf") if k in self.optimiser.__dict__}
        super()._stage()
        self.optimiser.__dict__.update(held)


def records_what_was_clipped(kind):
    model = small_model(dtype=torch.float64)
    optimiser = torch.optim.SGD(model.named_parameters(), lr=0.1)
    recorder = kind(optimiser)
    return close(by_hand(model, optimiser, seen=clip)[0], recorder.finish().squares)


class Untidy(torch.optim.SGD):
    """An optimiser that spoils the gradients it was given, as some do."""

    def step(self, closure=None):
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(10)
        return result


def records_what_the_optimiser_was_given(kind):
    model = small_model(dtype=torch.float64)
    optimiser = Untidy(model.named_parameters(), lr=0.1)
    recorder = kind(optimiser)
    return close(by_hand(model, optimiser)[0], recorder.finish().squares)


def leaves_out_refused_steps(kind):
    model = small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), Diagonal(), lr=0.05)
    recorder = kind(optimiser)
    for t in range(6):
        gradients(model, t, scale=math.inf if t == 3 else 1.0)
        try:
            optimiser.step()
        except RuntimeError:
            assert t == 3
    run = recorder.finish()
    return run.steps == 5 and not run.diverged


def scaled(kind, fused, *, unscale_first=False, **options):
    """Mixed precision's loop on the CPU: scaled losses, and one overflow at step 3."""
    model = small_model()
    optimiser = torch.optim.Adam(model.named_parameters(), lr=0.01, fused=fused)
    recorder = kind(optimiser, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for t in range(6):
        x, y = batch(t, torch.float32)
        loss = (model(x) - y).square().mean()
        model.zero_grad()
        scaler.scale(loss * (math.inf if t == 3 else 1.0)).backward()
        scale = scaler.get_scale()
        if t != 3:
            for n, p in model.named_parameters():
                sums[n] += (p.grad / scale) ** 2
        if unscale_first:
            scaler.unscale_(optimiser)
        scaler.step(optimiser)
        scaler.update()
    run = recorder.finish()
    total = {n: s.sum(0) for n, s in run.tied_squares("parameter").items()}
    return run.steps == 5 and close(total, sums, 1e-5)


LAWS = {
    "clipped": records_what_was_clipped,
    "given": records_what_the_optimiser_was_given,
    "refused": leaves_out_refused_steps,
    "scaler": lambda kind: scaled(kind, fused=False),
    "scaler, unscale_": lambda kind: scaled(kind, fused=False, unscale_first=True),
    "scaler, fused": lambda kind: scaled(kind, fused=True),
    "scaler, fused, unscale_": lambda kind: scaled(kind, fused=True, unscale_first=True),
}
BROKEN = {"clipped": BeforeClipping, "given": AfterTheStep, "refused": CountsRefused, "scaler, fused": IgnoresScaler}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_what_is_recorded_is_what_the_optimiser_used(law):
    assert law(Recorder)


@pytest.mark.parametrize("name", BROKEN)
def test_the_laws_reject_a_broken_recorder(name):
    assert not LAWS[name](BROKEN[name])


def test_a_closure_is_recorded_as_the_same_loop_without_one():
    runs = []
    for how in ("none", "positional", "keyword"):
        model = small_model(dtype=torch.float64)
        optimiser = torch.optim.SGD(model.named_parameters(), lr=0.1)
        recorder = Recorder(optimiser)
        for t in range(7):
            if how == "none":
                gradients(model, t)
                optimiser.step()
            elif how == "positional":
                assert float(optimiser.step(lambda t=t, m=model: gradients(m, t).detach())) > 0
            else:
                optimiser.step(closure=lambda t=t, m=model: gradients(m, t).detach())
        runs.append(recorder.finish())
    assert all(close(run.squares, runs[0].squares, 0) and run.steps == 7 for run in runs)


def test_of_several_evaluations_the_one_at_the_present_point_counts():
    model = small_model(dtype=torch.float64)
    optimiser = torch.optim.LBFGS([p for _, p in model.named_parameters()], lr=0.1, max_iter=5)
    recorder = Recorder(optimiser, named=model.named_parameters())
    first = {}

    def closure():
        loss = gradients(model, 0)
        for n, p in model.named_parameters():
            first.setdefault(n, p.grad.clone() ** 2)
        return loss

    optimiser.step(closure)
    run = recorder.finish()
    assert run.steps == 1
    assert close({n: s.sum(0) for n, s in run.squares.items()}, first)


# parameters


def test_groups_missing_gradients_and_late_parameters():
    model = small_model(dtype=torch.float64)
    first, last = list(model[0].named_parameters()), list(model[2].named_parameters())
    groups = [{"params": [(f"0.{n}", p) for n, p in first], "lr": 0.1}]
    optimiser = torch.optim.SGD(groups, lr=0.01)
    model[0].bias.requires_grad_(False)
    recorder = Recorder(optimiser)
    for t in range(3):
        gradients(model, t)
        optimiser.step()
    model[2].weight.data.add_(1)
    late = model[2].weight.detach().clone()
    optimiser.add_param_group({"params": [(f"2.{n}", p) for n, p in last]})
    gradients(model, 3)
    optimiser.step()
    run = recorder.finish()
    assert list(run.start) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(run.start["2.weight"], late)
    assert torch.equal(run.squares["2.weight"][0], model[2].weight.grad ** 2)
    assert not run.squares["0.bias"].any()
    assert run.gradient_rms["0.bias"] == 0
    assert run.steps == 4


def test_a_step_without_any_gradient_does_not_count():
    model = small_model()
    optimiser = torch.optim.SGD(model.named_parameters(), lr=0.1)
    recorder = Recorder(optimiser)
    optimiser.step()
    assert recorder.steps == 0
    with pytest.raises(ValueError, match="nothing was recorded"):
        recorder.finish()


def test_a_recording_is_finished_once():
    model = small_model()
    optimiser = torch.optim.SGD(model.named_parameters(), lr=0.1)
    recorder = Recorder(optimiser)
    train(model, optimiser, 2)
    assert recorder.finish().steps == 2
    train(model, optimiser, 5)
    with pytest.raises(ValueError, match="finished already"):
        recorder.finish()


def test_names():
    model = small_model()
    plain = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"Adam\(model.named_parameters\(\), ...\), or call Recorder\(optimiser, named="):
        Recorder(plain)
    with pytest.raises(ValueError, match="not all of these have one"):
        Recorder(plain, named=model[0].named_parameters())
    backwards = torch.optim.Adam(list(model.parameters())[::-1])
    recorder = Recorder(backwards, named=model.named_parameters())
    train(model, backwards, 1)
    assert list(recorder.finish().start) == [n for n, _ in model.named_parameters()]


def test_wrapper_prefixes_are_stripped():
    model = small_model()
    wrapped = [(f"module._orig_mod.{n}", p) for n, p in model.named_parameters()]
    optimiser = torch.optim.Adam(wrapped)
    recorder = Recorder(optimiser)
    train(model, optimiser, 1)
    assert list(recorder.finish().start) == [n for n, _ in model.named_parameters()]


def test_bfloat16_is_summed_in_float32():
    model = small_model(dtype=torch.bfloat16)
    optimiser = torch.optim.SGD(model.named_parameters(), lr=0.1)
    recorder = Recorder(optimiser)
    sums = {n: torch.zeros(1, *p.shape) for n, p in model.named_parameters()}
    for t in range(50):
        gradients(model, t)
        for n, p in model.named_parameters():
            sums[n] += p.grad.float() ** 2
        optimiser.step()
    run = recorder.finish()
    assert close(run.squares, sums, 1e-6)
    assert run.start["0.weight"].dtype == torch.bfloat16
    assert metamd.learn([run]).potential.log_d["0.weight"].dtype == torch.float32


def test_what_cannot_be_recorded_is_refused_with_a_sentence():
    table = nn.Embedding(3, 2, sparse=True)
    optimiser = torch.optim.SGD(table.named_parameters(), lr=0.1)
    Recorder(optimiser)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="needs dense gradients, but that of 'weight' is sparse"):
        optimiser.step()
    turned = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="needs whole real tensors, but 'x' is complex"):
        Recorder(torch.optim.SGD([("x", turned)], lr=0.1))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": -1}, "batch_size must be at least 1"),
        ({"tying": "row"}, "tying must be one of parameter, .* got 'row'"),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    optimiser = torch.optim.Adam(small_model().named_parameters())
    with pytest.raises(ValueError, match=sentence):
        Recorder(optimiser, **options)
    assert not optimiser._optimizer_step_pre_hooks


def test_something_that_is_no_optimiser_is_refused():
    with pytest.raises(TypeError, match="needs a torch optimiser, got Linear"):
        Recorder(nn.Linear(2, 2))


# resuming


@pytest.mark.parametrize("tying", ["parameter", "channel"])
def test_a_resumed_record_equals_an_uninterrupted_one(tying):
    def made():
        model = small_model()
        optimiser = torch.optim.Adam(model.named_parameters(), lr=0.01)
        return model, optimiser, Recorder(optimiser, tying=tying)

    model, optimiser, whole = made()
    train(model, optimiser, 17)
    model, optimiser, recorder = made()
    train(model, optimiser, 9)
    states = [copy.deepcopy(x.state_dict()) for x in (model, optimiser)]
    file = io.BytesIO()
    torch.save(recorder.state_dict(), file)
    model, optimiser, recorder = made()
    for thing, state in zip((model, optimiser), states, strict=True):
        thing.load_state_dict(state)
    file.seek(0)
    recorder.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimiser, 8, first=9)
    assert recorder.finish().fingerprint() == whole.finish().fingerprint()


def test_a_state_does_not_change_with_the_run_it_was_taken_from():
    model = small_model()
    optimiser = torch.optim.Adam(model.named_parameters())
    recorder = Recorder(optimiser)
    train(model, optimiser, 3)
    state = recorder.state_dict()
    kept = copy.deepcopy(state)
    train(model, optimiser, 3)
    assert close(state["sums"], kept["sums"], 0)
    assert state["steps"] == 3


def test_a_state_of_an_earlier_version_is_continued():
    """It had the sums of several parts of the run."""
    model = small_model()
    optimiser = torch.optim.Adam(model.named_parameters())
    recorder = Recorder(optimiser)
    train(model, optimiser, 3)
    state = recorder.state_dict()
    parts = {n: torch.stack([x / 4, x / 2, x / 4]) for n, x in state["sums"].items()}
    again = Recorder(optimiser)
    again.load_state_dict({**state, "version": 1, "phases": 3, "planned": None, "width": 1, "sums": parts})
    assert again.finish().fingerprint() == recorder.finish().fingerprint()
    with pytest.raises(ValueError, match="must have a version from 1 to 3, got 4"):
        Recorder(optimiser).load_state_dict({**state, "version": 4})


def test_a_state_of_another_run_is_refused():
    optimiser = torch.optim.Adam(small_model().named_parameters())
    state = Recorder(optimiser, tying="channel").state_dict()
    with pytest.raises(ValueError, match="made with tying = 'channel', but this Recorder has 'parameter'"):
        Recorder(optimiser).load_state_dict(state)
    other = nn.Linear(2, 2)
    theirs = torch.optim.SGD(other.named_parameters(), lr=0.1)
    recorder = Recorder(theirs)
    other(torch.ones(1, 2)).sum().backward()
    theirs.step()
    with pytest.raises(ValueError, match=r"a model with 'weight' of shape \(2, 2\), but this optimiser has '0.weight'"):
        Recorder(optimiser).load_state_dict(recorder.state_dict())
