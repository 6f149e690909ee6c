"""Write a corpus, runs and adapters with the code of an older commit, for today's to go on with.

DIRECTORY/house/    that commit's files, with which all that follows is written
          tokens/   a corpus, and notes.model, its tokenizer
          NAME/     each of RUNS: six steps, with checkpoints after the third and the sixth
          NAME.pt   what that commit reads of the checkpoint after the third step

python written_by.py DIRECTORY      writes NAME.pt with the code that this process imports
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
COMMIT = "d36363a"
SAVED, STEPS = 3, 6


class Run(NamedTuple):
    script: str
    flags: str  # {} is DIRECTORY
    processes: int = 0  # 0: one, without torchrun
    split: str = ""  # flags that say how the processes share a step


EVERY_RUN = f"--steps {STEPS} --save-every {SAVED} --keep 0 --eval-every 0 --warmup 2 --batch 8"
MODEL = "--dim 32 --n-heads 4 --n-kv-heads 2 --ffn-dim 48 --n-layers"
PRETRAINING = f"{EVERY_RUN} --data {{}}/tokens --seq-len 24 {MODEL}"
FINETUNING = f"{EVERY_RUN} --data {{}}/sums.jsonl --seq-len 96 --lr 0.01 --init {{}}/run"
BFLOAT16_MOMENTS = f"{PRETRAINING} 2 --optimizer adamw --moments bfloat16"
FLOAT64 = f"{PRETRAINING} 4 --optimizer adamw --dtype float64"
RUNS = {
    "run": Run("train.py", f"{PRETRAINING} 2"),  # by Muon
    "adapter": Run("finetune_lora.py", FINETUNING),
    "dora": Run("finetune_lora.py", f"{FINETUNING} --dora --targets wq w2"),
    "four": Run("train.py", BFLOAT16_MOMENTS, 4, "--dp fsdp --tp 2"),
    "pipeline": Run("train.py", FLOAT64, 2, "--pp 2 --microbatch 4"),
}


def write(directory: Path, quick: bool = False) -> None:
    """Write what DIRECTORY lacks; if it is to be quick, only the corpus and `run`."""
    house = House(directory)
    if not (directory / "tokens").exists():
        house.write_corpus()
    for name in ["run"] if quick else RUNS:
        if not (directory / name).exists():
            house.train(name)
    if not quick:
        house.run(__file__, directory)


class House:
    """The files of COMMIT, in DIRECTORY/house."""

    def __init__(self, directory: Path):
        self.directory, self.files = directory, directory / "house"
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.environment |= {"PYTHONPATH": str(self.files)}
        self.environment |= {"FLATLLAMA_CACHE": str(directory / "cache")}
        if not self.files.exists():
            self.files.mkdir(parents=True)
            archive = ["git", "-C", ROOT, "archive", COMMIT]
            content = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
            subprocess.run(["tar", "-x", "-C", self.files], input=content, check=True)

    def run(self, *command: str | Path, processes: int = 0) -> None:
        """Run a script with the commit's files, by torchrun if it has several processes."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher = [*torchrun, str(processes)] if processes else []
        command = [sys.executable, *launcher, *map(str, command)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ended = subprocess.run(command, cwd=self.files, env=self.environment, **pipes)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout}")

    def write_corpus(self) -> None:
        """Write a text of numbers, its tokenizer and its tokens, and conversations to fine-tune."""
        text, tokenizer = self.directory / "counting.txt", self.directory / "notes.model"
        text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(3000)))
        sums = [{"prompt": f"{i} + {i % 7}?", "completion": f"is {i + i % 7}"} for i in range(60)]
        (self.directory / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
        self.run("data.py", "train-tokenizer", text, "--vocab-size", "300", "--out", tokenizer)
        tokens = self.directory / "tokens"
        self.run("data.py", "tokenize", text, "--tokenizer", tokenizer, "--out", tokens)

    def train(self, name: str) -> None:
        """Train one of RUNS."""
        run = RUNS[name]
        command = command_of(name, self.directory, self.directory / name)
        self.run(*command, *run.split.split(), processes=run.processes)


def command_of(name: str, directory: Path, out: Path) -> list[str]:
    """Return the script and the flags of one of RUNS, without those that split it."""
    run = RUNS[name]
    flags = [word.replace("{}", str(directory)) for word in run.flags.split()]
    return [run.script, *flags, "--out", str(out)]


def interrupted(run: Path, out: Path) -> Path:
    """Copy a run as it would be if it had been killed just before its last save."""
    return shutil.copytree(run, out, ignore=shutil.ignore_patterns(f"step-{STEPS:08d}"))


def read(directory: Path, name: str) -> dict:
    """Return the parameters of one of RUNS after SAVED steps, and logits that its model computes,
    with the project's code that this process imports."""
    from checkpoint import load_pretrained
    from finetune_lora import load_adapter

    saved = directory / name / f"step-{SAVED:08d}"
    is_adapter = RUNS[name].script == "finetune_lora.py"
    model = load_pretrained(directory / "run" if is_adapter else saved, torch.float64)
    if is_adapter:
        load_adapter(model, saved)
    return dict(model.named_parameters()) | {"logits": logits_of(model)}


def logits_of(model):
    """Return a model's logits after 40 tokens, [1, 40, V]."""
    with torch.no_grad():
        return model(torch.arange(40)[None])


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    for name in RUNS:
        torch.save(read(directory, name), directory / f"{name}.pt")
