"""`MetaMD(params, file, steps=N)`: the recommended usage in one call; and `prepare`, its schedule outside."""

import copy
import io
import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import metamd
from metamd import LearnedOptimiser, MetaMD, Online, Usage, load, prepare
from tests.helpers import equal_parameters, random_geometry, small_model, train

STEPS = 12
SCALES = {n: 100.0 for n, _ in small_model().named_parameters()}
USAGES = {
    "momentum": (Usage("learned", 0.9, "linear", 0.7), None),
    "polar, tail": (
        Usage("online", 0.0, "quadratic", 0.7, averaging="tail"),
        Online("polar", 0.9, scale=SCALES, signal=0.9, refresh=3),
    ),
    "average, knots": (Usage("online", 0.5, "learned", knots=(0.5, 1.0, 0.0)), Online("average", scale=SCALES)),
}


def file_of(usage, online=None):
    model = small_model()
    potential = random_geometry(model, pieces=1).bind(list(model.named_parameters()))
    learned = LearnedOptimiser.from_potential(potential)
    said = {"usage": usage.to_dict(), "online": None if online is None else online.to_dict()}
    return replace(learned, header=replace(learned.header, **said))


@pytest.fixture(params=USAGES.values(), ids=USAGES)
def learned(request):
    return file_of(*request.param)


def by_hand(model, learned, steps=STEPS):
    """What the file recommends, spelled out: options of MetaMD, and its lr set before every step."""
    usage = learned.usage
    options = {"metric": usage.metric, "momentum": usage.momentum, "averaging": usage.averaging}
    optimiser = MetaMD(model.named_parameters(), learned, lr=usage.lr, **options)
    for t in range(steps):
        optimiser.param_groups[0]["lr"] = usage.lr * usage.share(t, STEPS)
        train(model, optimiser, 1, first=t)
    return optimiser


def test_one_call_is_what_the_file_recommends_spelled_out(learned):
    model, other = small_model(), small_model()
    optimiser = MetaMD(model.named_parameters(), learned, steps=STEPS)
    train(model, optimiser, STEPS)
    theirs = by_hand(other, learned)
    assert equal_parameters(model, other)
    optimiser.eval()
    theirs.eval()
    assert equal_parameters(model, other)
    plain = small_model()
    train(plain, MetaMD(plain.named_parameters(), learned, metric="learned"), STEPS)
    assert not equal_parameters(model, plain), "without steps nothing is recommended"


def test_a_path_a_name_and_an_object_are_one_and_the_same(learned, tmp_path):
    learned.save(tmp_path / "x.safetensors")
    ends = []
    for given in (learned, tmp_path / "x.safetensors", str(tmp_path / "x.safetensors")):
        for options in ({"metric": "learned"}, {"steps": STEPS}):
            model = small_model()
            train(model, MetaMD(model.named_parameters(), given, **options), 5)
            ends.append(model)
    assert all(equal_parameters(ends[0], m) for m in ends[2::2])
    assert all(equal_parameters(ends[1], m) for m in ends[3::2])
    assert not equal_parameters(ends[0], ends[1])


@pytest.mark.parametrize("options", [{}, {"steps": 10}])
def test_a_shipped_name_is_enough(options):
    ends = []
    for given in ("quadratic", load("quadratic")):
        x = torch.nn.Parameter(torch.tensor([3.0, 3.0]))
        optimiser = MetaMD([("theta", x)], given, **options)
        for _ in range(10):
            optimiser.zero_grad()
            (x * torch.tensor([1.0, 10.0]) * x).sum().backward()
            optimiser.step()
        ends.append(x.detach().clone())
    assert torch.equal(*ends)


def test_prepare_takes_the_same_steps_with_its_schedule_outside(learned):
    model, other = small_model(), small_model()
    train(model, MetaMD(model.named_parameters(), learned, steps=STEPS), STEPS)
    optimiser, schedule = prepare(other.named_parameters(), learned, steps=STEPS)
    for t in range(STEPS):
        assert schedule.get_last_lr()[0] == pytest.approx(learned.usage.lr * learned.usage.share(t, STEPS))
        train(other, optimiser, 1, first=t)
        schedule.step()
    assert equal_parameters(model, other)


def test_a_run_that_is_interrupted_goes_on_in_the_middle_of_its_schedule(learned):
    model, whole = small_model(), small_model()
    train(whole, MetaMD(whole.named_parameters(), learned, steps=STEPS), STEPS)
    optimiser = MetaMD(model.named_parameters(), learned, steps=STEPS)
    train(model, optimiser, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_model(seed=9)
    resumed = MetaMD(other.named_parameters(), learned, steps=STEPS)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    twins = [(other, resumed), copy.deepcopy((model, optimiser)), pickle.loads(pickle.dumps((model, optimiser)))]
    for m, o in twins:
        train(m, o, STEPS - 5, first=5)
        assert equal_parameters(m, whole)


def test_a_schedule_inside_is_told_from_one_outside(learned):
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), learned, steps=STEPS)
    train(model, optimiser, 3)
    outside, _ = prepare(model.named_parameters(), learned, steps=STEPS)
    with pytest.raises(ValueError, match=r"with a schedule of 12 steps inside, but this optimiser has no schedule inside"):
        outside.load_state_dict(optimiser.state_dict())
    with pytest.raises(ValueError, match=r"Build the optimiser as that of the run: MetaMD\(\.\.\., steps=N\)"):
        optimiser.load_state_dict(outside.state_dict())
    longer = MetaMD(model.named_parameters(), learned, steps=50)
    with pytest.warns(UserWarning, match="a schedule of 12 steps inside, and will be continued with a schedule of 50 steps"):
        longer.load_state_dict(optimiser.state_dict())


def test_a_scheduler_on_top_multiplies_once_more():
    learned = file_of(Usage("learned", 0.0, "linear", 0.7))
    model, other = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    optimiser = MetaMD(model.named_parameters(), learned, steps=STEPS)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 4, gamma=0.5)
    theirs = MetaMD(other.named_parameters(), learned, lr=0.7, metric="learned")
    for t in range(STEPS):
        theirs.param_groups[0]["lr"] = 0.7 * (1 - t / STEPS) * 0.5 ** (t // 4)
        sentence = "a scheduler has changed lr from 0.7 to 0.35, on top of what .* linear schedule.* keeps lr constant"
        with pytest.warns(UserWarning, match=sentence) if t == 4 else nullcontext() as said:  # and once alone
            train(model, optimiser, 1, first=t)
        assert said is None or said[0].filename == train.__code__.co_filename, "the warning points at the loop"
        train(other, theirs, 1, first=t)
        schedule.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("usage", [Usage("learned", 0.0, "linear"), Usage()], ids=str)
def test_a_scheduler_that_changes_nothing_is_none_of_our_business(usage):
    """A constant one, and any one where the file recommends nothing."""
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), file_of(usage), steps=STEPS)
    constant = [1.0] * STEPS if usage != Usage() else [0.5**t for t in range(STEPS)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda t: constant[min(t, STEPS - 1)])
    for t in range(STEPS):
        train(model, optimiser, 1, first=t)
        schedule.step()


def test_plain_use_of_a_file_that_recommends_more_is_noticed(learned):
    named = list(small_model().named_parameters())
    with pytest.warns(
        UserWarning, match=r"recommends more than its metric: .*Write MetaMD\(params, learned, steps=N\)"
    ) as said:
        MetaMD(named, learned, lr=0.5)
    assert len(said) == 1
    assert said[0].filename == __file__
    MetaMD(named, learned, metric="learned")  # said on purpose
    MetaMD(named, learned.potential)
    MetaMD(named, file_of(Usage()))  # recommends nothing more


def tail_run(steps=STEPS):
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), file_of(*USAGES["polar, tail"]), steps=STEPS)
    train(model, optimiser, steps)
    return model, optimiser


def test_a_block_has_the_average_and_goes_back():
    (model, optimiser), (other, theirs) = tail_run(6), tail_run(6)
    iterates = copy.deepcopy(model)
    theirs.eval()
    with optimiser.averaged():
        assert equal_parameters(model, other)
        assert not equal_parameters(model, iterates)
        with optimiser.averaged():
            pass
        assert equal_parameters(model, other), "the inner block leaves the outer one as it is"
    assert equal_parameters(model, iterates)
    with pytest.raises(KeyError), optimiser.averaged():
        raise KeyError
    assert equal_parameters(model, iterates), "an error inside of the block changes nothing"
    train(model, optimiser, 1, first=6)
    with theirs.averaged():
        pass
    with pytest.raises(RuntimeError, match="in eval mode"):
        theirs.step()


def test_a_block_does_nothing_without_a_tail_average():
    model = small_model()
    optimiser = MetaMD(model.named_parameters(), file_of(*USAGES["momentum"]), steps=STEPS)
    train(model, optimiser, 3)
    before = copy.deepcopy(model)
    with optimiser.averaged():
        assert equal_parameters(model, before)
        train(model, optimiser, 1, first=3)


def test_an_average_that_nobody_uses_is_noticed_when_the_finished_run_is_saved():
    _, optimiser = tail_run(STEPS - 1)
    optimiser.state_dict()  # a checkpoint on the way
    model, optimiser = tail_run()
    with pytest.warns(UserWarning, match=r"the 12 steps of this run are done, and its tail average was never used"):
        saved = optimiser.state_dict()
    optimiser.state_dict()
    copy.deepcopy(optimiser).state_dict()
    for use in ("eval", "averaged"):
        _, optimiser = tail_run()
        if use == "eval":
            optimiser.eval()
            optimiser.train()
        else:
            with optimiser.averaged():
                pass
        assert optimiser.state_dict()["param_groups"][0]["step"] == saved["param_groups"][0]["step"]
    own = MetaMD(model.named_parameters(), metamd.Euclidean(), lr=0.1, averaging="tail")
    train(model, own, STEPS)
    own.state_dict()  # nobody knows where this run ends


def test_an_evaluation_without_the_average_is_noticed_once_and_after_the_last_step_alone():
    x = torch.zeros(1, 5)
    model, optimiser = tail_run(STEPS - 1)
    with torch.no_grad():
        model(x)  # on the way
    train(model, optimiser, 1, first=STEPS - 1)
    model(x)  # in training mode: that may go on
    other = small_model().eval()
    other(x)
    model.eval()
    with pytest.warns(UserWarning, match=r"the 12 steps .* never used: this model is evaluated at") as said:
        model(x)
    assert [w.filename for w in said] == [__file__]
    model(x)
    optimiser.state_dict()  # said already
    _, optimiser = tail_run()
    with torch.no_grad(), optimiser.averaged():
        model(x)
    for forget in (lambda model, opt: opt.eval(), lambda model, opt: None):
        model, optimiser = tail_run()
        forget(model, optimiser)
        del optimiser  # with it goes what looks at the model
        model.eval()(x)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_after_the_end_the_last_rate_is_kept():
    learned = file_of(Usage("learned", 0.0, "linear"))
    x = small_model()
    optimiser = MetaMD(x.named_parameters(), learned, steps=4)
    train(x, optimiser, 6)
    assert [optimiser._used.share(t) for t in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.25, 0.25]


def test_given_options_win_and_print_says_what_is_used():
    learned = file_of(Usage("learned", 0.9, "linear", 0.7))
    named = list(small_model().named_parameters())
    optimiser = MetaMD(named, learned, 0.3, steps=STEPS, momentum=0.5)
    assert (optimiser.param_groups[0]["lr"], optimiser.param_groups[0]["momentum"]) == (0.3, 0.5)
    assert "Used as the learned file recommends for 12 steps: learned metric, momentum 0.9" in repr(optimiser)
    assert repr(optimiser).endswith("; lr, momentum as given.")
    bare = LearnedOptimiser.from_potential(learned.potential)
    assert "recommends nothing, and is used plainly for 12 steps." in repr(MetaMD(named, bare, steps=STEPS))


def test_what_steps_cannot_set_up_is_refused():
    model = small_model()
    with pytest.raises(
        ValueError, match=r"steps=10 sets up what a learned file recommends, but a potential alone .* nothing"
    ):
        MetaMD(model.named_parameters(), metamd.Euclidean(), steps=10)
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        MetaMD(model.named_parameters(), file_of(Usage()), steps=0)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        MetaMD(model.named_parameters(), "./nowhere.safetensors", steps=10)


def test_a_prepared_pair_resumes_with_both_of_its_states(learned):
    model, whole = small_model(), small_model()
    train(whole, MetaMD(whole.named_parameters(), learned, steps=STEPS), STEPS)
    optimiser, schedule = prepare(model.named_parameters(), learned, steps=STEPS)
    for t in range(STEPS):
        if t == 5:
            saved = copy.deepcopy((optimiser.state_dict(), schedule.state_dict()))
            optimiser, schedule = prepare(model.named_parameters(), learned, steps=STEPS)
            optimiser.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
        train(model, optimiser, 1, first=t)
        schedule.step()
    assert equal_parameters(model, whole)


@pytest.mark.parametrize("lr", [1e-3, 5e-5])
def test_the_learning_rate_of_another_optimiser_is_noticed(lr):
    with pytest.warns(UserWarning, match=rf"lr={lr} is a factor on the learned step sizes, .* Leave lr out"):
        MetaMD(small_model().named_parameters(), file_of(*USAGES["polar, tail"]), lr=lr, steps=5)
    MetaMD(
        small_model().named_parameters(), file_of(*USAGES["polar, tail"]), lr=0.3, steps=5
    )  # a factor: warnings are errors here
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got True"):
        MetaMD(small_model().named_parameters(), file_of(*USAGES["polar, tail"]), steps=True)
