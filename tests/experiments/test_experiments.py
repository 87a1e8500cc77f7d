"""Rivals against torch.optim, races against loops, records that resume, and the experiments at their smallest scale."""

import importlib.util
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from metamd import Diagonal, LearnedOptimiser, rivals
from metamd.cli import main as cli
from metamd.cli import report
from metamd.comparison.page import as_markdown
from metamd.comparison.statistics import spread
from metamd.experiments import (
    EXPERIMENTS,
    MOVED,
    find,
    folder_name,
    forecasters,
    per_instance,
    quadratic,
    rosenbrock,
    synthetic,
)
from metamd.experiments import experiment as leave_one_out
from metamd.experiments.synthetic import BATCHED_RIVALS, NEVER, ONE_DIAGONAL, Problems, own_warnings
from metamd.files.store import Records, as_json, read_cells, read_json, records_in, write_json
from metamd.inner.executor import Cell, fill
from metamd.optimiser.guard import OffFamilyWarning
from metamd.tasks import quadratic as quadratics
from metamd.tasks import rosenbrock as valleys
from tests.tasks.test_language import sources
from tests.tiny_datasets import photograph, place, publish_files, series, tiny_data

__all__ = ["place", "tiny_data"]

ROOT = Path(__file__).parents[2]
FAMILIES = {"quadratic": quadratics((0.5, 4.0)), "rosenbrock": valleys(3, shift=0.3, scale=0.2, start=0.5)}
SETTINGS = {
    "sgd": [{"lr": 0.05}, {"lr": 0.1}],
    "sgd-m": [{"lr": 0.02, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.5}],
    "adam": [{"lr": 0.1, "beta1": 0.9, "beta2": 0.999}, {"lr": 0.3, "beta1": 0.0, "beta2": 0.9}],
    "rmsprop": [{"lr": 0.01, "alpha": 0.99, "momentum": 0.0}, {"lr": 0.05, "alpha": 0.9, "momentum": 0.5}],
}
RATES = {"low": -3, "high": 0, "per_decade": 2}


def namesake(key, theta, setting):
    """The optimiser that a batched rival imitates."""
    return rivals.rival({"sgd-m": "sgdm"}.get(key, key)).with_setting("constant", **setting).start([("theta", theta)])


def one_by_one(task, key, setting, tolerance, limit):
    """The slow obvious run: torch.optim on one problem."""
    theta = torch.nn.Parameter(task.init()["theta"])
    optimiser = namesake(key, theta, setting)
    for t in range(limit + 1):
        (theta.grad,) = torch.autograd.grad(task.loss({"theta": theta}, task.batch(t)), theta)
        if theta.grad.norm() < tolerance:
            return t
        optimiser.step()
    return NEVER


# rivals


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_by_hand_are_those_of_the_tasks(name):
    problems = Problems.draw(FAMILIES[name], 4, 0)
    theta = torch.randn(4, problems.start.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = problems.gradient(theta, problems.batch)
    for task, x, g in zip(problems.tasks, theta, found, strict=True):
        x = x.requires_grad_()
        (wanted,) = torch.autograd.grad(task.loss({"theta": x}, task.batch(0)), x)
        torch.testing.assert_close(g, wanted, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("key", BATCHED_RIVALS)
def test_a_rival_takes_the_steps_of_its_namesake(key):
    problems, rival = Problems.draw(FAMILIES["quadratic"], 3, 0), BATCHED_RIVALS[key]
    theta = next(islice(synthetic.iterates(problems, rival, SETTINGS[key]), 30, None))
    for row, (setting, task) in enumerate((s, task) for s in SETTINGS[key] for task in problems.tasks):
        x = torch.nn.Parameter(task.init()["theta"])
        optimiser = namesake(key, x, setting)
        for t in range(30):
            (x.grad,) = torch.autograd.grad(task.loss({"theta": x}, task.batch(t)), x)
            optimiser.step()
        torch.testing.assert_close(theta[row], x.detach(), rtol=1e-9, atol=1e-11)


def test_the_law_of_namesakes_rejects_adam_without_bias_correction():
    def lazy(grad, state, setting, steps):
        return BATCHED_RIVALS["adam"].rule(grad, state, setting, 10**6)

    problems = Problems.draw(FAMILIES["quadratic"], 1, 0)
    theta, batch, options = problems.rows(SETTINGS["adam"][:1])
    right = BATCHED_RIVALS["adam"].rule(problems.gradient(theta, batch), {}, options, 0)
    assert not torch.allclose(right, lazy(problems.gradient(theta, batch), {}, options, 0))


@pytest.mark.parametrize("key", BATCHED_RIVALS)
def test_races_count_as_a_loop_does_and_the_best_setting_is_the_best(key):
    problems, rival = Problems.draw(FAMILIES["quadratic"], 3, 0), BATCHED_RIVALS[key]
    settings = rival.grid(RATES, everything=False)
    wanted = torch.tensor([[one_by_one(task, key, s, 1e-3, 300) for task in problems.tasks] for s in settings])
    means = synthetic.means(wanted, 300)
    counts = synthetic.iterations(problems, rival, settings, 1e-3, 300)
    finished = (counts != NEVER).all(1)
    assert torch.equal(counts[finished], wanted[finished])
    assert float(synthetic.means(counts, 300).min()) == float(means.min())
    best = int(means.argmin())
    assert counts[best].tolist() == wanted[best].tolist(), "the best setting is not given up"
    total = 300 if counts[best, 0] == NEVER else int(counts[best, 0])
    assert len(synthetic.path(problems, rival, settings[best], total)) == len(synthetic.thinned(total))


def test_grids_hold_the_default_first_and_every_combination():
    adam = BATCHED_RIVALS["adam"]
    assert len(adam.grid(RATES, everything=False)) == 7
    assert {(s["beta1"], s["beta2"]) for s in adam.grid(RATES, everything=False)} == {(0.9, 0.999)}
    assert len(adam.grid(RATES, everything=True)) == 7 * 25


def test_divergence_counts_as_never():
    problems = Problems.draw(FAMILIES["quadratic"], 2, 0)
    assert synthetic.iterations(problems, BATCHED_RIVALS["sgd"], [{"lr": 10.0}], 1e-6, 2000).tolist() == [[NEVER, NEVER]]
    assert len(synthetic.path(problems, BATCHED_RIVALS["sgd"], {"lr": 1e300}, 50)) < 5, (
        "a path ends where it is no longer finite"
    )


# the best diagonal


def searched(problems):
    """The best diagonal by the mean number of iterations, as the experiment searches it."""

    def score(rival, settings):
        return synthetic.means(synthetic.iterations(problems, rival, settings, 1e-6, 500), 500)

    centre = (2 * problems.batch["Q"]).mean(0).diagonal().log10().tolist()
    return score, synthetic.best_diagonal(score, centre, 1.3, points=25, rounds=4, shrink=0.25)


def test_the_best_diagonal_of_one_separable_quadratic_is_newtons():
    family = quadratics((0.5, 4.0), coupling=0.0, spread=0.0)
    score, best = searched(Problems.draw(family, 1, 0))
    # D = 2Q arrives in one step; the grid comes within a fraction of a per cent of it
    assert float(score(ONE_DIAGONAL, [best])) <= 4
    assert best["d0"] == pytest.approx(1.0, rel=0.05)
    assert best["d1"] == pytest.approx(8.0, rel=0.05)


def test_no_diagonal_nearby_beats_the_best_one():
    score, best = searched(Problems.draw(quadratics((0.3, 14.0)), 10, 0))
    generator = torch.Generator().manual_seed(0)
    factors = (0.5 * torch.randn(300, 2, generator=generator, dtype=torch.float64)).exp()
    others = [{"d0": best["d0"] * float(a), "d1": best["d1"] * float(b)} for a, b in factors]
    assert float(score(ONE_DIAGONAL, [best])) <= float(score(ONE_DIAGONAL, others).min()) + 0.3


def test_a_learned_geometry_runs_as_the_diagonal_it_is():
    problems = Problems.draw(FAMILIES["quadratic"], 3, 0)
    metrics = torch.tensor([[1.1, 9.0]], dtype=torch.float64)
    geometry = LearnedOptimiser.from_potential(Diagonal().with_metrics({"theta": metrics.log()}))
    counts = quadratic.measured_iterations(problems, (geometry, []), 500)["iterations"]
    wanted = synthetic.iterations(problems, ONE_DIAGONAL, [{"d0": 1.1, "d1": 9.0}], 1e-6, 500)[0]
    assert counts["tight"] == wanted.tolist()
    assert all(a < b for a, b in zip(counts["loose"], counts["tight"], strict=True))


# spreads


def test_a_spread_knows_what_never_arrived():
    found = spread([1, 2, 3, None, None])
    assert (found["median"], found["arrived"], found["count"], found["mean"]) == (3, 3, 5, None)
    assert spread([4.0])["low"] == spread([4.0])["high"] == 4.0
    with pytest.raises(ValueError, match="at least one"):
        spread([])


def test_the_interval_of_the_median_covers():
    """300 draws of 30 normals: 95 % nominal; the bootstrap covers 90 to 97 % here, so below 85 % something is wrong."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        found = spread(rng.normal(size=30).tolist())
        hits += found["low"] <= 0 <= found["high"]
    assert 0.85 <= hits / 300 <= 1.0


# records


def test_results_without_their_settings_are_not_taken_for_others(tmp_path):
    Records(tmp_path, {"steps": 20}).cell("a", lambda: {"x": 1})
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json.*Put it back, or choose another folder"):
        Records(tmp_path, {"steps": 20})
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"holds results, but not run\.json"):
        Records(tmp_path, {"steps": 10})


def test_records_resume_and_refuse_other_settings(tmp_path):
    made = []

    def compute(name):
        return Cell(name, lambda: made.append(name) or {"value": [1, None, 2.5]})

    first = fill(Records(tmp_path, {"seed": 0, "pair": (1, 2)}), [compute("a")], title="x")
    second = fill(Records(tmp_path, {"seed": 0, "pair": (1, 2)}), [compute("a"), compute("b")], title="x")
    assert made == ["a", "b"]
    assert first["a"] == second["a"] == {"value": [1, None, 2.5]}
    assert Records.settings(tmp_path)["seed"] == 0
    with pytest.raises(ValueError, match=r"other settings: seed is 0, and would be 1; pair is .*--out"):
        Records(tmp_path, {"seed": 1})


def test_a_damaged_record_is_named(tmp_path):
    records = Records(tmp_path, {})
    records.path("a").write_text('{"value": ')
    with pytest.raises(ValueError, match=r"a\.json.*Delete"):
        records.cell("a", dict)
    records.path("a").write_text("[1]")
    with pytest.raises(ValueError, match="JSON object"):
        records.cell("a", dict)
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not (tmp_path / "x.json").exists()


def test_only_our_own_warnings_belong_to_a_result(recwarn):
    import warnings

    warnings.warn("ours", OffFamilyWarning, stacklevel=1)
    warnings.warn("theirs", UserWarning, stacklevel=1)
    assert own_warnings(recwarn) == ["OffFamilyWarning"]


# the experiments


@pytest.fixture
def tiny(monkeypatch):
    """Both experiments as small as they go."""
    numbers = (("k", 10), ("rho", 0.001), ("lr", 0.1), ("outer_steps", 1), ("tasks_per_step", 1), ("T", 20))
    scale = quadratic.Scale(("published",), ("far",), 3, 500, 50, 1, 1, 1, numbers, numbers, 5, False)
    monkeypatch.setitem(quadratic.SCALES, "smoke", scale)
    monkeypatch.setitem(rosenbrock.SCALES, "smoke", rosenbrock.Scale(("customary",), 1, 1, 4, False))
    monkeypatch.setattr(rosenbrock, "RATES", RATES)


@pytest.mark.parametrize("name", ["quadratic", "rosenbrock"])
def test_reproduce_runs_at_its_smallest_scale_and_again_from_its_records(name, tmp_path, capsys, monkeypatch):
    args = ["reproduce", name, "--scale", "smoke", "--out", str(tmp_path), "--json"]
    assert cli.run(args) == 0
    first = json.loads(capsys.readouterr().out)
    assert {r["optimiser"] for r in first["rows"]} >= {"SGD (rate)", "Adam (rate)", "best diagonal"}
    written = sorted(p.suffix for p in tmp_path.iterdir() if p.is_file())
    assert written == [".html", ".json", ".json", ".md", ".md", ".png", ".png", ".xz"]
    page = (tmp_path / "report.md").read_text()
    assert f"## Configuration\n\n|  | value |\n|---|---|\n| experiment | {name} |\n| scale | smoke |" in page
    spent = [line for line in page.splitlines() if line.startswith("| published-far-default-0 | ")]
    with records_in(tmp_path) as records:
        cost = read_cells(records)["published-far-default-0"]["cost"] if name == "quadratic" else {}
    assert spent == ([f"| published-far-default-0 | {' | '.join(map(str, cost.values()))} |"] if cost else [])

    def forbidden(*args, **options):
        raise AssertionError("computed again")

    for computing in ("iterations", "final_losses", "try_meta_train"):
        monkeypatch.setattr(synthetic, computing, forbidden)
    assert cli.run(args) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert cli.run([*args, "--seed", "1"]) == 2
    assert "other settings" in capsys.readouterr().err


# Of the published variants two run: the others differ in the model, which their own experiments run, or in the steps.
OTHERS = {(name, "published") for name in ("diverse-digits-lenet", "resnet18-cifar10")}
OTHERS |= {("rotated-mnist-mlp", "published-short")}
NETWORKS = [pair for pair in EXPERIMENTS if pair[0] not in ("quadratic", "rosenbrock") and pair not in OTHERS]
MANY = {("speakers", "presidents"), ("images", "learned-start"), ("burgers", "warm-start"), ("cash-machines", "")}
# dozens of tasks, or a start too
SLOW = {pair: [pytest.mark.slow] * (pair in MANY) for pair in NETWORKS}
FILES = {e.name for module in (per_instance, forecasters) for e in module.EXPERIMENTS}  # whose data are no sets of images


@pytest.fixture
def made_files(tmp_path, monkeypatch):
    """A small model and texts, small photographs, and short series."""
    photographs = {f"kodim{n:02d}.png": photograph(n) for n in range(1, 25)}
    publish_files(tmp_path / "data", monkeypatch, **sources(layers=1), kodak=photographs, nn5={"nn5.npz": series()})


@pytest.mark.filterwarnings("ignore::metamd.OffFamilyWarning")
@pytest.mark.parametrize(
    ("name", "variant"), [pytest.param(*pair, id=folder_name(*pair), marks=marks) for pair, marks in SLOW.items()]
)
def test_every_experiment_with_networks_runs_at_its_smallest_scale(name, variant, tmp_path, capsys, monkeypatch, request):
    request.getfixturevalue("made_files" if name in FILES else "tiny_data")
    tmp_path /= "out"
    args = ["reproduce", name, "--variant", variant, "--scale", "smoke", "--out", str(tmp_path), "--json"]
    if name != "pieces":  # one experiment draws its figures, the others empty ones
        draw = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: draw(Figure((1, 1)), path))
    assert cli.run(args) == 0
    first = json.loads(capsys.readouterr().out)
    assert read_json(tmp_path / "summary.json") == first
    assert "failed" not in first
    drawn = {"pieces": {"curves.png", "activity.png"}, "ablation": {"losses.png"}, "all-rivals": {"losses.png"}}
    drawn["published"] = {"curves.png", "activity.png"}
    drawn["images"] = drawn["learned-start"] = {"curves.png"} | ({"pictures.png"} if name == "images" else set())
    searched = {"budgets.png"} if first.get("protocol") in ("paper", "once") else set()
    figures = {p.name for p in tmp_path.glob("*.png")} - {"certificate-runs.png"}  # some usages keep no certificate
    assert figures == {"profiles.png"} | drawn.get(variant or name, {"curves.png"}) | searched
    assert (tmp_path / "tables.md").read_text().count("\n|") > 2
    assert (tmp_path / "report.html").exists()
    if name != "pieces":
        return  # the others are kept in the same way, and the pages take a while to draw
    for computing in ("learn_geometry", "compare"):
        monkeypatch.setattr(leave_one_out, computing, lambda *args, **options: pytest.fail("it is computed again"))
    assert cli.run(args) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_all_runs_one_after_another_and_leaves_out_what_lacks_the_scale(tmp_path, capsys, tiny, monkeypatch):
    two = {pair: EXPERIMENTS[pair] for pair in (("quadratic", ""), ("rosenbrock", ""))}
    monkeypatch.setattr(report, "EXPERIMENTS", two)
    monkeypatch.delitem(rosenbrock.SCALES, "smoke")
    assert cli.run(["reproduce", "all", "--scale", "smoke", "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert list(json.loads(said.out)) == ["quadratic"]
    assert f"1 of 2: quadratic, in {tmp_path / 'quadratic'}" in said.err
    assert "2 of 2: rosenbrock has no scale smoke, and is left out." in said.err
    assert [p.name for p in tmp_path.iterdir()] == ["quadratic"]


def test_every_experiment_has_every_scale():
    """So that `reproduce all` leaves none out, at any scale."""
    assert {frozenset(experiment.scales) for experiment in EXPERIMENTS.values()} == {frozenset(("smoke", "cpu", "paper"))}


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_says_where_the_experiment_went(name, capsys, tmp_path):
    assert cli.run(["reproduce", name, "--out", str(tmp_path / "x")]) == 2
    assert f"Run: metamd reproduce {MOVED[name]}." in capsys.readouterr().err
    new, _, variant = MOVED[name].partition(" --variant ")
    assert (new, variant) in EXPERIMENTS
    assert not (tmp_path / "x").exists()


def test_what_is_no_experiment_is_refused():
    with pytest.raises(ValueError, match="must be one of quadratic, rosenbrock"):
        find("imagenet")
    with pytest.raises(ValueError, match="has the variants learned-start, got 'x'"):
        find("adaptation", "x")
    with pytest.raises(ValueError, match="pieces has no variants"):
        find("pieces", "x")


def test_the_losses_of_a_valley_are_those_of_torch():
    problems = Problems.draw(valleys(), 1, 0)
    key, setting = "sgd-m", {"lr": 0.001, "momentum": 0.9}
    found = synthetic.final_losses(problems, BATCHED_RIVALS[key], [setting, {"lr": 10.0, "momentum": 0.9}], steps=40)
    task = problems.tasks[0]
    x = torch.nn.Parameter(task.init()["theta"])
    optimiser = namesake(key, x, setting)
    for t in range(40):
        (x.grad,) = torch.autograd.grad(task.loss({"theta": x}, task.batch(t)), x)
        optimiser.step()
    assert found.shape == (2,)
    assert float(found[0]) == pytest.approx(task.evaluate({"theta": x.detach()}).loss, rel=1e-9)
    assert float(found[1]) == float("inf")


def test_every_published_number_is_in_the_table_from_far_whatever_was_run():
    """The paper's method has no result on the ill-conditioned row: its number stands alone."""
    one = {"iterations": [3], "setting": {}}
    places = [(row, start) for row in quadratic.ROWS for start in quadratic.STARTS]
    results = {f"{row}-{start}-{name}-{key}": one for row, start in places for name in quadratic.TOLERANCES for key in KEYS}
    parts = as_markdown(quadratic.sections(quadratic.table(results))).split("**Means")[1:]
    for (row, start), part in zip(places, parts, strict=True):
        lines = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
        shown = {line[0].removeprefix("| "): line[-1].removesuffix(" |") for line in lines}
        published = quadratic.PUBLISHED[row].items() if start == "far" else ()
        wanted = {label if label.startswith("MetaMD") else f"{label} (rate)": f"{number:,}" for label, number in published}
        assert {label: number for label, number in shown.items() if number} == wanted
        assert {len(line) for line in lines} == {9}
        assert ("| MetaMD, paper | no result here |" in part) == (start == "far")


KEYS = ("best-diagonal", "sgd-rate", "sgd-m-rate", "adam-rate")


@pytest.mark.parametrize("experiment", [quadratic, rosenbrock], ids=["quadratic", "rosenbrock"])
def test_the_summary_of_a_page_is_what_the_records_say(experiment):
    """The page is compared with the summary in tests/test_docs.py."""
    folder = Path(__file__).parents[2] / "results" / experiment.__name__.rpartition(".")[2]
    with records_in(folder) as records:
        found = experiment.table(read_cells(records))
    assert as_json(found) == read_json(folder / "summary.json")["rows"]


def test_a_record_is_unpacked_without_what_was_learned(tmp_path):
    spec = importlib.util.spec_from_file_location("relearn", ROOT / "scripts" / "relearn.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record, folder = ROOT / "results" / "rotated-mnist-mlp-averages", tmp_path / "again"
    kept = module.relearn(record, folder)

    def cells(folder):
        places = [p.parent for p in folder.rglob("run.json")]
        return {f"{place.relative_to(folder)}/{name}": cell for place in places for name, cell in read_cells(place).items()}

    with records_in(record) as whole:
        there = cells(whole)
        assert list(whole.rglob("comparison.json"))
    left = cells(folder)
    assert not list(folder.rglob("comparison.json"))
    assert kept == len(left) > 200
    assert left.items() <= there.items()
    assert {name.split("/")[-1].split("-")[0] for name in there.keys() - left.keys()} == {"learn", "metamd", "seconds"}
    assert not any("learn-" in name or "/metamd-" in name for name in left)
    with pytest.raises(FileExistsError):
        module.relearn(record, folder)
