"""README.md and docs: every command is taken by its script, and runs; every link exists.

Commands are parsed and run by the scripts themselves. docs/gpu.py runs commands that exist, and
keeps what it has measured."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from conftest import ENVIRONMENT, ROOT, hugging_face_model, launch, parsed_by, slow, succeed
from test_train import flags

from model import LlamaConfig
from models.family import presets
from text.bpe import train_tokenizer

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = "train finetune_lora preferences rewards distill generate evaluate bench data checkpoint"
SCRIPTS += " report"
SCRIPTS = [f"{name}.py" for name in SCRIPTS.split()]
TRAINING = SCRIPTS[:5]
# Not the project's, mostly not installed. .ci/run runs pip, pytest; test_changes.py git apply.
OTHERS = "pip pytest git cut tensorboard llama-cli echo ollama hf vllm lm_eval python3 cd .".split()


class Command(NamedTuple):
    page: str
    text: str
    script: str
    arguments: list[str]
    nproc: int  # 0: without torchrun
    launcher: list[str]  # torchrun's other flags; or perf/two_nodes.sh and the link's speed


def block_lines(page: Path) -> list[str]:
    """Return the lines of a page's bash blocks."""
    lines = []
    block = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for found in block.findall(page.read_text()):
        if not found.startswith("#!"):
            lines += found.replace("\\\n", " ").splitlines()
    return lines


def shell_lines(page: Path) -> list[str]:
    """Return the commands of a page: lines of bash blocks, and code spans that look like one."""
    lines = block_lines(page)
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", text):
        words = span.split()
        if len(words) > 1 and words[0] in ("torchrun", "python", "perf/two_nodes.sh", "time"):
            lines.append(" ".join(words))
    return lines


def parse(page: Path, line: str) -> list[Command]:
    """Return the project's commands in a line, without comments and ellipses."""
    commands = []
    for part in line.split(" && "):
        words = [word for word in shlex.split(part, comments=True) if word != "..."]
        if words[:1] == ["time"]:
            del words[0]
        if not words or words[0] in OTHERS:
            continue
        launcher = []
        nproc = 0
        if words[0] == "perf/two_nodes.sh":
            launcher = words[:2]
            nproc = int(words[2])
            words = words[3:]
        elif words[0] == "torchrun":
            nproc = 1
            words = words[1:]
            while words and not words[0].endswith(".py"):
                flag, value, *words = words
                if flag == "--nproc-per-node":
                    nproc = int(value)
                else:
                    launcher += [flag, value]
        elif words[:2] == ["python", "-m"]:
            words = [f"{words[2].replace('.', '/')}.py", *words[3:]]
        elif words[0] == "python":
            words = words[1:]
        if words:
            script, *arguments = words
            commands.append(Command(page.name, line, script, arguments, nproc, launcher))
    return commands


COMMANDS = []
for page in PAGES:
    for line in shell_lines(page):
        COMMANDS += parse(page, line)


def test_commands_are_found():
    pages = {page.name for page in PAGES} - {"deleted.md"}
    assert {command.page for command in COMMANDS} == pages
    assert {command.script for command in COMMANDS} >= set(SCRIPTS)
    assert any(command.launcher[:1] == ["perf/two_nodes.sh"] for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.page}: {c.text}")
def test_a_script_takes_the_flags(command):
    """The ranks of a training can also share its batch."""
    assert (ROOT / command.script).exists()
    if command.script in SCRIPTS:
        args = parsed_by(command.script, *command.arguments)
    if command.script in TRAINING:
        split = args.parallel
        launcher = dict(zip(command.launcher[::2], command.launcher[1::2]))
        nodes = launcher.get("--nnodes", "1")
        for n in map(int, nodes.split(":")):
            ranks = max(1, command.nproc) * n
            data_ranks = ranks // (split.tp * split.cp * split.pp)
            told = f"{data_ranks} ranks cannot share --batch {args.batch}"
            assert args.batch % data_ranks == 0, told


def test_a_page_trains_where_the_readme_has_not():
    """Who has run the README's commands can run a page's: no run of the same name is there."""
    readme = []
    for page in PAGES:
        trained = [*readme]
        for line in block_lines(page):
            for command in parse(page, line):
                if command.script in TRAINING:
                    run = parsed_by(command.script, *command.arguments)
                    assert run.resume or run.directory not in trained, command
                    trained.append(run.directory)
        readme = readme or trained


def test_git_ignores_what_commands_write():
    written = {"sums", "Modelfile", "wandb"}
    for command in COMMANDS:
        if command.script in SCRIPTS:
            asked = parsed_by(command.script, *command.arguments)
            given = [getattr(asked, name, None) for name in ("out", "target", "json")]
            paths = {str(path) for path in given if path}
            written |= {path for path in paths if not path.startswith("docs/")}  # which are kept
    ignored = subprocess.run(["git", "check-ignore", "--no-index", *written], cwd=ROOT,
                             capture_output=True, text=True)  # fmt: skip
    if ignored.returncode == 128:
        pytest.skip("no git repository")
    assert written == {*ignored.stdout.splitlines()}


def test_the_numbers_of_the_slurm_script_fit_together():
    """Its ranks can share the batch; torchrun waits for a save, and gives up before Slurm does. The
    script goes on with the run where it stopped, and is valid Bash."""
    script = slurm_script()

    def number(flag: str) -> int:
        return int(re.search(rf"{flag}(\d+)", script)[1])

    ranks = number("--nodes=") * number("--nproc-per-node ")
    assert ranks > 1
    assert number("--batch ") % ranks == 0
    assert 300 < number("SHUTDOWN_TIMEOUT=") < number("--signal=TERM@")
    (command,) = re.findall(r" train\.py (.*)", script.replace("\\\n", " "))
    assert parsed_by("train.py", *shlex.split(command)).resume
    subprocess.run(["bash", "-n", "-c", script], check=True)


def slurm_script() -> str:
    page = (ROOT / "docs/cluster.md").read_text()
    (script,) = re.findall(r"^```bash\n(#!.*?)^```", page, re.MULTILINE | re.DOTALL)
    return script


def test_links_and_pictures_exist():
    labs = ROOT / "labs"
    for page in (*PAGES, labs / "README.md", *labs.glob("*/README.md")):
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), (page.name, target)
            if heading:
                anchors = []
                for title in re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE):
                    letters = re.sub(r"[^\w\- ]", "", title.lower())
                    anchors.append(letters.replace(" ", "-"))
                assert heading in anchors, (page.name, target, anchors)


def test_the_line_that_case_4_changes_is_in_the_model():
    page = (ROOT / "docs/cases.md").read_text()
    [diff] = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    assert removed and set(removed) <= set((ROOT / "model.py").read_text().splitlines())


def test_the_cell_for_notebooks_runs(corpus, tmp_path, capsys):
    out = tmp_path / "tiny"
    succeed("train.py", *flags(corpus, out, steps=1))
    page = (ROOT / "docs/colab.md").read_text()
    (cell,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(cell.replace("out/colab", str(out)), {})
    assert capsys.readouterr().out.startswith("torch.Size([1, 15, ")


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= 1200


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    """docs/pictures.py draws all pictures but bubble.svg, which is only kept."""
    pytest.importorskip("matplotlib")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.svg"))
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tmp_path / "docs/pictures.py"], env=environment, check=True)
    kept = {path.name for path in ROOT.glob("docs/*.svg")}
    drawn = {path.name for path in tmp_path.glob("docs/*.svg")}
    assert kept == drawn | {"bubble.svg"}


# -------------------------------------------------------------------------------- they run

FEW = "--steps 2 --warmup 0 --batch 16 --microbatch 1 --seq-len 64 --eval-windows 2"
SMALL = {  # what is appended to the commands
    "train.py": FEW,
    "finetune_lora.py": FEW,
    "preferences.py": FEW.replace("64", "256"),
    "rewards.py": FEW.replace("64", "128") + " --max-new-tokens 4",
    "distill.py": FEW,
    "generate.py": "--max-new-tokens 3",
    "bench.py generate": "--model tiny --max-new-tokens 3 --repeats 1",
    "data.py train-tokenizer": "--vocab-size 600",
    "bench.py limit": "--model tiny --batch 1 --seq-len 32 --repeats 1",
    "bench.py compare": "--model tiny --batch 16 --microbatch 1 --seq-len 32 --repeats 1",
    "bench.py step": "--model tiny --dim 96 --n-heads 4 --n-kv-heads 2 --ffn-dim 288 --batch 16 "
    "--microbatch 1 --seq-len 32 --repeats 1",
}


def write_user_files(
    directory: Path, tokenizer: Path, config: LlamaConfig, models: tuple[str, ...]
) -> None:
    """Write what commands of several pages expect: data of each task, and these models."""
    chat = dict(prompt="Two?", completion="2")
    pair = dict(prompt="Two?", chosen="2", rejected="3")
    for name, record in (("chats", chat), ("pairs", pair), ("prompts", pair)):
        line = json.dumps(record)
        (directory / f"{name}.jsonl").write_text(f"{line}\n" * 40)
    (directory / "reward.py").write_text("def reward(answer, **others):\n    return len(answer)")
    for name in models:
        hugging_face_model(config).save_pretrained(directory / name)
        shutil.copy(tokenizer, directory / name / "tokenizer.model")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory) -> Path:
    """A user's directory, with the files that the commands of the pages expect."""
    directory = tmp_path_factory.mktemp("user")
    notes = directory / "my_notes"
    notes.mkdir()
    for source in ("model.py", "train.py", "parallel.py", "data.py"):
        shutil.copy(ROOT / source, notes / f"{source}.md")
    tokenizer = directory / "llama.model"  # the README makes notes.model
    train_tokenizer([notes], 600, tokenizer)
    config = LlamaConfig(64, 2, 4, 2, 96, 600 + 256, 256, tie_embeddings=False)
    write_user_files(directory, tokenizer, config, ("Llama-3.2-1B", "Llama-3.1-8B"))
    (directory / "docs/measured").mkdir(parents=True)
    shutil.copy(ROOT / "docs/sums.py", directory / "docs")
    subprocess.run([sys.executable, "docs/sums.py", "sums"], cwd=directory, check=True)
    (directory / "held_out.txt").write_text("To be scored.\n" * 40)
    question = {"question": "Two?", "choices": ["2", "two"], "answer": 0}
    (directory / "questions.jsonl").write_text(json.dumps(question))
    (directory / "docs/measured.md").write_text("# Measured\n" + "Text to be read.\n" * 99)
    return directory


def in_small(command: Command, directory: Path) -> list[str]:
    """Return the arguments of a command that takes seconds in place of minutes."""
    arguments = [a.replace("~", str(directory), 1) for a in command.arguments]
    model = ""
    if "--model" in arguments:
        model = arguments[arguments.index("--model") + 1]
    if command.script == "train.py" and model not in ("", "small") and ".py" not in model:
        arguments += ["--model", "tiny"]
        if "--out" not in arguments:  # which by default has the name of the model
            arguments += ["--out", f"out/{model}"]
    with_subcommand = " ".join([command.script, *arguments[:1]])
    small = SMALL.get(command.script) or SMALL.get(with_subcommand, "")
    if "--epochs" in arguments:
        small = small.replace("--steps 2", "--epochs 0.1")
    return arguments + small.split()


def make_room(command: Command, directory: Path) -> None:
    """Delete what another page has trained in the directory in which a command will train."""
    words = in_small(command, directory)
    if command.script == "train.py" and "--resume" not in words:
        default = "out/small" if "--model" in words else "out/tiny"
        out = words[words.index("--out") + 1] if "--out" in words else default
        shutil.rmtree(directory / out, ignore_errors=True)


def run_in(directory: Path, command: Command) -> str:
    """Run a command in small, and return what it prints on stderr if it fails."""
    make_room(command, directory)
    arguments = in_small(command, directory)
    most = 4 if "--cp" in command.arguments else 2  # what the flag asks for
    worker = "tests/workers/in_directory.py"
    nproc = min(command.nproc, most)
    result = launch(worker, directory, command.script, *arguments, nproc=nproc, timeout=300)
    print(command.page, command.text, result.codes, flush=True)
    return "" if set(result.codes) == {0} else result.err[-2000:]


@pytest.fixture(scope="module")
def trained(sandbox) -> Path:
    """The same directory with out/tiny and out/two, with which other pages go on."""
    for line in ("python train.py", "torchrun --nproc-per-node 2 train.py --out out/two"):
        [command] = parse(README, line)
        assert not run_in(sandbox, command)
    return sandbox


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_command_runs(page, trained):
    """In the order of the page, each once, but for those of several nodes; races are in
    test_race.py."""
    for out in (trained / "out").glob("*"):
        if out.name not in ("tiny", "two"):
            shutil.rmtree(out)
    failures = []
    ran = []
    for command in COMMANDS:
        elsewhere = command.launcher or "mps" in command.arguments  # test_devices.py refuses mps
        if command.page != page or command.script not in SCRIPTS or elsewhere:
            continue
        if command[2:] not in ran:
            ran.append(command[2:])
            if error := run_in(trained, command):
                failures.append((command.text, error))
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.slow
def test_commands_for_two_emulated_nodes_run(sandbox):
    if os.getuid() or not shutil.which("tc"):
        pytest.skip("needs root, ip and tc")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = dict(timeout=300, capture_output=True, text=True, cwd=sandbox)
    options["env"] = ENVIRONMENT | {"PATH": path}
    for command in COMMANDS:
        if command.launcher[:1] == ["perf/two_nodes.sh"]:
            make_room(command, sandbox)
            given = [ROOT / "perf/two_nodes.sh", "1gbit"]  # ten minutes with 50mbit
            given += [command.nproc, ROOT / command.script, *in_small(command, sandbox)]
            result = subprocess.run([*map(str, given)], **options)
            assert result.returncode == 0, (command.text, result.stderr[-2000:])
            assert "node 0 sent" in result.stdout


# -------------------------------------------------------------------------- docs/gpu.py

gpu = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/gpu.py")))
OF_GPU = []
for part in gpu.PARTS.values():
    OF_GPU += [(name, line) for name, line, _ in part]


def test_results_of_gpus_have_names_of_their_own():
    assert len(dict(OF_GPU)) == len(OF_GPU)


@pytest.mark.parametrize("line", [line for _, line in OF_GPU])
def test_a_command_for_gpus_parses(line):
    script, *words = shlex.split(line)
    if script == "docs/gpu.py":
        assert words[0] == "--measure"
        assert words[1] in gpu.MEASURES
    elif script == "bench.py":
        assert parsed_by(script, *words, "--json", "x.json").model in presets()
    else:
        assert (script, words[0]) == ("-m", "pytest")
        assert (ROOT / words[-1]).exists()


def test_what_was_measured_is_kept_and_errors_are_run_again(tmp_path, monkeypatch):
    """Nothing begins for which no time is left."""
    first, second, *_ = [name for name, _, _ in gpu.PARTS["A"]]
    results = {first: {"result": {"x": 1}}, second: {"result": "error: killed"}}
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(results))
    ran = []

    def run_command(line, *_):
        ran.append(line)
        return "done"

    run_part = gpu.run_part
    of_part = run_part.__globals__
    monkeypatch.setitem(of_part, "run_command", run_command)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setitem(of_part, "PART_SECONDS", 0)
    run_part("A", file)
    assert ran == []
    monkeypatch.setitem(of_part, "PART_SECONDS", 1000)
    run_part("A", file)
    assert ran == [line for _, line, _ in gpu.PARTS["A"][1:]]
    results = json.loads(file.read_text())
    assert results[first] == {"result": {"x": 1}}
    assert results[second]["result"] == "done"


@pytest.mark.parametrize(
    "what", [slow(name) if name == "rewards" else name for name in gpu.MEASURES]
)
def test_what_is_measured_in_here_runs_on_a_cpu(what):
    (line,) = succeed("docs/gpu.py", "--measure", what).out.splitlines()
    assert json.loads(line)
