"""Prompts that a model answers, and its answers as rows to train on: rewards.py."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from config import ParallelConfig
from model import IGNORE, Llama
from parallel import weights_at_hand
from plumbing.messages import UserError
from techniques.decoding import check_length, generate, layers_that_choose
from text.batch import Batch
from text.conversations import files_of
from text.corpora import Reading, check_string, document_name, read_records, split_of
from text.packing import Rows
from text.targets import encode_prompt
from text.tokenizer import Tokenizer

EXPECTED = '{"prompt": "..."}'  # a line of the data


def open_prompts(run, tokenizer: Tokenizer, reading: Reading) -> tuple[Rows, Rows, list, str]:
    """Return prompts to train on, which have a row for each answer of a group, prompts to evaluate
    on, no examples, and a line of counts. If a hash holds out none of a few prompts, the evaluation
    is on those of training."""
    read = partial(read_prompts, run, tokenizer, reading)
    train, val = read(run.data)
    if run.val_data:
        train, val = train + val, [*chain(*read(run.val_data))]
    for data, prompts in ((run.data, train), (run.val_data, val)):
        if data and not prompts:
            raise UserError(
                f"{' '.join(data)} has too few prompts: give more lines like {EXPECTED}"
            )
    val = val or train
    summary = f"{len(train):,} prompts; {len(val):,} to evaluate on"
    return Rows(train, tokenizer, run.group), Rows(val, tokenizer), [], summary


def read_prompts(run, tokenizer: Tokenizer, reading: Reading, data: list[str]) -> tuple[list, list]:
    """Return the prompts to train on, and those that a hash holds out, each as (ids, record)."""
    splits = {"train": [], "val": []}
    for file in files_of(data, EXPECTED):
        for number, where, record in read_records(file, EXPECTED, reading):
            with reading.one(where):
                text = check_string(record.get("prompt"), f'{where}: "prompt" is')
                for name in ("answer", "answers", "prompts") & record.keys():
                    problem = f'{where}: "{name}" is what a reward is given of this model'
                    raise UserError(f"{problem}: rename the field")
                ids = tokenizer.encode(text, bos=True)
                if run.chat:
                    ids = encode_prompt([{"role": "user", "content": text}], tokenizer)
                check_length(len(ids), run.max_new_tokens, run.seq_len)
                splits[split_of(f"{document_name(file)}:{number}")].append((ids, record))
    return splits["train"], splits["val"]


class Sampled(NamedTuple):
    """Answers that were drawn, and what the model has computed of their tokens."""

    answers: list[list[int]]
    log_p: Tensor  # of the tokens of answers [B, tokens]
    # Of each row [tokens, layers, K]: the experts that layers have chosen for each token of prompt
    # and answer that training computes. Empty if no layer keeps its choices.
    choices: list[Tensor]


def sample(
    model: Llama,
    prompts: list[list[int]],
    numbers: Sequence[int],
    run,
    stop: tuple[int, ...],
    parallel: ParallelConfig,
) -> Sampled:
    """Return an answer to each prompt. Tokens are drawn at temperature 1 and without top_k and
    top_p, from the distribution that is trained; `numbers` seed them."""
    replay(model, None)
    log_p, choices = [], []  # of each step of the sampling
    in_training = model.training
    model.eval()
    # Compiled blocks would cast their weights for every token, where autocast casts them once.
    compiled = parallel.compile and not model.compute_dtype
    stance = "default" if compiled else "force_eager"
    # Ranks may run forward different numbers of times, so only the first all-gathers weights.
    with weights_at_hand(model, parallel), torch.compiler.set_stance(stance):
        answers = generate(
            model,
            prompts,
            run.max_new_tokens,
            stop=stop,
            seed=run.seed,
            numbers=numbers,
            log_p=log_p,
            choices=choices,
            compiled=compiled,
        )
    model.train(in_training)
    return Sampled(answers, torch.stack(log_p, 1), choices_of_rows(prompts, answers, choices))


def choices_of_rows(prompts: list, answers: list, choices: list[Tensor]) -> list[Tensor]:
    """Return the choices of `stream` (techniques/decoding.py) as Sampled has them."""
    if not choices:
        return []
    of_prompts, *of_tokens = choices
    together = torch.cat([of_prompts, *(each[:, None] for each in of_tokens)], 1)
    T = of_prompts.shape[1]
    rows = []
    for row, prompt, answer in zip(together, prompts, answers):
        rows.append(row[T - len(prompt) : T + len(answer) - 1])  # prompts are left-padded
    return rows


def replay(model: Llama, batch: Batch | None) -> None:
    """Let the layers that keep their choices take those of a microbatch; without one, the best."""
    for i, layer in enumerate(layers_that_choose(model)):
        layer.given = None
        if batch:
            choices = batch.target_values["choices"][:, :, i]  # [B, T, K]
            layer.given = choices.flatten(0, 1).long()


class Answers(Rows):
    """Rows of a prompt and its answer, whose tokens are the targets. A batch has three values of
    each target, 0 elsewhere: the `advantage` of its answer, `sampled_log_p`, its log p by the
    sampler, and `begins`, 1 for the first target of an answer, since with --cp each rank has a part
    of an answer. An answer that `are_counted` leaves out has no targets."""

    def __init__(
        self,
        prompts: list,
        answers: list,
        log_p: Tensor,
        advantages: Tensor,
        are_counted: Sequence[bool],
        tokenizer: Tokenizer,
        choices: Sequence[Tensor] = (),  # of layers with experts, of each row [tokens, layers, K]
    ):
        samples = []
        for prompt, answer, is_counted in zip(prompts, answers, are_counted):
            is_target = [False] * len(prompt) + [is_counted] * len(answer)
            samples.append((prompt + answer, is_target))
        super().__init__(samples, tokenizer)
        self.log_p = log_p.cpu()
        self.advantages = advantages.to(log_p.dtype)
        self.choices = choices

    def batch(self, indices: Sequence[int], multiple: int = 1) -> Batch:
        batch = super().batch(indices, multiple)
        is_target = batch.targets != IGNORE
        advantage = self.log_p.new_zeros(batch.targets.shape)
        sampled_log_p, begins = advantage.clone(), advantage.clone()
        for row, i in enumerate(indices):
            columns = is_target[row].nonzero().flatten()
            advantage[row, columns] = self.advantages[i]
            sampled_log_p[row, columns] = self.log_p[i, : len(columns)]
            begins[row, columns[:1]] = 1
        values = dict(advantage=advantage, sampled_log_p=sampled_log_p, begins=begins)
        if self.choices:
            rows = [self.choices[i] for i in indices]
            shape = *batch.targets.shape, *rows[0].shape[1:]
            values["choices"] = choices = rows[0].new_zeros(shape, device="cpu")
            for row, of_row in enumerate(rows):
                choices[row, : len(of_row)] = of_row
        return replace(batch, target_values=values)
