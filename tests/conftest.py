"""What the tests share: scripts run in forks, changed copies of the project, small data."""

import atexit
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import fields
from datetime import date
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CHANGES = ROOT / "tests/changes"
ROOMS = [init.parent.name for init in ROOT.glob("*/__init__.py")]  # folders of the project
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # what runs here is small, and other processes run beside it
# A script's background jobs ignore Ctrl-C, and those of nohup SIGHUP. The processes of the tests
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config) -> None:
    if "gpu" in config.option.markexpr.replace("not gpu", ""):
        del ENVIRONMENT["CUDA_VISIBLE_DEVICES"]
    else:  # all other tests run on the CPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Modules of plumbing/ ignore these, too, but pytest forgets their filters.
    for warning in ("torch.distributed is disabled", "FSDP2-wrapped module .* a view tensor"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


# Slow tests come in parts: `-m "slow and exact"`. Files that stand nowhere here are of "runs".
PARTS = {
    "exact": ["test_exact"],
    "counts": ["test_page", "test_plan", "test_fake_cuda", "test_nccl"],
    "faults": ["test_faults", "test_mutants"],
    "models": ["test_models", "test_own_files", "test_changes", "test_export"],
    "tasks": ["test_preferences", "test_rewards", "test_distill", "test_experts", "test_finetune"],
    "endings": ["test_crashes", "test_endings", "test_stuck"],
    "classes": ["test_labs", "test_labs_answers", "test_labs_grading", "test_race"],
}
PART_OF_FILE = {file: part for part, files in PARTS.items() for file in files}
SEED = os.environ.get("SEED", f"{date.today():%Y%m%d}")  # the day, or "all"


def asks_for_slow(config, part: str = "") -> bool:
    """Return whether slow tests are asked for, and no other part than `part` is named."""
    asked = config.option.markexpr.replace("not slow", "")
    named = {name for name in (*PARTS, "runs") if name in asked}
    return "slow" in asked and (not part or named <= {part})


def is_drawn(item) -> bool:
    """Return whether a slow test is one of this day's. All are in three days."""
    day = date(int(SEED[:4]), int(SEED[4:6]), int(SEED[6:])).toordinal()
    return (zlib.crc32(item.nodeid.encode()) + day) % 3 == 0


def pytest_report_header(config) -> str:
    if not asks_for_slow(config) or SEED == "all":
        return ""
    return f"SEED={SEED} draws a third of the slow tests; SEED=all takes all"


@pytest.hookimpl(tryfirst=True)  # -m reads the marks
def pytest_collection_modifyitems(config, items) -> None:
    """Mark slow tests with their part, and leave out those that the day has not drawn."""
    left_out = []
    takes_all = SEED == "all" or "::" in str(config.args)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(PART_OF_FILE.get(item.path.stem, "runs"))
            if not takes_all and not is_drawn(item):
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the logits of a model.py that an earlier test of this process has changed."""
    if module := sys.modules.get("files.published"):
        module.small_logits.cache_clear()


def hugging_face_model(config, kind: str = "", **more):
    """transformers' model of a configuration, or a relative of Llama with its sizes."""
    import transformers

    from models.family import family_of

    published = family_of(config).published
    kind = kind or family_of(config).name.title().replace("_", "")
    written = published.write(config)
    if config.n_experts:
        more |= dict(norm_topk_prob=True, experts_implementation="eager")  # others have no float64
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := written.pop("rope_scaling", None):
        rope |= scaling
    elif config.rope_scaling != 1:
        rope |= dict(
            rope_type="llama3",
            factor=config.rope_scaling,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
    sizes = dict(
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        rope_parameters=rope,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        head_dim=config.head_dim,
    )
    for ours, theirs in published.fields.items():
        sizes[theirs] = getattr(config, ours)
    sizes |= written
    for name in published.absent:
        sizes.pop(name, None)
    if config.windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        sizes |= dict(layer_types=kinds, sliding_window=config.window)
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        in_windows = rope | ({"rope_theta": 1e4} if kind == "Gemma3Text" else {})
        if config.rope_scaling != 1:
            rope |= dict(rope_type="linear", factor=config.rope_scaling)
        if kind == "Olmo3" and config.rope_scaling != 1:
            rope |= dict(rope_type="yarn", original_max_position_embeddings=8192)
        sizes["rope_parameters"] = dict(sliding_attention=in_windows, full_attention=rope)
    if kind == "Gemma3Text":
        sizes |= dict(query_pre_attn_scalar=config.score_dim)
    described = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(described)


def like(config, family: str, **changes):
    """Return the configuration of another family with the same sizes, and these changes."""
    from models.family import families

    kind = families()[family].config
    shared_values = {f.name: getattr(config, f.name) for f in fields(config)}
    known = {f.name for f in fields(kind)}
    return kind(**{n: v for n, v in shared_values.items() if n in known} | changes)


def step_of(model, parallel, microbatch: int, microbatches: int, seq_len: int, **more):
    """The Work of a step in which each rank computes so many microbatches."""
    from config import Work

    data_ranks = parallel.replicate * parallel.shard
    batch = microbatches * microbatch * data_ranks // parallel.cp
    return Work(model, parallel, batch, microbatch, seq_len, **more)


def alone(**options):
    """Return a World of this process alone, with these fields of ParallelConfig, without a mesh."""
    from config import ParallelConfig
    from parallel import World

    place = dict(rank=0, size=1, local_rank=0, per_node=1, device=torch.device("cpu"))
    return World(**place, parallel=ParallelConfig(**options), mesh=None)


def same_with_gradients(found, expected, inputs) -> None:
    """Assert that two tensors agree to 1e-12, and so do the gradients that inputs get by each."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    ours = torch.autograd.grad(found, inputs, grad)
    theirs = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Result:
    def __init__(self, codes: list[int], out: str, err: str):
        self.codes, self.out, self.err = codes, out, err

    @property
    def code(self) -> int:
        """The first exit code that is not 0."""
        return next(filter(None, self.codes), 0)


def start(script: str, *args, nproc: int = 0, torchrun=("--standalone",)) -> subprocess.Popen:
    """Start a script by torchrun on a free port or, with nproc 0, by python alone."""
    command = [sys.executable]
    if nproc:
        command += ["-m", "torch.distributed.run", *torchrun, f"--nproc-per-node={nproc}"]
    command += [str(ROOT / script), *map(str, args)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    # In a session of its own: signals for it do not reach the tests.
    return subprocess.Popen(command, **pipes, start_new_session=True)


def finish(process: subprocess.Popen, timeout: float = 120) -> Result:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers, which it alone can reach
        out, err = process.communicate(timeout=60)
        pytest.fail(f"{process.args} took more than {timeout} s\n{out}\n{err}")
    return Result([process.returncode], out, err)


server: list[subprocess.Popen] = []  # tests/workers/fork_server.py, once one is needed


class Forks:
    """A script that runs like one of `start`, without the time that torchrun and imports take."""

    def __init__(self, script: str, *args, nproc: int = 0, timeout: float = 120, nodes=()):
        if not server:
            command = [sys.executable, ROOT / "tests/workers/fork_server.py"]
            options = dict(stdin=subprocess.PIPE, text=True, start_new_session=True)
            server.append(subprocess.Popen(command, env=ENVIRONMENT, **options))
            atexit.register(server[0].communicate)  # closes its stdin, which ends it
        self.directory = tempfile.TemporaryDirectory()
        arguments, nproc = [*map(str, args)], sum(nodes) or nproc
        self.request = dict(
            script=str(ROOT / script),
            arguments=arguments,
            nproc=nproc,
            timeout=timeout,
            directory=self.directory.name,
            nodes=nodes,
        )
        print(json.dumps(self.request), file=server[0].stdin, flush=True)
        self.ranks = self._wait_for("ranks", 60)  # process ids

    def finish(self) -> Result:
        codes = self._wait_for("codes", self.request["timeout"] + 10)
        if codes is None:
            pytest.fail(f"{self.request} took too long\n{self._read('out')}\n{self._read('err')}")
        return Result(codes, self._read("out"), self._read("err"))

    def _wait_for(self, name: str, timeout: float) -> list[int] | None:
        deadline = time.monotonic() + timeout
        while not (content := self._read(name)):
            if server[0].poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"no '{name}' of {self.request}\n{self._read('err')}")
            time.sleep(0.02)
        return json.loads(content)

    def _read(self, name: str) -> str:
        path = Path(self.directory.name, name)
        return path.read_text() if path.exists() else ""


def launch(script: str, *args, **options) -> Result:
    """Run a script as `Forks` does until it ends."""
    return Forks(script, *args, **options).finish()


def succeed(script: str, *args, **options) -> Result:
    """Run a script by `launch`, and assert that it exits with code 0."""
    result = launch(script, *args, **options)
    assert set(result.codes) == {0}, result.err
    return result


def refused(result, *parts: str) -> None:
    """Assert that a run ended with one line that has these parts, and with exit code 2."""
    lines = error_lines(result)
    assert len(lines) == 1, result.err
    assert all(part in lines[0] for part in parts), lines[0]
    assert "Traceback" not in result.err and "[rank" not in result.err
    assert set(result.codes) == {2}  # on every rank


def changed_copy(
    copy: Path, patch: str = "", edits: dict[str, str] | None = None, file: str = "model"
) -> tuple[str, Path]:
    """Copy the project's scripts, with what Python has compiled of them; apply a patch of
    tests/changes; then replace strings that a file has once. Returns the first arguments of
    `launch` for a script of the copy."""
    for folder in (".", *ROOMS, "tests/workers"):
        (copy / folder / "__pycache__").mkdir(parents=True, exist_ok=True)
        original = ROOT / folder
        for path in (*original.glob("*.py"), *original.glob("__pycache__/*.pyc")):
            shutil.copy2(path, copy / path.relative_to(ROOT))  # times too, as Python compares them
    if patch:
        subprocess.run(["git", "apply", CHANGES / f"{patch}.patch"], cwd=copy, check=True)
    (path,) = (p for room in (".", *ROOMS) if (p := copy / room / f"{file}.py").exists())
    source = path.read_text()
    for old, new in (edits or {}).items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path.write_text(source)
    return "tests/workers/in_copy.py", copy


def with_fault(copy: Path, file: str, old: str, new: str) -> tuple[str, Path]:
    """Return changed_copy with one string of a file replaced."""
    return changed_copy(copy, edits={old: new}, file=file)


def line_of_refusal(function, *given) -> str:
    """Return the message of the UserError with which a call ends: one line."""
    from plumbing.messages import UserError

    with pytest.raises(UserError) as error:
        function(*given)
    message = str(error.value)
    assert "\n" not in message
    return message


READERS = {  # script -> what reads its command line; Parser.parse_args for all others
    "train.py": "train.parse",
    "finetune_lora.py": "finetune_lora.parse",
    "preferences.py": "finetune_lora.parse",
    "rewards.py": "finetune_lora.parse",
    "distill.py": "finetune_lora.parse",
    "generate.py": "generate.parse",
    "evaluate.py": "evaluate.parse",
    "bench.py": "bench.parse_command",
}


def parsed_by(script: str, *arguments: str):
    """Return what a script of the project makes of its arguments, in this process: a record of
    plumbing/flags.py, or argparse's namespace. It goes no further."""
    main = importlib.import_module(script.removesuffix(".py")).main
    reader = READERS.get(script, "plumbing.parser.Parser.parse_args")
    found = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        read = pkgutil.resolve_name(reader)

        def read_and_stop(*given):
            found.append(read(*given))
            sys.exit()

        patch.setattr(reader, read_and_stop)
        patch.setattr(sys, "argv", [script, *arguments])
        main()
    if script == "bench.py":
        _, records = found[0]
        return records[-1]
    return found[0]


def change_json(path: Path, changes: dict) -> None:
    """Give fields of an object in a JSON file other values."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def hf_config_of(directory: Path, fields: dict):
    """Return what we read of a config.json with these fields, written to a directory."""
    from files.formats import hf_config

    (directory / "config.json").write_text(json.dumps(fields))
    return hf_config(directory)


def error_lines(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("error: ")]


def wait_for_lines(path: Path, lines: int) -> None:
    """Wait until a file has at least so many lines."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"{path} has fewer lines than {lines}"
        time.sleep(0.05)


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(out: Path) -> list[dict]:
    """Read the metrics of a run, a dictionary for each step."""
    return json_lines(out / "metrics.jsonl")


# tp with sequences that it does not divide, a base in 4 bits that FSDP shards, some views.
HAS_2_13 = torch.__version__ >= "2.13"
needs_2_13 = pytest.mark.skipif(not HAS_2_13, reason="needs torch 2.13")


def slow(*case):
    """Return a case of a test that only -m slow runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


def slow_after(n: int, cases: Iterable) -> list:
    """Return the cases of a test. Only -m slow runs those after the first n."""
    cases = [*cases]
    return [*cases[:n], *map(slow, cases[n:])]


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A small text whose next line can be learnt from the last."""
    path = tmp_path_factory.mktemp("text") / "counting.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(3000)))
    return path


@pytest.fixture(scope="session")
def corpus(text, tmp_path_factory) -> Path:
    """Token files of that text, whose tokens are bytes."""
    out = tmp_path_factory.mktemp("corpus") / "counting"
    succeed("data.py", "tokenize", text, "--tokenizer", "bytes", "--out", out)
    return out


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """Sixty short conversations with answers that a small model can partly learn."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [{"prompt": f"{i} + {i % 7}?", "completion": f"is {i + i % 7}"} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def lab_in_copy(copy: Path, *args, code: int = 0, script: str = "run.py", **options) -> str:
    """Return what a command of labs/ prints in another copy of the project: with what it says of
    errors, if it is to fail."""
    result = launch(copy / "labs" / script, *args, **options)
    assert result.codes == [code], result.out + result.err
    return result.out + (result.err if code else "")


@pytest.fixture
def copy(tmp_path) -> Path:
    """The project with labs of its own, in which nobody has done anything."""
    shutil.copytree(ROOT / "labs", tmp_path / "labs", ignore=shutil.ignore_patterns("work"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for path in ROOT.iterdir():
        if path.name not in ("labs", "docs", "out"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path
