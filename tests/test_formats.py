"""files/formats.py, files/directories.py, and checkpoint.py's import and export, against
transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import safetensors.torch
import torch
import transformers
from conftest import change_json, hugging_face_model, like, line_of_refusal, slow, succeed
from huggingface_hub.errors import StrictDataclassFieldValidationError

from files import export, formats
from files.adapters import save_adapter
from files.conversion import export_weights, import_weights, write_checkpoint
from files.directories import find_adapter, find_checkpoint, open_weights, read_config
from files.loading import load_pretrained
from files.meta import open_meta
from files.safetensors import StoredTensor
from lora import LoRA, adapters, add_adapters, init_adapters
from model import Llama, LlamaConfig
from models.family import family_of
from plumbing.messages import UserError
from text.bpe import train_tokenizer
from text.targets import encode_prompt
from text.templates import CHAT_TEMPLATE
from text.tokenizer import load_tokenizer
from text.vocabulary import Tokenizer

# Models here have large weights, so that attention depends on positions and errors of RoPE show.
PLAIN = LlamaConfig(48, 3, 6, 2, 80, vocab_size=101, max_seq_len=8192)
SCALED = replace(PLAIN, rope_scaling=8.0, max_seq_len=131_072)  # as Llama 3.1
SMALL = replace(SCALED, rope_scaling=32.0, tie_embeddings=True)  # as Llama 3.2 1B and 3B
QWEN2 = like(PLAIN, "qwen2", norm_eps=1e-6, rope_theta=1e6)
QWEN3 = like(PLAIN, "qwen3", head_dim=16, norm_eps=1e-6, rope_theta=1e6)
MIXTRAL = like(PLAIN, "mixtral", n_experts=5, balance="none", rope_theta=1e6)
QWEN3_MOE = like(QWEN3, "qwen3_moe", n_experts=8, top_k=3, balance="none")
DEEPSEEK = like(
    PLAIN, "deepseek_v3", n_kv_heads=6, head_dim=24, n_experts=8, top_k=3, dense_dim=80, q_rank=32,
    kv_rank=20, rope_dim=8, value_dim=18, rope_theta=1e4, norm_eps=1e-6,
)  # fmt: skip
DEEPSEEK_LONG = replace(DEEPSEEK, q_rank=0, n_dense=0, rope_scaling=40.0, rope_mscale=0.7)
OLMO2 = like(PLAIN, "olmo2", norm_eps=1e-6)
OLMO3 = like(SCALED, "olmo3", n_layers=5, window=30)
GEMMA3 = like(SCALED, "gemma3", n_layers=7, head_dim=16, window=30, tie_embeddings=True,
              rope_theta=1e6, norm_eps=1e-6, score_dim=20)  # fmt: skip


def transformers_model(config: LlamaConfig):
    torch.manual_seed(0)
    model = hugging_face_model(config, initializer_range=0.2).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight", "bias")):  # so that their order matters
            torch.nn.init.uniform_(parameter, 0.5, 2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(buffer, 0, 0.5)
    return model


def our_model(config: LlamaConfig, dtype=torch.float32, seed=1, factor=5, norms=(0.5, 2)) -> Llama:
    model = config.build()
    model.init_weights(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            vector = torch.linspace(*(-1, 1) if name.endswith("bias") else norms, len(p))
            p.mul_(factor) if p.ndim > 1 else p.copy_(vector)
    return model.to(dtype)


def stored(model: Llama) -> dict[str, StoredTensor]:
    return {name: StoredTensor.of(p.detach()) for name, p in model.named_parameters()}


def saved(path: Path, model: Llama, tokenizer: Tokenizer | None = None) -> Path:
    write_checkpoint(path, model.config, stored(model), tokenizer)
    return path


def saved_hf(directory: Path, model: Llama, tokenizer: Tokenizer | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    export.save_hf(directory, model.config, stored(model), tokenizer)
    return directory


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(m == n and torch.equal(p, q) for (m, p), (n, q) in pairs)


@torch.no_grad()
def logits_agree(model: Llama, reference) -> None:
    tokens = torch.randint(101, (1, 400), generator=torch.Generator().manual_seed(0))
    expected = reference(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5 * expected.abs().max())


# ---------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize(
    "config, file_bytes",
    [(c, 10**9) for c in (PLAIN, QWEN3, MIXTRAL, QWEN3_MOE, OLMO2, OLMO3, DEEPSEEK, DEEPSEEK_LONG)]
    + [(c, 30_000) for c in (SCALED, SMALL, QWEN2, GEMMA3)],
)
def test_transformers_and_we_load_each_others_files(config, file_bytes, tmp_path, monkeypatch):
    """Also where config.json is as transformers 4 writes it. What we export is as it was."""
    reference, theirs, ours = transformers_model(config), tmp_path / "theirs", tmp_path / "ours"
    reference.save_pretrained(theirs, max_shard_size=file_bytes)
    model = load_pretrained(theirs)
    assert model.config == config
    logits_agree(model, reference)

    monkeypatch.setattr(export, "MAX_FILE_BYTES", file_bytes)
    ids = SimpleNamespace(named_bos=7, stop=[8, 9], save_published=lambda _: None)
    saved_hf(ours, model, ids)
    for directory in (theirs, ours):
        files = list(directory.glob("*.safetensors"))
        assert (len(files) > 1) == (file_bytes == 30_000)
        assert all(path.stat().st_size < file_bytes + 4000 for path in files)
    auto = transformers.AutoModelForCausalLM
    loaded, info = auto.from_pretrained(ours, output_loading_info=True)
    assert type(loaded) is type(reference) and not any(info.values()), info
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (7, [8, 9])
    logits_agree(model, loaded)
    assert equal(loaded, reference)

    written = (theirs / "config.json").read_text()
    for type_key in ("rope_type", "type"):
        content = json.loads(written)
        rope = content.pop("rope_parameters")
        if config.windows:
            content["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        content["rope_theta"] = rope.pop("rope_theta")
        rope[type_key] = rope.pop("rope_type")
        content["rope_scaling"] = rope if rope[type_key] != "default" else None
        content["torch_dtype"] = content.pop("dtype")
        (theirs / "config.json").write_text(json.dumps(content))
        assert formats.hf_config(theirs) == config


CONFIGS = PLAIN, SMALL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK, OLMO2, OLMO3, GEMMA3
CONFIGS += slow(SCALED), slow(DEEPSEEK_LONG)


# Fields of config.json that no forward of an evaluation reads.
UNREAD = "architectures", "attention_dropout", "dtype", "initializer_range"


def without(fields: dict, name: str) -> dict:
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_missing_field_is_transformers_default_or_refused(config, tmp_path):
    """Each field of config.json is left out in turn, or null: as transformers 5 writes it, and with
    fields for RoPE as transformers 4 did."""
    # No model's defaults. But of an old file of OLMo 3 transformers 5 takes rope_theta for layers
    # without a window alone, and 500,000 for the others.
    theta = 5e5 if family_of(config).name == "olmo3" else 3e4
    config = replace(config, rope_theta=theta, norm_eps=3e-4)
    transformers_model(config).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    ropes = new["rope_parameters"]  # with windows, one of each kind of layers
    rope = ropes["full_attention"] if config.windows else ropes
    old = without(new, "rope_parameters") | {"rope_theta": theta}
    if config.windows:
        old["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    if "head_dim" not in family_of(config).published.absent:
        old["head_dim"] = config.head_dim
    if config.rope_scaling != 1:
        old["rope_scaling"] = without(rope, "rope_theta")
    changed = [old | {key: None} for key in old]
    for key in rope:
        less = without(rope, key)
        if config.windows:
            less = ropes | {"full_attention": less}
        changed.append(new | {"rope_parameters": less})
    changed += [old | {"original_max_position_embeddings": 4096}]
    for written in (new, old):
        changed += [without(written, key) for key in written]
    loaded, n = {}, 0  # transformers' configuration -> ours, with which it computes the same
    for content in changed:
        (tmp_path / "config.json").write_text(json.dumps(content))
        try:
            ours = formats.hf_config(tmp_path)
            theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
            if "kv_lora_rank" not in theirs:  # whose head_dim is RoPE's
                assert theirs.get("head_dim") in (None, ours.head_dim)
            read = [key for key in theirs if key not in UNREAD and not key.endswith("_id")]
            fields = str({key: theirs[key] for key in read})
            if fields not in loaded:
                model = load_pretrained(tmp_path)
                reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        except (UserError, ValueError, TypeError, StrictDataclassFieldValidationError):
            continue  # one of us does not load it
        if fields not in loaded:
            logits_agree(model, reference)
        if config.windows:  # which may be longer than these texts
            assert ours.window == theirs["sliding_window"]
        assert ours == loaded.setdefault(fields, ours)
        n += 1
    assert len(loaded) > 3 and n > len(changed) / 3


# ------------------------------------------------------------------------------------------ Meta


def meta_shards(model: Llama, n: int, by_rows_only: bool) -> list[dict[str, torch.Tensor]]:
    """Return a model's shards in Meta's tensor parallelism.

    Llama 2 shards the columns of the embedding, Llama 3 its rows."""
    columns = ["wo.weight", "w2.weight"]
    if not by_rows_only:
        columns.append("tok_embeddings.weight")

    def shard(name: str, weight: torch.Tensor, i: int) -> torch.Tensor:
        dim = int(name.endswith(tuple(columns)))
        return weight if weight.ndim == 1 else weight.chunk(n, dim)[i].clone()

    weights = model.state_dict().items()
    return [{name: shard(name, weight, i) for name, weight in weights} for i in range(n)]


def save_shards(directory: Path, config: LlamaConfig, shards: list[dict], **more) -> None:
    params = dict(dim=config.dim, n_layers=config.n_layers, n_heads=config.n_heads,
                  n_kv_heads=config.n_kv_heads, vocab_size=-1, norm_eps=1e-5, multiple_of=16,
                  rope_theta=500000.0, use_scaled_rope=config.rope_scaling != 1)  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params | more))
    for i, shard in enumerate(shards):
        torch.save(shard | {"rope.freqs": torch.ones(4)}, directory / f"consolidated.{i:02d}.pth")


@pytest.mark.parametrize(
    "config, n, by_rows_only",
    [(SCALED, 2, True), (SMALL, 2, True), (PLAIN, 4, False), (SMALL, 4, False)],
)
def test_metas_shards_are_joined(config, n, by_rows_only, tmp_path):
    config = replace(config, vocab_size=104)
    model = our_model(config, torch.bfloat16)
    save_shards(tmp_path, config, meta_shards(model, n, by_rows_only))
    loaded = load_pretrained(tmp_path, torch.bfloat16)
    # Columns of the embedding and rows of the output differ, even if the full matrices are equal.
    if config.tie_embeddings and not by_rows_only:
        assert torch.equal(loaded.output.weight, loaded.tok_embeddings.weight)
    else:
        assert loaded.config == config and equal(loaded, model)


def test_the_scaling_factor_that_params_json_lacks(tmp_path):
    """By default it is that of the published models: 32 for tied embeddings, else 8."""
    for config in (SCALED, SMALL, PLAIN):
        save_shards(tmp_path, config, [our_model(config).state_dict()])
        assert open_meta(tmp_path)[0] == config
    save_shards(tmp_path, SCALED, [our_model(SCALED).state_dict()], rope_scaling_factor=4.0)
    assert open_meta(tmp_path)[0] == replace(SCALED, rope_scaling=4.0)


# -------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("config, dtype", [(PLAIN, torch.float32), (SMALL, torch.bfloat16)])
def test_round_trips_are_bit_identical(config, dtype, tmp_path):
    """hf -> ours -> hf -> ours: the second safetensors file equals the first. A norm stays in
    float32. No hidden directory is left behind, nor is another one removed."""
    model, hf = our_model(config, dtype), tmp_path / "hf"
    weights = stored(model)
    weights["norm.weight"] = weights["norm.weight"].to(torch.float32)
    hf.mkdir()
    export.save_hf(hf, config, weights)
    (tmp_path / ".hf2").mkdir()
    import_weights(hf, tmp_path / "a", None)
    export_weights(tmp_path / "a", tmp_path / "hf2", "hf", None)
    import_weights(tmp_path / "hf2", tmp_path / "b", None)
    for place in ("hf", "a", "hf2", "b"):
        loaded = load_pretrained(tmp_path / place, dtype)
        assert loaded.config == config and equal(loaded, model), place
    first, last = (tmp_path / place / "model.safetensors" for place in ("hf", "hf2"))
    assert first.read_bytes() == last.read_bytes()
    export_weights(tmp_path / "b", tmp_path / "half", "hf", torch.float16)
    tensors = safetensors.torch.load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert [path.name for path in tmp_path.glob(".*")] == [".hf2"]


# The chat template of Llama 3's published instruction models.
META_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | "
    "trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TALK = [dict(role="system", content=" Be brief. "), dict(role="user", content="What is 2 + 2?")]


def tokenizers_agree(directory: Path) -> None:
    """Assert that tokenizer.model, tokenizer.json and transformers' reading of it agree: in texts,
    and in chats by our template and Meta's."""
    a, b = (load_tokenizer(str(directory / f"tokenizer.{kind}")) for kind in ("model", "json"))
    assert a.hash == b.hash
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    text = "def f(x):\r\n\treturn  x * 1234567 # naïve 漢字 🙂\n\n  They'LL\x00\x7f "
    assert reference.encode(text, add_special_tokens=False) == a.encode(text)
    assert reference.decode(a.encode(text)) == text
    assert reference(text)["input_ids"] == a.encode(text, bos=True)  # as Meta's own files do
    talk = [*TALK, dict(role="assistant", content=" 4")]
    for role, template in (("tool", None), ("user", META_TEMPLATE)):
        said = [*talk, dict(role=role, content="Yes.\n")]
        options = dict(chat_template=template, add_generation_prompt=True)
        ids = reference.apply_chat_template(said, **options)["input_ids"]
        assert ids == encode_prompt(said, a) and ids.count(a.bos) == 1
    assert len(reference) == a.vocab_size and reference.eos_token_id in a.stop


def test_a_small_tokenizer_is_the_same_in_transformers(text, tmp_path):
    """Meta's lies in original/, and names the tokens that end an answer."""
    hf, out, original = (tmp_path / name for name in ("hf", "out", "hf/original"))
    original.mkdir(parents=True)
    train_tokenizer([str(text), formats.__file__], 500, original / "tokenizer.model")
    tokenizer = load_tokenizer(str(original))
    saved_hf(hf, our_model(replace(PLAIN, vocab_size=tokenizer.vocab_size)))
    import_weights(hf, tmp_path / "run", None)
    export_weights(tmp_path / "run", out, "hf", None)
    tokenizers_agree(out)
    content = json.loads((out / "config.json").read_text())
    assert (content["bos_token_id"], content["eos_token_id"]) == (tokenizer.bos, [*tokenizer.stop])
    (out / "tokenizer.model").unlink()
    assert read_config(out)["tokenizer"].endswith("tokenizer.json")
    import_weights(out, tmp_path / "again", None)
    assert load_tokenizer(str(tmp_path / "again")).hash == tokenizer.hash

    # A base with a chat template and settings of its own hands them on, through several runs.
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 1}')
    (out / "chat_template.jinja").write_text("mine")
    files = {name: (out / name).read_bytes() for name in ("tokenizer.json", "chat_template.jinja")}
    for run, init in (("run2", out), ("run3", tmp_path / "run2")):
        kept = load_tokenizer(read_config(init)["tokenizer"])
        write_checkpoint(tmp_path / run, *open_weights(init), kept)
    shutil.rmtree(out)

    def template_of(run: str) -> str:
        export_weights(tmp_path / run, tmp_path / f"of {run}", "hf", None)
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path / f"of {run}")
        return reference.get_chat_template()

    assert template_of("run3") == "mine"
    assert files == {name: (tmp_path / "of run3" / name).read_bytes() for name in files}
    assert json.loads((tmp_path / "of run3/tokenizer_config.json").read_text()) == settings
    export_weights(tmp_path / "run3", tmp_path / "gguf", "gguf", None)
    fields = gguf.GGUFReader(tmp_path / "gguf/model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "mine"
    # An answer ends where a chat ends, and there is a template, although a base has none.
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "of run3")
    assert (config.temperature, set(config.eos_token_id)) == (0.6, {1, tokenizer.eos})
    assert template_of("run") == tokenizer.template == CHAT_TEMPLATE
    assert not (tmp_path / "of run" / "generation_config.json").exists()


def test_loading_takes_little_memory_beside_a_ranks_shard(tmp_path, monkeypatch):
    """Less than the largest file: 9 MB or 51 MB, of 103 MB in all."""
    model = our_model(LlamaConfig(512, 8, 8, 2, 1536, vocab_size=1500))
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 9_000_000)
    hf, meta = saved_hf(tmp_path / "hf", model), tmp_path / "meta"
    save_shards(meta, model.config, meta_shards(model, 2, by_rows_only=True))
    result = succeed("tests/workers/loading_memory.py", hf, meta, nproc=2)
    lines = [line.split() for line in result.out.splitlines()]
    assert [place for place, _, _ in lines] == ["hf", "meta"]
    for place, grown, total in lines:
        largest = max(path.stat().st_size for path in (tmp_path / place).iterdir())
        assert int(grown) < largest < 0.6 * int(total), result.out


# --------------------------------------------- what a directory says twice, or holds beside a model


def read_alike(directory: Path, **settings) -> None:
    """Assert that we read a model with these settings as transformers does."""
    change_json(directory / "config.json", settings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits_agree(load_pretrained(directory), theirs)


@torch.no_grad()
def test_what_a_directory_says_twice_is_read_as_by_transformers(tmp_path, capsys):
    hf, many = saved_hf(tmp_path / "hf", our_model(PLAIN)), tmp_path / "many"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf)
    theirs.save_pretrained(hf)  # with rope_parameters
    scaled = formats.SUPPORTED_SCALING | {"factor": 8.0}
    for rope in (scaled, scaled | {"rope_theta": 30_000.0}):
        read_alike(hf, rope_scaling=rope)  # as cards of models say
    # A null is a missing field, and a model may lie beside other weights.
    theirs.model.norm.weight.mul_(2)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size=30_000)
    for path in (tmp_path / "shards").glob("model*"):
        shutil.copy(path, hf)
    capsys.readouterr()
    read_alike(hf, rope_scaling=None, head_dim=None)
    assert f"{hf} has model.safetensors, which is read, and shards" in capsys.readouterr().err
    (hf / "model.safetensors").unlink()
    read_alike(hf)
    saved_hf(many, our_model(replace(PLAIN, n_kv_heads=PLAIN.n_heads)))
    read_alike(many, num_key_value_heads=None)


def test_an_adapter_of_another_base_is_named(tmp_path, capsys):
    """And one that lies in the model's own directory."""
    (directory := tmp_path / "adapter").mkdir()
    base, other = (saved_hf(tmp_path / name, our_model(PLAIN)) for name in ("base", "other"))
    add_adapters(model := our_model(PLAIN), lora := LoRA(rank=2))
    init_adapters(model)
    for name in (str(base), "someone/base", "someone/else", "", str(tmp_path / "gone/base")):
        save_adapter(directory, lora, PLAIN, adapters(model), name)
        for given in (base, other):
            find_adapter(directory, given)
            said = f"the adapter in {directory} was trained beside {name}, and not {given}"
            is_other = name and Path(name).name != given.name
            assert (said in capsys.readouterr().err) == bool(is_other), (name, given)
    save_adapter(base, lora, PLAIN, adapters(model), "")
    find_checkpoint(base)
    assert f"{base} holds an adapter, too: --adapter applies it" in capsys.readouterr().err


# ------------------------------------------------------------------------------- wrong input


HF, META = "config.json", "params.json"
MIXTRAL_FIELDS = dict(model_type="mixtral", num_local_experts=3, num_experts_per_tok=2)


UNFIT = [
    (HF, dict(model_type="mistral"), "only llama, qwen2, qwen3, mixtral, qwen3_moe, olmo2"),
    (HF, dict(use_sliding_window=True), "has use_sliding_window True"),
    (HF, dict(attention_bias=True), "has attention_bias True"),
    (HF, dict(quantization_config={"bits": 4}), "has quantized weights"),
    (HF, dict(rope_scaling={"rope_type": "yarn", "factor": 2}), "RoPE of type 'yarn'"),
    (HF, dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor None"),
    (HF, dict(head_dim=16), "k_proj.weight [16, 48], not [32, 48]"),
    (HF, dict(num_hidden_layers=2), "has 9 unknown tensor(s): model.layers.2.input_layernorm"),
    (HF, MIXTRAL_FIELDS | dict(num_experts_per_tok=1), "top_k 1 of n_experts 3"),
    (HF, MIXTRAL_FIELDS | dict(sliding_window=9), "has sliding_window 9"),
    (HF, dict(model_type="qwen3_moe", norm_topk_prob=False), "has norm_topk_prob False"),
    (HF, dict(tie_word_embeddings=True), "ties embeddings, but has another lm_head"),
    (META, dict(n_layers=2), "has 9 unknown tensor(s): layers.2.attention.wk.weight"),
]


@pytest.mark.parametrize("file, changes, message", UNFIT, ids=str)
def test_configs_that_do_not_fit_are_refused(file, changes, message, tmp_path):
    if file == HF:
        saved_hf(tmp_path, our_model(PLAIN))
    else:
        save_shards(tmp_path, PLAIN, [our_model(PLAIN).state_dict()])
    change_json(tmp_path / file, changes)
    told = line_of_refusal(load_pretrained, tmp_path)
    assert message in told
    assert str(tmp_path) in told and "--" not in told  # names no flag


class Evil:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


def test_pickled_code_is_not_run(tmp_path, capsys):
    save_shards(tmp_path, PLAIN, [{"tok_embeddings.weight": Evil()}])
    with pytest.raises(UserError, match="damaged, or holds more than weights"):
        load_pretrained(tmp_path)
    assert "code from" not in capsys.readouterr().out
    path = tmp_path / "consolidated.00.pth"
    for content in ([1, 2], {"a": 1}):
        torch.save(content, path)
        with pytest.raises(UserError, match="holds more than named tensors"):
            load_pretrained(tmp_path)


def test_weights_of_integers_are_refused(tmp_path):
    norm = StoredTensor.of(torch.ones(48, dtype=torch.int8))
    export.save_hf(tmp_path, PLAIN, stored(our_model(PLAIN)) | {"norm.weight": norm})
    with pytest.raises(UserError, match=r"has 1 tensor\(s\) of integers: model\.norm\.weight"):
        load_pretrained(tmp_path)
