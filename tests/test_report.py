"""The page of report.py has every curve of a run, and no text of a run becomes markup. Scripts of
docs/trackers.md send every step."""

import json
import math
import re
import sys
from itertools import chain
from unittest.mock import MagicMock

import pytest
from conftest import ROOT, launch, refused

from report import PANELS, POINTS, page_of, panels_of, read_run

CURVES = ("loss", "bits_per_byte", "grad_norm", "lr", "tokens_per_second", "memory_bytes")
HOSTILE = "</script><img src=x onerror=alert(1)><!--"


def write_run(directory, steps: int):
    """Write a run's files as train.py does, with a loss of 2 + 1/step; return its directory."""
    directory.mkdir()
    flags = {"lr": 0.02, "seed": 0, "prompt": HOSTILE}
    facts = {"command": f"train.py {HOSTILE}", "ranks": 2}
    config = {"flags": flags, "run": facts}
    (directory / "config.json").write_text(json.dumps(config))
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            curves = dict.fromkeys(CURVES, 2 + 1 / step)
            row = {"step": step, "tokens": 8 * step} | curves
            if step == steps:
                row |= {"val_loss": 2.5, "val_bits_per_byte": 1.5, "sample": HOSTILE}
            print(json.dumps(row), file=file)
    return directory


def test_a_record_that_is_broken_or_grows_is_read(tmp_path, capsys):
    refused(launch("report.py", tmp_path), "is no run: it has no metrics")
    out = write_run(tmp_path / "run", 3)
    rows = ["no JSON", "[1]", '{"step": "x"}', '{"step": 4, "tokens": 32, "loss": NaN}', '{"step"']
    with open(out / "metrics.jsonl", "a") as file:
        file.write("\n".join(rows))
    (out / "config.json").unlink()
    run = read_run(out)
    assert "left out 3 lines that are damaged, the first is line 4" in capsys.readouterr().err
    assert run["step"] == [1, 2, 3, 4]
    assert run["curves"]["loss"] == [3.0, 2.5, 2.33333, None]
    assert run["not_finite"]["loss"] == [3] and run["not_finite"]["lr"] == []
    assert run["flags"] == {}


def test_a_long_run_is_thinned_by_means(tmp_path):
    steps = 2 * POINTS + 1
    out = write_run(tmp_path / "run", steps)
    (out / "config.json").write_text('{"flags": {"lr": null, "dp": "auto"}, "facts": {"lr": 0.02}}')
    run = read_run(out)
    assert run["flags"] == {"lr": "0.02", "dp": "auto"}  # given, or chosen by the run
    size = run["steps_a_point"]
    assert size == 3
    assert run["step"][0] == size
    assert len(run["step"]) == math.ceil(steps / size)
    mean = 2 + (1 + 1 / 2 + 1 / 3) / 3
    assert run["curves"]["loss"][0] == pytest.approx(mean, rel=1e-5)
    assert run["evaluations"][0]["step"] == steps  # evaluations are all there


def test_losses_of_different_kinds_have_panels_of_their_own(tmp_path):
    """So have numbers that the page does not know."""
    kinds = {
        "text": {"bits_per_byte": 1.0},
        "pairs": {"margin": 0.5, "accuracy": 1.0},
        "rewards": {"reward": 0.5, "news": 0.1, "val_reward": 0.4},
        "teacher": {"agreement": 0.5},
    }
    found = {}
    for name, measures in kinds.items():
        out = write_run(tmp_path / name, 0)
        row = {"step": 1, "tokens": 8, "loss": 2.0, "val_loss": 3.0, "seconds": 1.0} | measures
        (out / "metrics.jsonl").write_text(json.dumps(row))
        found[name] = read_run(out)
    curves = {name: run["curves"].keys() - kinds[name] for name, run in found.items()}
    losses = {"pairs": {"loss_of_pairs"}, "rewards": {"loss_of_rewards"}}
    assert curves == losses | {"text": {"loss"}, "teacher": {"loss_of_teacher"}}
    evaluated = [name for run in found.values() for name in run["evaluations"][0]]
    evaluated = {name for name in evaluated if name.startswith("val")}
    assert evaluated == {"val_loss", "val_loss_of_pairs", "val_reward", "val_loss_of_teacher"}
    assert [panel.title for panel in panels_of([*found.values()])[len(PANELS) :]] == ["news"]


def test_what_the_pages_say_to_watch_has_a_panel():
    page = (ROOT / "docs/preferences.md").read_text()
    (rewards,) = re.findall(r"^Watch `(reward)`", page, re.MULTILINE)
    bullets = re.findall(r"^\* `(\w+)`(?: and `(\w+)`)?", page, re.MULTILINE)
    watched = {rewards, *chain(*bullets), "end", "length"} - {""}
    watched |= {"chosen", "margin", "accuracy"}
    assert watched > {"mixed", "log_ratio", "sampling_seconds"}
    assert watched <= {panel.curve for panel in PANELS}
    assert all(panel.unit for panel in PANELS)
    assert len({panel.title for panel in PANELS}) == len(PANELS)


def test_no_text_of_a_run_becomes_markup(tmp_path):
    """Neither in the script that holds it as JSON, nor where that script shows it."""
    run = read_run(write_run(tmp_path / "run", 50))
    assert run["flags"]["prompt"] == HOSTILE
    page = page_of([run])
    assert "<img" not in page
    assert "innerHTML" not in page
    (line,) = re.findall(r'^.*\{"runs": .*$', page, re.MULTILINE)
    held = line[line.index("{") : line.rindex("}") + 1]
    found = json.loads(held)
    assert found["runs"] == [run]
    assert [panel["curve"] for panel in found["panels"]] == [panel.curve for panel in PANELS]


def test_trackers_are_sent_every_step(tmp_path, monkeypatch):
    out = write_run(tmp_path / "run", 3)
    path = out / "metrics.jsonl"
    with_mfu = path.read_text().replace("{", '{"mfu": null, ')
    path.write_text(with_mfu)
    page = (ROOT / "docs/trackers.md").read_text()
    to_wandb, to_tensorboard = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    wandb = MagicMock()
    tensorboard = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setattr(sys, "argv", ["send.py", str(out)])
    exec(to_wandb, {})
    exec(to_tensorboard, {})
    logged = wandb.init.return_value.log.call_args_list
    assert [call.kwargs["step"] for call in logged] == [1, 2, 3]
    assert logged[1].args[0]["loss"] == 2.5
    assert "sample" not in logged[2].args[0]
    writer = tensorboard.SummaryWriter.return_value.__enter__.return_value
    scalars = {call.args for call in writer.add_scalar.call_args_list}
    assert {("loss", 2.5, 2), ("val_loss", 2.5, 3)} < scalars
    assert {name for name, _, _ in scalars}.isdisjoint({"mfu", "sample"})
