"""report.py: every curve of a run is on the page, and no text of a run becomes markup."""

import json
import math
import re
import shutil
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
from conftest import ROOT, launch, refused

from report import CURVES, POINTS, page_of, read_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=alert(1)><!--"


def write_run(directory, steps: int, **changed):
    """Write a run's files as train.py does, with a loss of 2 + 1/step; return its directory."""
    directory.mkdir()
    flags = {"lr": 0.02, "seed": 0, "prompt": HOSTILE} | changed
    config = {"flags": flags, "run": {"command": f"train.py {HOSTILE}", "ranks": 2}}
    (directory / "config.json").write_text(json.dumps(config))
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "tokens": 8 * step} | {name: 2 + 1 / step for name in CURVES}
            if step == steps:
                row |= {"val_loss": 2.5, "val_bits_per_byte": 1.5, "sample": HOSTILE}
            print(json.dumps(row), file=file)
    return directory


def test_a_record_that_is_broken_or_grows_is_read(tmp_path, capsys):
    refused(launch("report.py", tmp_path), "is no run of train.py")
    out = write_run(tmp_path / "run", 3)
    rows = ["no JSON", "[1]", '{"step": "x"}', '{"step": 4, "tokens": 32, "loss": NaN}', '{"step"']
    with open(out / "metrics.jsonl", "a") as file:
        file.write("\n".join(rows))
    (out / "config.json").unlink()
    run = read_run(out)
    assert "left out 3 lines that are damaged, the first is line 4" in capsys.readouterr().err
    assert run["step"] == [1, 2, 3, 4]
    assert run["curves"]["loss"] == [3.0, 2.5, 2.33333, None]
    assert run["flags"] == {}


def test_a_long_run_is_thinned_by_means(tmp_path):
    run = read_run(write_run(tmp_path / "run", 2 * POINTS + 1))
    size = run["steps_a_point"]
    assert size == 3 and run["step"][0] == size
    assert len(run["step"]) == math.ceil((2 * POINTS + 1) / size)
    assert run["curves"]["loss"][0] == pytest.approx(2 + (1 + 1 / 2 + 1 / 3) / 3, rel=1e-5)
    assert run["evaluations"][0]["step"] == 2 * POINTS + 1  # evaluations are all there


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_browser_draws_every_curve_and_no_markup_of_a_run(tmp_path):
    runs = [read_run(write_run(tmp_path / name, 50, lr=lr)) for name, lr in (("a", 1), ("b", 2))]
    page = page_of(runs)
    point = "new PointerEvent('pointermove', {clientX: 1e4, clientY: 100})"
    page += f"<script>document.querySelector('svg').dispatchEvent({point})</script>"
    path = tmp_path / "page.html"
    path.write_text(page)
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    browser.insert(1, f"--user-data-dir={tmp_path / 'profile'}")
    dom = subprocess.run(browser, capture_output=True, text=True, timeout=120).stdout
    for name in CURVES:
        drawn = re.findall(rf'<polyline [^>]*data-curve="{name}"[^>]*points="([^"]+)"', dom)
        assert len(drawn) == 4 and all(len(points.split()) == 50 for points in drawn), name
    assert len(re.findall(r"<circle ", dom)) == 4  # two evaluations, of loss and of bits per byte
    assert "step 50" in dom and "validation at 50: 2.5" in dom  # what the pointer points at
    assert "--lr" in dom and "<img" not in dom and "&lt;/script&gt;&lt;img" in dom


def test_trackers_are_sent_every_step(tmp_path, monkeypatch):
    wandb, tensorboard = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setattr(sys, "argv", ["send.py", str(write_run(tmp_path / "run", 3))])
    page = (ROOT / "docs/trackers.md").read_text()
    to_wandb, to_tensorboard = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(to_wandb, {})
    logged = wandb.init.return_value.log.call_args_list
    assert [call.kwargs["step"] for call in logged] == [1, 2, 3]
    assert logged[1].args[0]["loss"] == 2.5 and "sample" not in logged[2].args[0]
    exec(to_tensorboard, {})
    writer = tensorboard.SummaryWriter.return_value.__enter__.return_value
    scalars = {call.args for call in writer.add_scalar.call_args_list}
    assert {("loss", 2.5, 2), ("val_loss", 2.5, 3)} < scalars
