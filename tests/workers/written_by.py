"""Write a corpus, runs and adapters with the code of an older commit, for today's to go on with.

DIRECTORY/house/    that commit's files, with which all that follows is written
          tokens/   a corpus of counting.txt, and notes.model, its tokenizer
          NAME/     each of RUNS: six steps, with checkpoints after the third and the sixth
          NAME.pt   what that commit reads of the checkpoint after the third step

python written_by.py DIRECTORY      writes NAME.pt with the code that this process imports
"""

import os
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


def command_of(name: str, directory: Path, out: Path) -> list[str]:
    """Return the script and the flags of one of RUNS, without those that split it."""
    flags = [word.replace("{}", str(directory)) for word in RUNS[name].flags.split()]
    return [RUNS[name].script, *flags, "--out", str(out)]


def write_corpus(directory: Path) -> None:
    """Write the commit's files, and a tokenizer and tokens of DIRECTORY/counting.txt."""
    (house := directory / "house").mkdir()
    archive = ["git", "-C", ROOT, "archive", COMMIT]
    content = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", house], input=content, check=True)
    text, notes = directory / "counting.txt", directory / "notes.model"
    in_house(directory, "data.py", "train-tokenizer", text, "--vocab-size", 300, "--out", notes)
    out = directory / "tokens"
    in_house(directory, "data.py", "tokenize", text, "--tokenizer", notes, "--out", out)


def write_runs(directory: Path, *names: str) -> None:
    for name in names:
        command = [*command_of(name, directory, directory / name), *RUNS[name].split.split()]
        in_house(directory, *command, processes=RUNS[name].processes)


def in_house(directory: Path, *command, processes: int = 0) -> None:
    """Run a script with the commit's files, by torchrun if it has several processes."""
    house = directory / "house"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    command = [sys.executable, *torchrun * bool(processes), *command]
    environment = dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(house))
    environment = os.environ | environment | {"FLATLLAMA_CACHE": str(directory / "cache")}
    options = dict(cwd=house, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ended = subprocess.run([*map(str, command)], text=True, **options)
    assert ended.returncode == 0, ended.stdout


def read(directory: Path, name: str) -> dict:
    """Return the parameters of one of RUNS after SAVED steps, and the logits of its model after 40
    tokens, [1, 40, V], with the project's code that this process imports."""
    from checkpoint import load_pretrained
    from finetune_lora import load_adapter

    saved = directory / name / f"step-{SAVED:08d}"
    is_adapter = RUNS[name].script == "finetune_lora.py"
    model = load_pretrained(directory / "run" if is_adapter else saved, torch.float64)
    if is_adapter:
        load_adapter(model, saved)
    with torch.no_grad():
        return dict(model.named_parameters()) | {"logits": model(torch.arange(40)[None])}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    for name in RUNS:
        torch.save(read(directory, name), directory / f"{name}.pt")
