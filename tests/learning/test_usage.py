"""How a usage is chosen on training tasks: what counts, what is tried, and what is refused."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import metamd
from metamd import Diagonal, Kronecker, LearnedOptimiser, Online, Usage, meta_train, tasks
from metamd.files.store import Journal
from metamd.inner.objectives import Reference
from metamd.learning import reference as by_reference
from metamd.learning.first_look import draw_config
from metamd.learning.parts import Parts
from metamd.learning.reference import draw_tasks, learn_from_reference, tuned_reference
from metamd.learning.score import RunScores, start_of
from metamd.learning.usage import Choices, Trials, learn_usage, run_together, run_usage
from metamd.tasks import quadratic, tabular
from metamd.tasks.wrapped import Counted
from tests.helpers import judged_run


@pytest.fixture(scope="module")
def learned():
    return meta_train(tabular(steps=30), Diagonal(), outer_steps=1, tasks_per_step=2)


TRAIN = Choices(judged_on="train")


def area(way, end):
    """The score of one run by hand: the cube root of its mean loss, the geometric mean of its parts, and its end."""
    return (sum(way) / len(way) * math.prod(way) ** (1 / len(way)) * end) ** (1 / 3)


@pytest.mark.parametrize("averaging", ["constant", "tail"])
def test_the_score_is_the_area_under_the_logarithm_of_the_loss(learned, averaging):
    """By hand, along a run of `MetaMD`: ten parts of it, fresh batches at its end, and the noise of those at its start."""
    family = tabular(steps=30)
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    potential = learned.potential.bind(task.init())
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    optimiser = metamd.MetaMD(params.items(), potential, averaging=averaging)
    first = torch.tensor([float(task.loss(params, task.batch(30 + i)).detach()) for i in range(10)], dtype=torch.float64)
    losses = judged_run(task, params, optimiser, 30)
    end = sum(float(task.loss(params, task.batch(30 + i)).detach()) for i in range(10)) / 10
    noise = float(first.std() / 10**0.5 + first.mean() * 2**-23)
    way = [sum(losses[i : i + 3]) / 3 + noise for i in range(0, 30, 3)]
    score = Trials([task], potential, Parts(Counted(family)), TRAIN).score((Usage(averaging=averaging), None))
    assert score == pytest.approx(area(way, end + noise), rel=1e-5)


def scored(runs, start, factors=(1.0, 0.5)):
    """The scores of planted runs, (way, end) each, on a task that starts like this."""

    class Planted(Trials):
        def _run(self, number, used):
            way, end = runs[factors.index(used[0].factor)]
            return {"way": way, "end": end}

    trials = Planted([None], None, Parts(Counted(tabular())), TRAIN)
    trials._scores = RunScores([{"minimum": None, "noise": 0.0, "precision": 2**-52, **start}])
    return [trials.score((Usage(factor=f), None)) for f in factors]


def test_without_noise_digits_far_below_a_hundredth_of_the_first_loss_count():
    lower, higher = scored([([0.1, 1e-5], 1e-9), ([0.1, 1e-5], 1e-7)], {"loss": 1.0})
    assert lower == pytest.approx(area([0.1, 1e-5], 1e-9), rel=1e-4)
    assert higher / lower == pytest.approx(100 ** (1 / 3), rel=1e-4)


def test_what_noise_cannot_tell_apart_does_not_decide():
    """A run that leads by a tenth on the way wins against one whose last losses are a thousandth, both below the noise."""
    start = {"loss": 2.3, "noise": 0.01}
    ahead, chance = scored([([0.1, 1e-4], 1e-4), ([0.11, 1e-7], 1e-7)], start)
    assert ahead < chance
    assert ahead == pytest.approx(area([0.11, 0.0101], 0.0101))
    ahead, behind = scored([([0.1, 1e-4], 1e-4), ([0.11, 1e-7], 1e-7)], {**start, "noise": 0.0})
    assert ahead > behind, "without noise the digits decide"


def test_the_score_sees_the_way_as_well_as_the_end():
    early, late = scored([([0.5, 0.01, 0.01], 0.01), ([0.5, 0.5, 0.01], 0.01)], {"loss": 1.0})
    assert early < late
    end, behind = scored([([0.5, 0.1, 0.01], 0.001), ([0.5, 0.1, 0.01], 0.01)], {"loss": 1.0})
    assert end < behind


def test_losses_below_zero_are_ranked_from_the_lowest_of_their_task():
    """By hand; without the shift both usages would be as good as nothing."""
    runs = [([-30.0], -45.0), ([-40.0], -49.0)]
    worse, better = scored(runs, {"loss": 2.0})
    floor = 1e-2 * (2.0 + 49.0)
    assert worse == pytest.approx(area([15.0 + 0.47], 0.47)), "the lowest so far is its own end"
    assert better == pytest.approx(area([9.0 + floor], floor))
    assert better < area([19.0 + floor], 4.0 + floor)


def test_losses_are_counted_from_the_smallest_one_where_it_is_known():
    """A quadratic's minimum is below zero: by hand, digits of the gap count, and the score has no floor to speak of."""
    (found,) = scored([([-1.0, -2.999], -3 + 1e-9)], {"loss": 2.0, "minimum": -3.0}, (1.0,))
    assert found == pytest.approx(area([2.0, 1e-3], 1e-9), rel=1e-4)
    family = quadratic(steps=20)
    task = family.build(family.sample(torch.Generator().manual_seed(0)))
    start = start_of(task)
    assert (start["noise"], start["minimum"]) == (0.0, task.minimum())


def test_a_family_with_losses_below_zero_gets_a_usage_that_was_compared():
    data = {str(i): (torch.randn(60, 4), torch.randn(60, 1)) for i in range(3)}
    family = tasks.supervised(
        lambda: torch.nn.Linear(4, 1), data, lambda out, y: (out - y).square().mean() - 50, batch_size=20, steps=20
    )
    reference, scores = Reference(lr=0.05), []
    geometry = learn_from_reference(family, Diagonal(), reference=reference, tasks=2)
    found = learn_usage(geometry, family, reference=reference, tasks=2, watch=lambda *seen: scores.append(seen))
    assert len({round(score, 9) for _, _, score in scores}) > len(scores) / 2
    assert found.usage in [usage for usage, _, _ in scores]


def test_a_file_of_an_older_version_gets_a_usage_and_a_start(learned, tmp_path):
    old = LearnedOptimiser(replace(learned.header, schema_version=2, target_loss=None), learned.potential)
    old.save(tmp_path / "old.safetensors")
    old = metamd.load(tmp_path / "old.safetensors")
    assert old.header.schema_version == 2
    options = {"metrics": ("learned",), "momenta": (0.0,), "factors": (1.0,), "schedules": ("constant",)}
    assert learn_usage(old, tabular(steps=30), tasks=1, **options).header.schema_version == 4
    assert old.with_start(tabular(steps=30).example()).header.schema_version == 3


def planted(score, tasks, choices):
    """Trials whose scores are known."""

    class Planted(Trials):
        def _run(self, number, used):
            return {"way": [score(number, *used)], "end": score(number, *used)}

    trials = Planted([None] * tasks, None, Parts(Counted(tabular())), choices)
    trials._scores = RunScores([{"loss": 0.0, "noise": 0.0, "precision": 0.0, "minimum": None}] * tasks)
    return trials


@pytest.mark.parametrize("seconds", [{}, {"learned metric": 1e-3, str(Online()): 3e-3}])
def test_for_few_seconds_runs_have_the_steps_that_fit_the_time_of_the_quickest(learned, seconds):
    """By hand: a step that takes three times as long is taken a third as often, and the score is that of shorter runs."""
    family = tabular(steps=30)
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    potential = learned.potential.bind(task.init())
    online = Online(scale=dict.fromkeys(learned.potential.log_d, 100.0))
    trials = Trials([task], potential, Parts(Counted(family)), TRAIN, seconds=seconds)
    trials.run([(Usage(), None), (Usage("online"), online)])
    ways = [run["way"] for name, run in trials._known.items()]
    steps = [30, 10 if seconds else 30]
    for way, (usage, rule), count in zip(ways, ((Usage(), None), (Usage("online"), online)), steps, strict=True):
        assert tuple(way) == run_usage(task, potential, usage, online=rule, steps=count).way


def test_the_rules_offered_for_few_seconds_have_cheaper_ones_with_the_same_scales():
    few = Choices(prefer="seconds").online
    assert [rule.block for rule in few] == [0, 0, 0, 0, 0, 64, 64, 32, 32]
    assert Choices().online == few[:5]
    assert Choices(metrics=("learned",)).online == ()


@pytest.mark.parametrize("make", [quadratic, tasks.logistic])
def test_runs_side_by_side_are_those_that_run_usage_makes(make):
    """Every task has a usage of its own; one of them diverges and leaves the others alone."""
    family = make(steps=25)
    found = meta_train(family, Diagonal(), outer_steps=1, tasks_per_step=2)
    built = draw_tasks(family, 0, "usage", 4)
    potential = found.potential.bind(built[0].init())
    usages = [
        Usage(momentum=0.9, schedule="linear", factor=2.0),
        Usage(averaging="tail", factor=0.5),
        Usage(factor=1e6),
        Usage(schedule="quadratic", momentum=0.5),
    ]
    for task, usage, run in zip(built, usages, run_together(built, potential, usages), strict=True):
        alone = run_usage(task, potential, usage)
        assert run.loss == pytest.approx(alone.loss, rel=1e-9)
        assert run.way == pytest.approx(alone.way, rel=1e-9, abs=1e-12)
        if math.isfinite(alone.loss):
            for n, x in alone.end.items():
                torch.testing.assert_close(run.end[n], x, rtol=1e-9, atol=1e-12)
    assert [math.isfinite(r.loss) for r in run_together(built, potential, usages)] == [True, True, False, True]


@pytest.mark.parametrize(("finalists", "chosen"), [(2, (0.7, 0.35)), (1, (0.9, 0.5))])
def test_the_better_of_two_rules_is_found_although_the_other_is_better_at_first(monkeypatch, finalists, chosen):
    """Planted scores by beta and factor; with one finalist the worse rule is taken."""
    scores = {(0.9, 0.35): 0.0773, (0.9, 0.5): 0.0762, (0.7, 0.35): 0.0756, (0.7, 0.5): 0.0767}
    monkeypatch.setattr("metamd.learning.usage.FINALISTS", finalists)
    rules = [Online("polar", beta=beta, signal=0.95) for beta in (0.9, 0.7, 0.5)]
    choices = Choices(schedules=("linear",), averages=("constant",), factors=(0.25, 0.35, 0.5, 0.7))
    trials = planted(lambda _, usage, online: scores.get((online.beta, usage.factor), 1.0), 6, choices)
    usage, online = trials.best(rules)
    assert (online.beta, usage.factor) == chosen


FEW = (0.25, 0.35, 0.5, 0.7, 1.0)


@pytest.mark.parametrize("best", ["constant", "linear", "quadratic"])
def test_the_schedule_that_is_best_at_its_own_factor_is_taken(best):
    """Planted scores: each schedule has its best factor elsewhere, and is worse than the others at theirs."""
    peaks = {"constant": 0.25, "linear": 0.5, "quadratic": 1.0}

    def score(_, usage, online):
        return abs(math.log(usage.factor / peaks[usage.schedule])) + (0.9 if usage.schedule == best else 1.0)

    choices = Choices(momenta=(0.0,), schedules=tuple(peaks), averages=("constant",), factors=FEW)
    usage, _ = planted(score, 2, choices).best([None])
    assert (usage.schedule, usage.factor) == (best, peaks[best])


@pytest.mark.parametrize(("best", "momentum"), [("tail", 0.0), ("constant", 0.0), ("constant", 0.9)])
def test_an_average_is_taken_if_it_is_better_at_its_own_factor_and_never_with_momentum(best, momentum):
    peaks = {"tail": 1.0, "constant": 0.35}

    def score(_, usage, online):
        return abs(math.log(usage.factor / peaks[usage.averaging])) + (0.9 if usage.averaging == best else 1.0)

    choices = Choices(momenta=(momentum,), schedules=("linear",), averages=("tail", "constant"), factors=FEW)
    usage, _ = planted(score, 2, choices).best([None])
    assert (usage.averaging, usage.factor, usage.momentum) == (best, peaks[best], momentum)


def test_what_is_third_is_not_tried_on():
    """Planted scores: of four rules two find factors, of three changes as well, and the third task decides.

    By hand: 4 rules on one task; 2 rules and 3 changes on two; two more factors there for 2 of each; what was best of both
    on the third.
    """
    tried = []

    def score(number, usage, online):
        tried.append((number, online.beta, usage.schedule, usage.averaging, usage.factor))
        by_rule = {0.5: 1.0, 0.6: 1.1, 0.7: 1.2, 0.8: 1.3}[online.beta]
        change = {"linear": 1.0, "constant": 1.1, "quadratic": 1.2}[usage.schedule] * (
            1.3 if usage.averaging == "tail" else 1
        )
        return by_rule * change * (1 + 0.1 * abs(math.log2(usage.factor / 0.35)))

    rules = [Online("polar", beta=beta) for beta in (0.7, 0.5, 0.8, 0.6)]
    choices = Choices(schedules=("linear", "constant", "quadratic"), averages=("constant", "tail"), factors=FEW, tasks=3)
    usage, online = planted(score, 3, choices).best(rules)
    assert (usage.schedule, usage.averaging, online.beta) == ("linear", "constant", 0.5)
    assert {number for number, beta, *_ in tried if beta > 0.65} == {0}
    assert {number for number, beta, *_ in tried if beta < 0.55} == {0, 1, 2}
    factors = {"constant": set(), "quadratic": set(), "tail": set()}
    for _, _, schedule, averaging, factor in tried:
        if (schedule, averaging) != ("linear", "constant"):
            factors[averaging if averaging == "tail" else schedule].add(factor)
    assert {kind: len(each) for kind, each in factors.items()} == {"constant": 3, "quadratic": 3, "tail": 1}
    assert len(set(tried)) == 4 + 2 + (3 + 2 * (2 + 2)) * 2 + 2
    assert len(tried) == 2 * len(set(tried)), "a run is asked for its way and its end, once"


def test_what_is_better_on_two_tasks_alone_is_not_taken():
    """Another schedule is tried on the first two tasks, and has to be better on all."""

    def score(number, usage, online):
        return 1.0 if usage.schedule == "linear" else (0.5 if number < 2 else 3.0)

    choices = Choices(momenta=(0.0,), schedules=("linear", "quadratic"), averages=("constant",), factors=(1.0,))
    trials = planted(score, 6, choices)
    usage, _ = trials.best([None])
    assert trials.score((replace(usage, schedule="quadratic"), None), 2) < 1
    assert usage.schedule == "linear"


@pytest.mark.parametrize("averaging", ["constant", "tail"])
def test_whatever_a_run_is_judged_by_is_seen_on_the_same_twenty_batches(learned, averaging):
    """By hand, along a run of 250 steps: the loss is looked at in every twelfth one, of the average or of the iterate."""
    family = Counted(tabular(steps=250))
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    potential = learned.potential.bind(task.init())
    params = {n: torch.nn.Parameter(x) for n, x in task.init().items()}
    judged = judged_run(task, params, metamd.MetaMD(params.items(), potential, lr=0.5, averaging=averaging), 250)
    before, looked = family.batches, judged[6::12]
    outcome = run_usage(task, potential, Usage(factor=0.5, averaging=averaging))
    assert outcome.loss == pytest.approx(sum(looked) / len(looked), rel=1e-5)
    assert outcome.way == pytest.approx([sum(part) / len(part) for part in np.array_split(looked, 10)], rel=1e-5)
    assert outcome.loss == pytest.approx(sum(judged) / 250, rel=0.1)
    assert family.batches - before == 250 + (len(looked) if averaging == "tail" else 0)


def test_looking_now_and_then_favours_no_average(learned, monkeypatch):
    """An average that is the iterate itself has its score, whatever the losses do between two looks."""
    monkeypatch.setattr("metamd.learning.usage.tail_share", lambda step: 1.0)
    family = quadratic(steps=200)
    found = meta_train(family, Diagonal(), outer_steps=1, tasks_per_step=2)
    task = family.build(family.sample(torch.Generator().manual_seed(3)))
    potential = found.potential.bind(task.init())
    plain, judged = (run_usage(task, potential, Usage(averaging=a)).loss for a in ("constant", "tail"))
    assert judged == pytest.approx(plain, rel=1e-12)


def test_a_rate_that_falls_with_the_square_is_ahead_where_noise_holds_a_run_up():
    """Noise of gradients around a minimum: by hand the variance is v <- (1 - eta)^2 v + eta^2, eta falling to zero."""

    def left(usage, steps=400):
        v = 1.0
        for t in range(steps):
            eta = 0.5 * usage.share(t, steps)
            v = (1 - eta) ** 2 * v + eta**2
        return v

    ends = {s: left(Usage(schedule=s)) for s in ("constant", "linear", "quadratic")}
    assert ends["quadratic"] < ends["linear"] < 0.2 * ends["constant"]
    assert [Usage(schedule="quadratic").share(t, 4) for t in range(4)] == [1.0, 0.5625, 0.25, 0.0625]


def broken_in(dataset):
    generator = torch.Generator().manual_seed(0)
    data = {str(i): (torch.randn(60, 4, generator=generator), torch.randn(60, 1, generator=generator)) for i in range(4)}
    if dataset is not None:
        data[dataset][1].fill_(1e30)  # its squares are not finite
    model = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))  # noqa: E731
    return tasks.supervised(model, data, torch.nn.functional.mse_loss, batch_size=20, steps=10)


def test_a_task_that_nothing_trains_says_nothing_about_the_others():
    """Its runs diverge whatever the metrics are: they are not doubled for its sake."""
    learnt = [learn_from_reference(broken_in(d), Diagonal(), reference=Reference(lr=0.01), tasks=8) for d in (None, "0")]
    means = [float(each.potential.log_d["0.weight"].detach().mean()) for each in learnt]
    assert abs(means[0] - means[1]) < 1


def test_metrics_that_diverge_whatever_is_done_are_said(monkeypatch):
    monkeypatch.setattr(by_reference, "run_inner", lambda *_, **__: SimpleNamespace(diverged="always"))
    with pytest.warns(RuntimeWarning, match="diverge although they were doubled 10 times"):
        learn_from_reference(tabular(steps=10), Diagonal(), reference=Reference(lr=0.01), tasks=1)


def test_a_loss_that_is_not_finite_at_the_start_is_not_blamed_on_the_rate():
    with pytest.raises(ValueError, match=r"the loss is inf at the start of a task of 'supervised' \(0\).*Check its data"):
        tuned_reference(broken_in("0"), tasks=4)


def test_a_weight_that_the_loss_ignores_is_refused_before_the_runs():
    class Headed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

        def forward(self, x):
            return self.used(x)

    family = tasks.supervised(
        Headed, {"a": (torch.randn(60, 4), torch.randn(60, 1))}, torch.nn.functional.mse_loss, steps=5, batch_size=20
    )
    with pytest.raises(ValueError, match=r"the loss ignores 'unused\.weight', 'unused\.bias'.*Leave such parameters out"):
        learn_from_reference(family, Kronecker(), reference=Reference(lr=0.01), tasks=1)


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"metrics": ("typo",)}, r"metrics must be some of 'learned', 'online'; got 'typo'"),
        ({"schedules": ("cosine",)}, r"schedules must be some of .*'linear'.*; got 'cosine'"),
        ({"averages": ("anytime",)}, r"averages must be some of 'constant', 'tail'; got 'anytime'"),
        ({"factors": (0.0, 1.0)}, r"factors must be positive numbers, got \(0\.0, 1\.0\)"),
        ({"rules": ()}, r"rules must have one to choose from"),
    ],
)
def test_choices_that_are_none_are_refused(learned, choices, sentence):
    with pytest.raises(ValueError, match=sentence):
        learn_usage(learned, tabular(steps=30), tasks=1, **choices)


def test_the_factor_climbs_to_where_no_neighbour_is_better(learned):
    tried = {}
    factors = tuple(2.0**k for k in range(-6, 7))
    options = {"metrics": ("learned",), "momenta": (0.0,), "schedules": ("constant",), "factors": factors, "tasks": 1}
    found = learn_usage(learned, tabular(steps=30), watch=lambda u, _, v: tried.update({u.factor: v}), **options)
    best = found.usage.factor
    assert tried[best] == min(tried.values())
    assert {best / 2, best * 2} & set(factors) <= set(tried)
    assert len(tried) < len(factors), "no more than the way there is run"


def test_tasks_to_decide_on_are_spread_over_the_domains():
    class Domains(type(tabular())):
        """Of three domains, one is drawn as often as the others together."""

        def sample(self, generator):
            number = int(torch.randint(4, (1,), generator=generator))
            return {"domain": "abca"[number], "seed": int(torch.randint(2**31, (1,), generator=generator))}

        def build(self, config):
            return config

    family = Domains.__new__(Domains)
    uneven = 0
    for seed in range(8):
        drawn = [task["domain"] for task in draw_tasks(family, seed, "usage", 6)]
        assert sorted(drawn) == list("aabbcc")
        plain = [draw_config(family, seed, "usage", "usage", i)["domain"] for i in range(6)]
        uneven += sorted(plain) != list("aabbcc")
    assert uneven > 4, "chance alone would do"
    assert len({tuple(t["seed"] for t in draw_tasks(family, s, "usage", 6)) for s in range(20)}) == 20
    everywhere = tabular(steps=5)
    configs = [draw_config(everywhere, 3, "usage", "scale", i) for i in range(4)]
    assert [t.config for t in draw_tasks(everywhere, 3, "scale", 4)] == configs, "without domains, in order"


def test_datasets_of_your_own_are_domains_too():
    data = {str(i): (torch.randn(30, 4), torch.randn(30, 1)) for i in range(4)}
    family = tasks.supervised(lambda: torch.nn.Linear(4, 1), data, torch.nn.functional.mse_loss, batch_size=10, steps=5)
    for seed in range(4):
        assert sorted(task.config["dataset"] for task in draw_tasks(family, seed, "usage", 4)) == list("0123")


class Emptied(torch.nn.Module):
    """A linear model with two parameters that have no numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.matrix, self.vector = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.linear(x) + self.matrix.sum() + self.vector.sum()


def test_parameters_without_numbers_are_in_nobodys_way():
    data = {"a": (torch.randn(60, 4), torch.randn(60, 1))}
    family = tasks.supervised(Emptied, data, torch.nn.functional.mse_loss, batch_size=20, steps=10)
    reference = Reference(lr=0.01)
    for potential in (Diagonal(), Kronecker()):
        found = learn_from_reference(family, potential, reference=reference, tasks=1)
        assert learn_usage(found, family, reference=reference, tasks=1, factors=(1.0,)).usage.factor == 1.0
    model = Emptied()
    optimiser = metamd.MetaMD(model.named_parameters(), metamd.MaxDiagonal(2), lr=0.1, certify=True)
    model(data["a"][0]).square().mean().backward()
    optimiser.step()
    assert optimiser.certificate(radius=1.0).bound > 0


def overfitted():
    """More weights than examples, and targets that are mostly noise: low training losses are learned by heart."""
    generator = torch.Generator().manual_seed(0)
    data = {}
    for name in "abc":
        inputs = torch.randn(240, 40, generator=generator)
        targets = inputs[:, :1] + 2 * torch.randn(240, 1, generator=generator)
        data[name] = {"train": (inputs[:30], targets[:30]), "validation": (inputs[30:], targets[30:])}
    return tasks.supervised(lambda: torch.nn.Linear(40, 1), data, torch.nn.functional.mse_loss, batch_size=10, steps=60)


def test_what_is_judged_on_validation_data_generalises():
    family, reference = overfitted(), Reference(lr=0.03)
    geometry = learn_from_reference(family, Diagonal(), reference=reference, tasks=3)
    found = {
        judge: learn_usage(geometry, family, reference=reference, tasks=3, judged_on=judge)
        for judge in ("train", "validation")
    }
    ends = {
        judge: [
            (task, run_usage(task, learned.potential.bind(task.init()), learned.usage, online=learned.online).end)
            for task in built
        ]
        for judge, learned in found.items()
        for built in [draw_tasks(family, 9, "others", 3)]
    }
    losses = {
        judge: [sum(task.evaluate(end, split).loss for task, end in runs) for split in ("train", "validation")]
        for judge, runs in ends.items()
    }
    assert losses["train"][0] < 0.5 * losses["validation"][0]
    assert losses["validation"][1] < 0.7 * losses["train"][1]
    assert found["validation"].usage.factor < found["train"].usage.factor


def test_the_score_on_validation_data_by_hand():
    family = overfitted()
    geometry = learn_from_reference(family, Diagonal(), reference=Reference(lr=0.03), tasks=2)
    task = draw_tasks(family, 0, "usage", 1)[0]
    potential = geometry.potential.bind(task.init())
    run = run_usage(task, potential, Usage())
    first = torch.tensor([float(task.loss(task.init(), task.batch(60 + i))) for i in range(10)], dtype=torch.float64)
    noise = float(first.std() / 10**0.5)
    end = task.evaluate(run.end, "validation").loss + noise
    scores = {
        judge: Trials([task], potential, Parts(Counted(family)), Choices(judged_on=judge)).score((Usage(), None))
        for judge in ("validation", "auto", "train")
    }
    way = [x + noise for x in run.way]
    assert scores["validation"] == pytest.approx(end), "the end alone"
    assert scores["auto"] == pytest.approx(area(way, end))
    fresh = sum(float(task.loss(run.end, task.batch(60 + i))) for i in range(10)) / 10
    assert scores["train"] == pytest.approx(area(way, fresh + noise))


def test_the_end_of_a_run_is_judged_on_validation_data_where_there_is_some(learned):
    options = {"metrics": ("learned",), "momenta": (0.0,), "factors": (1.0,), "schedules": ("constant",), "tasks": 1}
    data = {"a": {"train": (torch.randn(30, 8), torch.randn(30))}}
    without = tasks.supervised(
        lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(0)),
        data,
        torch.nn.functional.mse_loss,
        batch_size=10,
        steps=10,
    )
    for family, judge in ((tabular(steps=10), "auto"), (without, "train")):
        geometry = learn_from_reference(family, Diagonal(), reference=Reference(lr=0.01), tasks=1)
        found = learn_usage(geometry, family, **options)
        choice = {k: v for k, v in found.header.choice.items() if k != "seconds_per_step"}
        assert choice == {"score": "area under the logarithm of the loss", "judged_on": judge, "prefer": "steps"}
        assert found.header.choice["seconds_per_step"] > 0
        again = type(found.header).from_json(found.header.to_json())
        assert again == found.header


def test_nobody_is_judged_on_test_data_nor_on_what_is_not_there(learned):
    with pytest.raises(ValueError, match='judged_on must be "auto", "train" or "validation", got \'test\''):
        learn_usage(learned, tabular(steps=30), judged_on="test")
    data = {"a": {"train": (torch.randn(30, 4), torch.randn(30, 1))}}
    family = tasks.supervised(lambda: torch.nn.Linear(4, 1), data, torch.nn.functional.mse_loss, batch_size=10, steps=10)
    reference = Reference(lr=0.01)
    geometry = learn_from_reference(family, Diagonal(), reference=reference, tasks=1)
    with pytest.raises(ValueError, match="splits train, got 'validation'"):
        learn_usage(geometry, family, reference=reference, tasks=1, judged_on="validation")


def test_a_journal_keeps_the_two_judges_apart(learned, tmp_path):
    family, options = tabular(steps=30), {"metrics": ("learned",), "momenta": (0.0,), "schedules": ("constant",), "tasks": 1}
    kept = Journal(tmp_path)
    first = learn_usage(learned, family, journal=kept, **options)
    with pytest.raises(ValueError, match="judged_on"):
        learn_usage(learned, family, journal=kept, judged_on="validation", **options)
    assert learn_usage(learned, family, journal=kept, **options).usage == first.usage
