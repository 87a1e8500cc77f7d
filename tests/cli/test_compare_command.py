"""The commands compare and report: what they print, write, refuse and continue."""

import base64
import html
import json
import platform
import re
import shutil
from dataclasses import asdict, replace
from importlib import metadata
from importlib.util import find_spec
from statistics import median

import pytest
import torch

from metamd import Comparison, Stated, certify, compare, load, rivals, tasks
from metamd.cli import main as cli
from metamd.cli.compare import _our_contender
from metamd.cli.options import Compare
from metamd.cli.report import read_comparison, summary, write_report
from metamd.comparison.entrants import draw_configs
from metamd.comparison.sections import certificate_sections, certified_runs, run_certificates, uninformative
from metamd.experiments import EXPERIMENTS
from metamd.files.store import Records
from metamd.files.usage import Usage
from metamd.files.versions import environment
from metamd.rivals import rival
from tests import processes
from tests.helpers import NASTY
from tests.small_comparisons import bare

pytest.importorskip("matplotlib")


pytest.importorskip("jinja2")


QUADRATIC = tasks.quadratic((0.5, 4.0), steps=30)


SMALL = ["--protocol", "handicap", "--rivals", "sgd", "adam", "--budget", "3", "--seeds", "2", "--steps", "30"]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    out = tmp_path_factory.mktemp("learned") / "q.safetensors"
    quick = ["--steps", "30", "--outer-steps", "2", "--tasks", "2"]
    assert cli.run(["train", "quadratic", "--out", str(out), *quick]) == 0
    return out


@pytest.fixture(scope="module")
def compared(learned, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    assert cli.run(["compare", str(learned), "quadratic", "--out", str(out), *SMALL]) == 0
    return out


def test_a_comparison_from_the_command_line(compared, learned, capsys):
    before = {p.name: p.stat().st_mtime_ns for p in (compared / "cells").iterdir()}
    assert cli.run(["compare", str(learned), "quadratic", "--out", str(compared), "--json", *SMALL]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert {p.name: p.stat().st_mtime_ns for p in (compared / "cells").iterdir()} == before, "something was run twice"
    assert found["protocol"] == "handicap"
    labels = [row["label"] for row in found["tables"]["mean_loss"]]
    assert labels[0] == "MetaMD"
    assert labels[1:] == ["SGD", "SGD, linear decay", "Adam", "Adam, linear decay", "SGD, untuned", "Adam, untuned"]
    assert set(found["tasks_to_pay"]) == set(labels[1:])
    comparison = Comparison.read(compared)
    assert comparison.aim.baseline == "Adam"
    assert summary(comparison)["tables"] == found["tables"]


def test_once_is_the_protocol_by_default(learned, tmp_path, capsys):
    """It says beforehand how many tasks it takes, and takes that many; a second call computes nothing again."""
    asked = ["compare", str(learned), "quadratic", "--rivals", "sgd", "adam", "--gradients", "900", "--out", str(tmp_path)]
    assert cli.run([*asked, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["protocol"] == "once"
    labels = [row["label"] for row in found["tables"]["mean_loss"]]
    assert [x for x in labels if "chosen for the end" not in x] == ["MetaMD", "SGD", "Adam", "SGD, untuned", "Adam, untuned"]
    assert set(found["tables"]) >= {"tenth_loss", "half_loss", "final_loss", "seconds_to_target"}
    comparison = Comparison.read(tmp_path)
    assert (comparison.aim.baseline, comparison.aim.share) == ("Adam", 1.0)
    tasks_each = len(comparison.groups)
    assert f"The comparison has {tasks_each} tasks. Against 7 others the smallest p is" in said.err
    assert all(d.p < 0.05 or d.wins < tasks_each for d in comparison.differences("mean_loss"))
    for label in ("SGD", "Adam"):
        assert comparison.folds[0].tunings[label].gradients <= 900
    page = (tmp_path / "report.md").read_text()
    assert "Protocol: once" in page
    assert "warm-up" in page
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("cells/*.json")}
    assert cli.run([*asked, "--json"]) == 0
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("cells/*.json")} == before, "something was run twice"
    assert json.loads(capsys.readouterr().out) == found
    assert cli.run([*asked, "--protocol", "handicap"]) == 2
    assert "--gradients would change nothing without --protocol once" in capsys.readouterr().err


def test_the_timing_of_steps_shows_how_far_it_is_on_standard_error_alone(learned, tmp_path, capsys):
    assert cli.run(["compare", str(learned), "quadratic", "--out", str(tmp_path), "--json", *SMALL]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["protocol"] == "handicap"
    (line,) = (line for line in said.err.splitlines() if line.startswith("timing steps"))
    assert "9 of 9" in line, "3 blocks of MetaMD, SGD and Adam: see hardly_timed in conftest"
    compare({"a": rival("sgd").untuned()}, QUADRATIC, bare(seeds=1))
    assert capsys.readouterr() == ("", ""), "Python shows progress on a terminal alone"


def help_of(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")  # one line for each option's text
    with pytest.raises(SystemExit, match="0"):
        cli.run([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "known", "near"),
    [
        ("compare", {*rivals.RIVALS, *rivals.LEARNERS}, "nesterov"),
        ("train", set(tasks.FAMILIES), "my.py:family"),
        ("certify", {"rotated-mnist", "pictures", "burgers"}, "of a resnet18"),
        ("reproduce", {name for name, _ in EXPERIMENTS}, "all runs one after another"),
        ("reproduce", {variant for _, variant in EXPERIMENTS if variant}, "of rotated-mnist-mlp:"),
    ],
)
def test_help_names_all_that_is_declared(command, known, near, capsys, monkeypatch):
    shown = help_of(command, capsys, monkeypatch)
    (line,) = (line for line in shown.splitlines() if near in line)
    assert not known - set(re.findall(r"[a-z0-9-]+", line))
    assert "{" not in line.partition("(default")[0]


def test_a_momentum_takes_the_place_of_the_tail_average_and_help_says_so(learned, capsys, monkeypatch):
    made = load(learned)
    made = replace(made, header=replace(made.header, usage=asdict(Usage(averaging="tail"))))
    entered = {m: _our_contender(made, Compare("x", "quadratic", momentum=m)).rival.identity for m in (None, 0.0, 0.5)}
    assert ['"averaging": "tail"' in identity for identity in entered.values()] == [True, True, False]
    assert "One above 0 takes the place of a tail average" in help_of("compare", capsys, monkeypatch)


def test_help_says_that_several_domains_can_be_named(capsys, monkeypatch):
    assert "--only DOMAIN [DOMAIN ...]" in help_of("reproduce", capsys, monkeypatch)


def test_the_page_needs_nothing_beside_it_and_names_its_protocol(compared, capsys):
    assert cli.run(["report", str(compared), "--target", "SGD", "--share", "0.5"]) == 0
    said = capsys.readouterr().out
    page, text = (compared / "report.html").read_text(), (compared / "report.md").read_text()
    assert "Certificate of the runs" in page
    assert len(re.findall(r'src="data:image/png;base64,', page)) == 4
    assert not re.search(r'(src|href)="(?!data:)', page)
    for shown in (said, page, text):
        assert "Performance profiles" in shown
        assert "Costs" in shown
        assert "Protocol: handicap" in shown
    assert "version of torch" in page
    assert "report.html" in said
    assert text.count("In report.html: ") == 4, "a caption for every figure"
    assert "MetaMD's mean training loss is" in said
    assert "undecided" not in said, "a terminal has the headline and one table"
    before, after = page.split("<details>", 1)
    assert "undecided" in after
    assert before.index('class="headline"') < before.index("<img") < before.index("<table")
    assert (before.count("<img"), before.count("<table")) == (1, 1)
    assert figures_of(compared) == {"profiles.png", "certificate-runs.png"}, "the rates of a handicap are no search"


def test_the_page_has_the_certificate_of_the_runs_where_records_have_it(compared, tmp_path):
    comparison, _ = read_comparison(compared)
    runs = certified_runs(comparison)
    (part,) = run_certificates(comparison, tmp_path)
    loss, bound = (median(run[i] for run in runs) for i in (0, 1))
    nothing = sum(b >= m and least >= 0 for m, b, least in runs)
    assert part.texts[0].startswith(
        "If losses were convex, no model as near to the start as the end of a run would have had "
    )
    assert f"more than {bound:.4g} below that of the run, which is {loss:.4g} (medians of {len(runs)} runs" in part.texts[0]
    assert f"For {nothing} of them that says nothing" in part.texts[0] or not nothing
    assert [path.name for path, _ in part.figures] == ["certificate-runs.png"]
    # losses that fall below zero do not obey a bound by themselves
    assert [uninformative([run]) for run in ((1.0, 2.0, 0.5), (1.0, 0.9, 0.5), (1.0, 2.0, -0.5))] == [1, 0, 0]
    # records of an earlier version have none, and their page says nothing of it
    older = replace(comparison, folds=tuple(replace(f, entrants=without_certificates(f.entrants)) for f in comparison.folds))
    assert run_certificates(older, tmp_path) == []


def without_certificates(entrants):
    return {
        label: tuple(replace(c, outcomes=tuple(replace(o, certificate={}) for o in c.outcomes)) for c in candidates)
        for label, candidates in entrants.items()
    }


def figures_of(folder):
    """The names of the figures beside a page, each of which the page has inside."""
    found, page = list(folder.glob("*.png")), (folder / "report.html").read_text()
    assert all(f'base64,{base64.b64encode(path.read_bytes()).decode()}"' in page for path in found)
    return {path.name for path in found}


def test_the_page_says_who_set_the_target(compared, tmp_path, capsys):
    assert cli.run(["report", str(compared), "--share", "0.5", "--out", str(tmp_path)]) == 0
    assert "after 50% of its steps" in capsys.readouterr().out.replace("\n", " ")
    assert cli.run(["report", str(compared), "--share", "3", "--out", str(tmp_path / "none")]) == 2
    assert "share must lie in (0, 1], got 3.0" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_what_else_lies_beside_the_records_is_shown_as_it_is(compared):
    path = compared / "certificate.json"
    path.write_text(json.dumps({"bound": 1.25, "what": "<b>", "certificates": {"<i>": [2.5]}}))
    write_report(compared, compared)
    path.unlink()
    page = (compared / "report.html").read_text()
    assert "Certificate" in page
    assert "1.25" in page
    assert "2.5" in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_the_certificate_of_a_file_is_shown_in_words(learned, tmp_path, capsys):
    """As `metamd certify` prints it, and not as JSON."""
    file = tmp_path / "certified.safetensors"
    assert cli.run(["certify", str(learned), "quadratic", "--held-out-tasks", "20", "--out", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert cli.run(["compare", str(file), "quadratic", "--out", str(tmp_path / "o"), *SMALL]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = load(file).header.held_out["certificates"]["quadratic"]
    steps = next(s for s in found["statements"] if s["quantity"].startswith("steps"))
    for sentence in (f"{steps['quantity']} <= {steps['bound']:.5g} [{steps['basis']}]", found["assumptions"][0]):
        assert sentence in printed
        assert sentence in " ".join(html.unescape((tmp_path / "o" / "report.html").read_text()).split())
    for shown in (said, (tmp_path / "o" / "report.html").read_text(), (tmp_path / "o" / "report.md").read_text()):
        assert "Certificate of the file: quadratic" in shown
        assert "Every statement of it, and what it rests on: quadratic" in shown
        assert "confidence" not in shown.replace("&#34;", '"'), "a field of the JSON is no word of the page"


def test_the_certificate_of_a_file_opens_with_one_sentence_and_a_figure(learned, tmp_path):
    found = certify(load(learned), tasks.quadratic(steps=20), held_out_tasks=20, stated=Stated(target=1.0))
    first, second = certificate_sections({"certificates": {"quadratic": found.to_dict()}}, tmp_path)
    (sentence,), ((figure, caption),) = first.texts, first.figures
    assert sentence.startswith("For the next task, ")
    assert sentence.endswith(", with probability 95 %.")
    assert figure.is_file()
    assert caption == "20 held-out tasks in order, and the bound for the next at 95 %."
    assert list(second.texts) == found.paragraphs()
    few = certify(load(learned), tasks.quadratic(steps=20), held_out_tasks=3, stated=Stated(target=1.0))
    none, _ = certificate_sections({"certificates": {"quadratic": few.to_dict()}}, tmp_path)
    assert none.texts == ["3 held-out tasks give no bound for the next task at 95 %."]


def trained_on(file, domains, tmp_path):
    """The same file, with a header that says which domains it was learned on."""
    made = load(file)
    family = {**made.header.family, "domains": domains}
    replace(made, header=replace(made.header, family=family)).save(tmp_path / "trained.safetensors")
    return tmp_path / "trained.safetensors"


def test_a_domain_that_the_file_was_trained_on_is_called_so_everywhere(learned, tmp_path, capsys):
    """The table, the JSON and the pages; a file of other domains is not accused."""
    for domains, seen in ((["quadratic", "x"], True), (["x"], False)):
        out = tmp_path / domains[0]
        file = trained_on(learned, domains, tmp_path)
        args = ["compare", str(file), "quadratic", "--out", str(out), "--json", *SMALL]
        assert cli.run(args) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["held_out"] == {"quadratic": not seen}
        assert found["trained_on"] == ({"MetaMD": ["quadratic"]} if seen else {})
        assert cli.run([a for a in args if a != "--json"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        for shown in (said, (out / "report.html").read_text(), (out / "report.md").read_text()):
            assert ("MetaMD was trained on this domain: not held out (quadratic)" in shown) == seen
            assert ("MetaMD (not held out)" in shown) == seen
        for shown in ((out / "report.html").read_text(), (out / "report.md").read_text()):
            assert ("Held-out domains: quadratic" in shown) == (not seen)
        assert Comparison.read(out).trained_on("MetaMD") == (["quadratic"] if seen else [])


def test_a_comparison_knows_tasks_and_domains_that_were_learned_on():
    """Also without the command line: by domain, or by a task whose hash the file has."""
    configs = draw_configs(QUADRATIC, 2, 0)["quadratic"]
    one = rival("sgd")
    both = {
        "by task": replace(one, tasks=(tasks.config_hash(configs[1]),)).untuned(),
        "by domain": replace(one, domains=("quadratic",)).untuned(),
        "neither": replace(one, tasks=("0" * 32,), domains=("x",)).untuned(),
    }
    found = compare(both, QUADRATIC, bare(seeds=2))
    assert found.folds[0].trained == ("by task", "by domain")
    assert [found.trained_on(label) for label in both] == [["quadratic"], ["quadratic"], []]


def test_everybody_is_tuned_by_bayesian_optimisation_under_the_papers_protocol(tmp_path, capsys):
    pytest.importorskip("botorch")
    file, out = tmp_path / "l.safetensors", tmp_path / "out"
    quick = ["--potential", "diagonal", "--steps", "10", "--outer-steps", "1", "--tasks", "4"]
    assert cli.run(["train", "logistic", "--out", str(file), *quick]) == 0
    asked = ["--protocol", "paper", "--search", "bayes", "--budget", "7", "--rivals", "sgd", "--seeds", "1", "--steps", "10"]
    capsys.readouterr()
    assert cli.run(["compare", str(file), "logistic", "--out", str(out), "--json", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["protocol"] == "paper"
    (fold,) = Comparison.read(out).folds
    assert set(fold.tunings) == {"MetaMD", "SGD", "SGD, linear decay"}, "MetaMD too, with the same budget"
    for label, tuning in fold.tunings.items():
        assert len(tuning.best_so_far) == 7
        assert list(tuning.best_so_far) == sorted(tuning.best_so_far, reverse=True)
        assert set(fold.entrants[label][0].contender["setting"]) >= {"lr", "weight_decay"}
    assert len(list((out / "tuning" / "cells").glob("trial-*.json"))) == 3 * 7, "every trial is a record"
    assert "Protocol: paper" in (out / "report.md").read_text()


def test_a_folder_of_another_comparison_is_refused_before_the_search(learned, compared, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(compared, out)
    asked = ["compare", str(learned), "quadratic", "--out", str(out), "--protocol", "paper", "--steps", "20"]
    assert cli.run([*asked, "--rivals", "sgd", "--budget", "2", "--seeds", "2"]) == 2
    assert "holds a run with other settings" in capsys.readouterr().err
    assert not (out / "tuning").exists(), "nothing was searched"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("run.json", lambda found: found | {"settings": []}, "must have the settings of the run"),
        ("comparison.json", lambda found: costly(found, "1e999"), "seconds and costs must be numbers"),
        ("comparison.json", lambda found: costly(found, -1), "seconds and costs must be numbers"),
        ("cell", lambda found: found | {"gradients": 10**400}, "below 2^53"),
        ("cell", lambda found: found | {"losses": [1e308] * len(found["losses"])}, "must have losses below"),
        ("cell", lambda found: found | {k: found[k][:-1] for k in ("places", "losses")}, "at the same places"),
    ],
)
def test_records_that_no_table_can_be_made_of_are_sentences(file, change, said, compared, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(compared, out)
    path = next((out / "cells").glob("adam-*.json")) if file == "cell" else out / file
    path.write_text(json.dumps(change(json.loads(path.read_text()))).replace('"1e999"', "1e999"))
    capsys.readouterr()
    assert cli.run(["report", str(out)]) == 2
    assert said in capsys.readouterr().err


def costly(found, value):
    found["folds"][0]["costs"]["MetaMD"] = {"gradient_evaluations": value}
    return found


def test_versions_are_those_of_rivals_and_tuning_too_and_files_have_no_more(compared, learned):
    found = json.loads((compared / "comparison.json").read_text())["versions"]
    assert found == environment()
    assert found["torch"] == torch.__version__
    for name in ("pytorch_optimizer", "schedulefree", "prodigyopt", "botorch", "gpytorch"):
        assert found.get(name) == (metadata.version(name) if find_spec(name) else None)
    assert set(load(learned).header.versions) == {"metamd", "torch", "safetensors", "python"}


def test_a_page_of_several_folders_has_all_versions_that_differ(compared, tmp_path):
    for domain, changed in {"a": {"torch": "1.0"}, "b": {"torch": "2.0", "botorch": None}, "c": {"torch": "1.0"}}.items():
        shutil.copytree(compared, tmp_path / domain)
        path = tmp_path / domain / "comparison.json"
        found = json.loads(path.read_text())
        found["folds"][0]["group"] = domain
        found["versions"] = {k: v for k, v in (found["versions"] | {"botorch": "0.1"} | changed).items() if v is not None}
        path.write_text(json.dumps(found))
    assert read_comparison(tmp_path)[1]["python"] == platform.python_version(), "what is the same is said once"
    write_report(tmp_path, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| version of torch | 1.0 (a, c); 2.0 (b) |" in text
    assert "| version of botorch | 0.1 (a, c); not recorded (b) |" in text


def test_a_report_without_a_certificate_says_so(compared, capsys):
    assert not (compared / "certificate.json").exists()
    assert cli.run(["report", str(compared)]) == 0
    assert "Certificate" in capsys.readouterr().out
    assert "None lies beside these records" in (compared / "report.html").read_text()


def own_summary(folder, who="Adam"):
    """The summary of an experiment that compares in a way of its own."""
    row = {"start": "customary", "optimiser": who, "loss": 0.5, "distance": 0.25, "reached": True, "setting": {}}
    (folder / "summary.json").write_text(json.dumps({"experiment": "rosenbrock", "rows": [row]}))


def test_what_compares_in_a_way_of_its_own_is_shown_with_its_tables_and_figures(tmp_path, capsys):
    own_summary(tmp_path, "<b>Adam</b>")
    (tmp_path / "iterations.png").write_bytes(b"not looked at")
    assert cli.run(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(tmp_path / "report.html")
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert "<td>5.0e-01</td>" in page
    assert "&lt;b&gt;Adam" in page
    assert "<b>" not in page
    assert "data:image/png;base64," in page
    assert "| 5.0e-01 | 2.5e-01 | yes |" in text
    assert cli.run(["report", str(tmp_path), "--share", "0.5"]) == 2
    assert "Leave out --target and --share" in capsys.readouterr().err


@pytest.mark.parametrize(
    "summary", [{}, {"experiment": "os"}, {"experiment": "rosenbrock"}, {"experiment": "quadratic", "rows": [1]}]
)
def test_a_summary_that_is_none_is_refused_in_a_sentence(summary, tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "summary" in capsys.readouterr().err


def test_settings_and_costs_of_an_experiment_of_its_own_are_shown_as_text(tmp_path, capsys):
    """From records that try to be markup; a cost that is none is left out, settings that are none refused."""
    own_summary(tmp_path)
    Records(tmp_path, {"scale": NASTY, NASTY: [1, 2]}).cell("one", lambda: {"cost": {"outer_steps": 20}})
    for name, cost in {"two": {NASTY: NASTY}, "three": 7, "four": None}.items():
        (tmp_path / "cells" / f"{name}.json").write_text(json.dumps({"cost": cost}))
    assert cli.run(["report", str(tmp_path)]) == 0
    said, page, text = capsys.readouterr().out, (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert re.search(r"\| one \| 20 \|  \|\n", text)
    assert "| two |  | &lt;script&gt;" in text
    assert "| three |" not in text
    assert "| scale | &lt;script&gt;" in text
    assert "<td>[1, 2]</td>" in page
    assert "<script" not in page + text
    assert "\x1b" not in said + page + text
    assert "[x](javascript" not in text
    assert "Costs" in said
    assert "[1, 2]" not in said, "a terminal is spared the configuration, as of comparisons"
    (tmp_path / "run.json").write_text('{"settings": 3}')
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "must have the settings of the run" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["sgd", "SGD, untuned"])
def test_targets_are_names_or_labels_in_both_commands(target, learned, compared, tmp_path, capsys):
    comparison = Comparison.read(compared)
    assert [comparison.aiming(w).aim.baseline for w in ("adam", "metamd", *comparison.labels)] == [
        *("Adam", "MetaMD"),
        *comparison.labels,
    ]
    with pytest.raises(ValueError, match="or the name of a rival such as adam; got 'soap'"):
        comparison.aiming("soap")
    assert cli.run(["compare", str(learned), "quadratic", "--out", str(compared), "--target", target, *SMALL]) == 0
    first = " ".join(capsys.readouterr().out.split())
    assert cli.run(["report", str(compared), "--target", target, "--out", str(tmp_path)]) == 0
    second = " ".join(capsys.readouterr().out.split())
    label = "SGD" if target == "sgd" else target
    assert f"The target is the loss of {label} after 75% of its steps" in first
    assert f"The target is the loss of {label} after 75% of its steps" in second


def test_what_is_refused_leaves_nothing_behind(learned, tmp_path, capsys):
    """A family that the file does not fit, above all: its folder must not stand in the way of the next try."""
    out = tmp_path / "o"
    start = ["compare", str(learned)]
    for args in (
        ["tabular"],
        ["tabular", "--rivals", "aruba"],
        ["tabular", "--protocol", "paper"],
        ["quadratic", "--protocol", "paper", "--budget", "0"],
        ["quadratic", "--protocol", "paper", "--seeds", "0"],
        ["quadratic", "--target", "soap"],
    ):
        assert cli.run([*start, *args, "--out", str(out)]) == 2
        assert not out.exists(), args
    assert "--target must be one of the rivals" in capsys.readouterr().err
    assert cli.run([*start, "quadratic", "--out", str(out), *SMALL]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["compare", "FILE", "quadratic", "--rivals", "adamm"], "there is no rival 'adamm'"),
        (["compare", "FILE", "quadratic", "--schedules"], "--schedules must name one of constant, linear, quadratic"),
        (["compare", "FILE", "quadratic", "--rivals", "meta"], "learned-schedule"),
        (["compare", "FILE", "nothing"], "there is no family 'nothing'"),
        (["compare", "FILE", "quadratic", "--target", "soap"], "--target must be one of the rivals"),
        (["compare", "FILE", "quadratic", "--budget", "0"], "budget must be at least 1"),
        (["compare", "FILE", "quadratic", "--seeds", "0"], "seeds must be at least 1"),
        (["compare", "no-such", "quadratic"], "no learned optimiser 'no-such'"),
        (["report", "EMPTY"], "holds no comparison"),
        (["reproduce", "quadratic", "--scale", "smoke", "--out", "FILE"], "a folder is required where"),
        (["reproduce", "quadratic", "--only", "45", "--out", "EMPTY"], "quadratic holds out no domains"),
    ],
)
def test_bad_input_is_a_sentence(args, message, learned, tmp_path, capsys):
    real = [str(learned) if a == "FILE" else str(tmp_path) if a == "EMPTY" else a for a in args]
    out = ["--out", str(tmp_path / "o")] if args[0] == "compare" else []
    assert cli.run([*real, *out]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in said


@pytest.mark.parametrize(("how", "code"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_a_stopped_comparison_continues(how, code, learned, tmp_path, capsys):
    args = ["compare", str(learned), "quadratic", "--out", str(tmp_path), "--rivals", "sgd", "--budget", "4"]
    args += ["--protocol", "handicap"]
    args += ["--steps", "20", "--seeds", "3", "--workers", "2", "--json"]
    first = processes.run(processes.command, f"cell:8:{how}", *args)
    assert first.code == code, first.err
    assert ("the same command continues" in first.err) == (how == "SIGINT")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*.json")}
    assert len(before) == 8
    assert cli.run(args) == 0
    assert json.loads(capsys.readouterr().out)["protocol"] == "handicap"
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a finished cell was computed twice"
    assert len(list(tmp_path.glob("cells/*.json"))) > 8


@pytest.mark.parametrize("change", ["not json", '{"folds": []}', '{"folds": [{}]}', "[]", '{"folds": null}', '{"a": NaN}'])
def test_broken_indexes_are_sentences(change, tmp_path, capsys):
    compare({"a": rival("sgd").untuned()}, QUADRATIC, bare(seeds=1), folder=tmp_path)
    (tmp_path / "comparison.json").write_text(change)
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "comparison.json" in capsys.readouterr().err


def test_the_certificate_of_the_file_is_on_the_page_and_that_of_another_does_not_stay(learned, tmp_path):
    found = load(learned)
    header = replace(found.header, held_out={"tasks": 12, "what": "an invented bound of 7"})
    replace(found, header=header).save(tmp_path / "certified.safetensors")
    for file, shown in ((tmp_path / "certified.safetensors", True), (learned, False)):
        assert cli.run(["compare", str(file), "quadratic", "--out", str(tmp_path / "out"), *SMALL]) == 0
        assert ("an invented bound of 7" in (tmp_path / "out" / "report.html").read_text()) is shown


def test_everybody_begins_at_the_start_that_the_file_was_learned_for(tmp_path, capsys):
    torch.save({"theta": torch.tensor([0.5, -0.5], dtype=torch.float64)}, tmp_path / "start.pt")
    file = tmp_path / "shared.safetensors"
    quick = ["--steps", "30", "--outer-steps", "1", "--tasks", "2", "--start", str(tmp_path / "start.pt")]
    assert cli.run(["train", "quadratic", "--out", str(file), *quick]) == 0
    assert cli.run(["compare", str(file), "quadratic", "--out", str(tmp_path / "no"), *SMALL]) == 2
    assert "begin at one model, which is not in the file. Pass it with --start CHECKPOINT" in capsys.readouterr().err
    given = ["--start", str(tmp_path / "start.pt")]
    assert cli.run(["compare", str(file), "quadratic", "--out", str(tmp_path / "given"), *SMALL, *given]) == 0
    inside = tmp_path / "inside.safetensors"
    load(file).with_start(torch.load(tmp_path / "start.pt")).save(inside)
    capsys.readouterr()
    assert cli.run(["compare", str(inside), "quadratic", "--out", str(tmp_path / "inside"), *SMALL]) == 0
    assert "everybody begins at the learned start that is in the file" in capsys.readouterr().err
    starts = [json.loads((tmp_path / n / "run.json").read_text())["settings"]["family"] for n in ("given", "inside")]
    assert starts[0]["start_hash"] == starts[1]["start_hash"]
