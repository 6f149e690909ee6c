"""formats.py and checkpoint.py's import and export, against transformers and safetensors."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from conftest import hugging_face_config, launch, refused, shared, succeed

import formats
from checkpoint import export_weights, import_weights, load_pretrained, read_config
from data import load_tokenizer, train_tokenizer
from formats import Stored, open_safetensors, save_safetensors
from model import Llama, LlamaConfig, UserError

PLAIN = LlamaConfig(48, 3, 6, 2, 80, vocab_size=101, max_seq_len=8192)
SCALED = replace(PLAIN, rope_scaling=8.0, max_seq_len=131_072)  # as Llama 3.1
SMALL = replace(SCALED, rope_scaling=32.0, tie_embeddings=True)  # as Llama 3.2 1B and 3B
MODELS = pytest.mark.parametrize("config", [PLAIN, SCALED, SMALL], ids=["plain", "3.1", "3.2"])


def theirs(config: LlamaConfig) -> transformers.LlamaForCausalLM:
    """transformers' model of a shape, with random weights."""
    torch.manual_seed(0)
    about = hugging_face_config(config, initializer_range=0.2)  # attention depends on positions
    return transformers.LlamaForCausalLM(about).eval()


def ours(config: LlamaConfig, dtype=torch.float32) -> Llama:
    model = Llama(config)
    model.init_weights(seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)  # attention depends on positions
    return model.to(dtype)


def stored(model: Llama) -> dict[str, Stored]:
    return {
        name: Stored(p.dtype, tuple(p.shape), lambda p=p: p.detach())
        for name, p in model.named_parameters()
    }


def equal(a: Llama, b: Llama) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(m == n and torch.equal(p, q) for (m, p), (n, q) in pairs)


@torch.no_grad()
def logits_agree(model: Llama, reference) -> None:
    tokens = torch.randint(101, (2, 400), generator=torch.Generator().manual_seed(0))
    expected = reference(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5 * expected.abs().max())


# ---------------------------------------------------------------------------------- Hugging Face


@MODELS
@pytest.mark.parametrize("max_shard_size", ["5GB", "30KB"])
def test_what_transformers_saves_gives_its_logits(config, max_shard_size, tmp_path):
    reference = theirs(config)
    reference.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "30KB")
    model = load_pretrained(tmp_path)
    assert model.config == config
    logits_agree(model, reference)


@MODELS
def test_a_config_of_transformers_4(config, tmp_path):
    theirs(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    about = json.loads(path.read_text())
    rope = about.pop("rope_parameters")
    about["rope_theta"] = rope.pop("rope_theta")
    about["rope_scaling"] = rope if rope["rope_type"] == "llama3" else None
    about["torch_dtype"] = about.pop("dtype")
    path.write_text(json.dumps(about))
    assert formats.hf_config(tmp_path) == config


@MODELS
@pytest.mark.parametrize("file_bytes", [10**9, 30_000])
def test_transformers_takes_what_we_export(config, file_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "FILE_BYTES", file_bytes)
    model = ours(config)
    formats.save_hf(tmp_path, config, stored(model), bos=7, eos=[8, 9])
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (file_bytes == 30_000)
    largest = max(weight.nbytes for weight in stored(model).values())
    assert all(path.stat().st_size < max(file_bytes, largest) + 4000 for path in files)
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (7, [8, 9])
    logits_agree(model, loaded)


# ------------------------------------------------------------------------------------------ Meta


def meta_parts(model: Llama, n: int, by_rows_only: bool) -> list[dict[str, torch.Tensor]]:
    """A model cut as Meta's tensor parallelism cuts it; Llama 2 cuts the embedding's columns."""
    columns = ("wo.weight", "w2.weight") + (() if by_rows_only else ("tok_embeddings.weight",))
    weights = dict(model.named_parameters())
    weights["output.weight"] = model.output.weight

    def part(name, weight, i):
        if weight.ndim == 1:
            return weight.detach()
        return weight.detach().chunk(n, int(name.endswith(columns)))[i].clone()

    return [{name: part(name, w, i) for name, w in weights.items()} for i in range(n)]


def save_parts(directory: Path, config: LlamaConfig, parts: list[dict], **more) -> None:
    params = dict(dim=config.dim, n_layers=config.n_layers, n_heads=config.n_heads,
                  n_kv_heads=config.n_kv_heads, vocab_size=-1, norm_eps=1e-5, multiple_of=16,
                  rope_theta=500000.0, use_scaled_rope=config.rope_scaling != 1)  # fmt: skip
    (directory / "params.json").write_text(json.dumps(params | more))
    for i, part in enumerate(parts):
        torch.save(part | {"rope.freqs": torch.ones(4)}, directory / f"consolidated.{i:02d}.pth")


@MODELS
@pytest.mark.parametrize("n, by_rows_only", [(1, True), (2, True), (4, False)])
def test_metas_parts_make_a_whole(config, n, by_rows_only, tmp_path):
    config = replace(config, vocab_size=104)
    model = ours(config, torch.bfloat16)
    tied_apart = config.tie_embeddings and not by_rows_only  # cut differently: they look untied
    save_parts(tmp_path, config, meta_parts(model, n, by_rows_only))
    loaded = load_pretrained(tmp_path, torch.bfloat16)
    if tied_apart:
        assert torch.equal(loaded.output.weight, loaded.tok_embeddings.weight)
        return
    assert loaded.config == config
    assert equal(loaded, model)


def test_metas_width_of_the_feed_forward(tmp_path):
    """Meta's reader computes it from three numbers, by the formula in its model.py."""
    for dim, ffn_dim in [(48, 80), (2048, 8192), (4096, 14_336), (8192, 28_672), (64, 251)]:
        config = LlamaConfig(dim, 1, 4, 4, ffn_dim, vocab_size=8)
        (directory := tmp_path / str(dim)).mkdir()
        fake = {"tok_embeddings.weight": Stored(torch.float32, (1,), lambda: torch.zeros(1))}
        formats.save_meta(directory, config, fake)
        params = json.loads((directory / "params.json").read_text())
        width = int(params["ffn_dim_multiplier"] * int(2 * 4 * dim / 3))
        multiple = params["multiple_of"]
        assert multiple * ((width + multiple - 1) // multiple) == ffn_dim


def test_the_factor_that_params_json_does_not_say(tmp_path):
    for config, extra in [(SCALED, False), (SMALL, False), (PLAIN, False),
                          (replace(SCALED, rope_scaling=32.0), True)]:  # fmt: skip
        shutil.rmtree(tmp_path / "meta", ignore_errors=True)
        (tmp_path / "meta").mkdir()
        formats.save_meta(tmp_path / "meta", config, stored(ours(config)))
        params = json.loads((tmp_path / "meta" / "params.json").read_text())
        assert ("rope_scaling_factor" in params) == extra
        assert formats.open_meta(tmp_path / "meta")[0] == config


# ----------------------------------------------------------------------------- there and back again


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trips_are_bit_identical(config, dtype, tmp_path):
    """hf -> ours -> meta -> ours -> hf, and every file's bytes are the first's."""
    (tmp_path / "hf").mkdir()
    model = ours(config, dtype)
    formats.save_hf(tmp_path / "hf", config, stored(model))
    import_weights(tmp_path / "hf", tmp_path / "a", None)
    export_weights(tmp_path / "a", tmp_path / "meta", "meta", None)
    import_weights(tmp_path / "meta", tmp_path / "b", None)
    export_weights(tmp_path / "b", tmp_path / "hf2", "hf", None)
    for place in ("hf", "a", "meta", "b", "hf2"):
        loaded = load_pretrained(tmp_path / place, dtype)
        assert loaded.config == config and equal(loaded, model), place
    first, last = (tmp_path / place / "model.safetensors" for place in ("hf", "hf2"))
    assert first.read_bytes() == last.read_bytes()
    export_weights(tmp_path / "b", tmp_path / "half", "hf", torch.float16)
    tensors = safetensors.torch.load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert not list(tmp_path.glob(".*"))


def same_tokenizers(directory: Path) -> None:
    """tokenizer.model, the tokenizer.json beside it, and what transformers makes of that."""
    a, b = (load_tokenizer(str(directory / f"tokenizer.{kind}")) for kind in ("model", "json"))
    assert a.hash == b.hash
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    text = "def f(x):\r\n\treturn  x * 1234567 # naïve 漢字 🙂\n\n  They'LL\x00\x7f "
    assert reference.encode(text, add_special_tokens=False) == a.encode(text)
    assert reference.decode(a.encode(text)) == text
    chat = [dict(role="system", content=" Be brief. "), dict(role="user", content="What is 2 + 2?")]
    ids = reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids == a.encode_chat(chat)
    assert len(reference) == a.vocab_size and reference.eos_token_id in a.stop


def test_a_small_tokenizer_is_the_same_in_transformers(text, tmp_path):
    train_tokenizer([str(text), formats.__file__], 500, tmp_path / "mine" / "tokenizer.model")
    tokenizer = load_tokenizer(str(tmp_path / "mine"))
    config = replace(PLAIN, vocab_size=tokenizer.vocab_size)
    (tmp_path / "hf").mkdir()
    formats.save_hf(tmp_path / "hf", config, stored(ours(config)))
    import_weights(tmp_path / "hf", tmp_path / "run", str(tmp_path / "mine"))
    export_weights(tmp_path / "run", tmp_path / "out", "hf", None)
    same_tokenizers(tmp_path / "out")
    (tmp_path / "out" / "tokenizer.model").unlink()
    assert read_config(tmp_path / "out")["tokenizer"].endswith("tokenizer.json")
    import_weights(tmp_path / "out", tmp_path / "again", None)
    written = [(tmp_path / run / "tokenizer.model").read_bytes() for run in ("run", "again")]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "no JSON object"),
        ("{}", "does not say 'pre_tokenizer'"),
        ('{"pre_tokenizer": {"type": "ByteLevel"}, "model": {"vocab": {}}}', "it cuts text by []"),
        ('{"pre_tokenizer": null}', "is no tokenizer of Llama 3"),
        ('{"pre_tokenizer": {"pretokenizers": []}, "model": {"vocab": {"▁a": 3}}}', "is no tok"),
    ],
)
def test_other_tokenizers_are_refused(content, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as error:
        load_tokenizer(str(tmp_path))
    assert message in str(error.value)


@pytest.mark.slow
def test_metas_own_tokenizer_goes_along(tmp_path, text):
    """From the command line: import, generate, train on, and export what was trained."""
    config = replace(SMALL, vocab_size=128_256, dim=32, n_layers=1, n_heads=2, ffn_dim=32)
    (tmp_path / "hf" / "original").mkdir(parents=True)
    formats.save_hf(tmp_path / "hf", config, stored(ours(config)))
    tokenizer = shared("llama3.tokenizer.model")
    shutil.copy(tokenizer, tmp_path / "hf" / "original" / "tokenizer.model")
    succeed("checkpoint.py", "import", tmp_path / "hf", tmp_path / "mine")
    succeed("generate.py", tmp_path / "mine", "--prompt", "El", "--max-new-tokens", 3)
    tuned = tmp_path / "tuned"
    succeed("train.py", "--init", tmp_path / "hf", "--data", text, "--out", tuned, "--steps", 1,
            "--seq-len", 8, "--batch", 2, "--eval-every", 0, "--dp", "fsdp", nproc=2)  # fmt: skip
    succeed("checkpoint.py", "export", tuned, tmp_path / "out", "--format", "hf")
    assert read_config(tmp_path / "out")["model"] == config
    exported = (tmp_path / "out" / "tokenizer.model").read_bytes()
    assert exported == tokenizer.read_bytes()
    same_tokenizers(tmp_path / "out")
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["bos_token_id"] == 128_000 and about["eos_token_id"] == [128_001, 128_008, 128_009]


def test_loading_takes_little_memory_beside_a_ranks_share(tmp_path):
    """Less than the largest file, of 103 MB in files of 9 MB or 51 MB."""
    config = replace(PLAIN, dim=512, n_layers=8, n_heads=8, ffn_dim=1536, vocab_size=1500)
    model = ours(config)
    for place in ("hf", "meta"):
        (tmp_path / place).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "FILE_BYTES", 9_000_000)
        formats.save_hf(tmp_path / "hf", config, stored(model))
    save_parts(tmp_path / "meta", config, meta_parts(model, 2, by_rows_only=True))
    result = succeed("tests/workers/loading_memory.py", tmp_path / "hf", tmp_path / "meta", nproc=2)
    lines = [line.split() for line in result.out.splitlines()]
    assert [place for place, _, _ in lines] == ["hf", "meta"]
    for place, grown, total in lines:
        largest = max(path.stat().st_size for path in (tmp_path / place).iterdir())
        assert int(grown) < largest < 0.6 * int(total), result.out


# ------------------------------------------------------------------------------------ wrong input


def refused_with(path: Path, changes: dict, message: str) -> None:
    """A model whose description is changed; `...` takes a key out."""
    about = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in about.items() if v is not ...}))
    with pytest.raises(UserError) as error:
        load_pretrained(path.parent)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="mistral"), "has model_type mistral: only llama"),
        (dict(hidden_act="gelu"), "has hidden_act gelu"),
        (dict(attention_bias=True), "has attention_bias True"),
        (dict(quantization_config={"bits": 4}), "has quantized weights"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 2}), "RoPE of type 'yarn'"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor None"),
        (dict(head_dim=16), "head_dim 16: only 8"),
        (dict(hidden_size=...), "does not say 'hidden_size'"),
        (dict(rms_norm_eps="small"), "norm_eps cannot be 'small'"),
        (dict(num_hidden_layers=-1), "n_layers cannot be -1"),
        (dict(rope_scaling=3), "its RoPE is 3"),
        (dict(hidden_size=50), "dim 50 over 6 heads"),
        (dict(num_hidden_layers=2), "has unknown 9: model.layers.2.input_layernorm.weight"),
        (dict(num_hidden_layers=4), "lacks 9: model.layers.3.input_layernorm.weight"),
        (dict(vocab_size=102), "lm_head.weight [101, 48], not [102, 48]"),
        (dict(tie_word_embeddings=True), "ties embeddings, but has another lm_head"),
    ],
    ids=str,
)
def test_directories_that_are_no_llama_known_here(changes, message, tmp_path):
    formats.save_hf(tmp_path, PLAIN, stored(ours(PLAIN)))
    refused_with(tmp_path / "config.json", changes, message)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(dim=...), "does not say 'dim'"),
        (dict(n_layers=2), "has unknown 9: layers.2.attention.wk.weight"),
        (dict(n_kv_heads=3), "layers.0.attention.wk.weight [16, 48], not [24, 48]"),
        (dict(rope_theta=None), "rope_theta cannot be None"),
        (dict(n_layers=10**6), "n_layers cannot be 1000000"),
        (dict(rope_theta=10**400), "rope_theta cannot be 1000"),
        (dict(dim=True), "dim cannot be True"),
    ],
    ids=str,
)
def test_metas_directories_that_do_not_fit(changes, message, tmp_path):
    formats.save_meta(tmp_path, PLAIN, stored(ours(PLAIN)))
    refused_with(tmp_path / "params.json", changes, message)


class Evil:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


def test_pickled_code_is_not_run(tmp_path, capsys):
    save_parts(tmp_path, PLAIN, [{"tok_embeddings.weight": Evil()}])
    with pytest.raises(UserError, match="damaged, or holds more than weights"):
        load_pretrained(tmp_path)
    assert "code from" not in capsys.readouterr().out
    path = tmp_path / "consolidated.00.pth"
    for content in (b"", b"PK not a zip", b"version https://git-lfs", b"<html>"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged, or holds more than weights"):
            load_pretrained(tmp_path)
    for content in ([1, 2], {"a": 1}, {1: torch.zeros(2)}, {"a": torch.zeros(2, device="meta")}):
        torch.save(content, path)
        with pytest.raises(UserError, match="holds more than named tensors"):
            load_pretrained(tmp_path)


def test_mutated_pth_files_are_refused_or_read(tmp_path):
    config = replace(PLAIN, n_layers=1)
    save_parts(tmp_path, config, meta_parts(ours(config), 1, by_rows_only=True))
    path, choice, refusals = tmp_path / "consolidated.00.pth", random.Random(0), 0
    content = path.read_bytes()
    for _ in range(500):
        data = bytearray(content)
        for _ in range(choice.choice([1, 4, 20])):
            data[choice.randrange(2000 if choice.random() < 0.8 else len(data))] ^= 1 << 3
        path.write_bytes(data[: choice.choice([len(data)] * 5 + [len(data) // 2])])
        try:
            load_pretrained(tmp_path)
        except UserError:
            refusals += 1
    assert 100 < refusals < 500


def test_weights_of_several_types(tmp_path):
    """Norms in float32 beside bfloat16 are kept as they are; whole numbers are no weights."""
    weights = stored(ours(PLAIN, torch.bfloat16))
    norm = torch.rand(48)
    weights["norm.weight"] = Stored(torch.float32, (48,), lambda: norm)
    (tmp_path / "hf").mkdir()
    formats.save_hf(tmp_path / "hf", PLAIN, weights)
    import_weights(tmp_path / "hf", tmp_path / "run", None)
    export_weights(tmp_path / "run", tmp_path / "out", "hf", None)
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["model.norm.weight"], norm)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    weights["norm.weight"] = Stored(torch.int8, (48,), lambda: norm.char())
    formats.save_hf(tmp_path / "hf", PLAIN, weights)
    with pytest.raises(UserError, match=r"has whole numbers 1: model\.norm\.weight"):
        load_pretrained(tmp_path / "hf")


def test_files_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "FILE_BYTES", 30_000)
    formats.save_hf(tmp_path, PLAIN, stored(ours(PLAIN)))
    part = sorted(tmp_path.glob("*.safetensors"))[1]
    part.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"lacks {part.name}, which model.safetensors.index.json"):
        load_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for files in (["a"], {"a": 3}, {"a": "../a.safetensors"}):
        index.write_text(json.dumps({"weight_map": files}))
        with pytest.raises(UserError, match="weight_map has no names of files here"):
            load_pretrained(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(UserError, match=r"no model.safetensors beside it"):
        load_pretrained(tmp_path)


def test_wrong_commands_are_refused(tmp_path):
    formats.save_hf(tmp_path, PLAIN, stored(ours(PLAIN)))
    here, new = str(tmp_path), str(tmp_path / "new")
    refused(launch("checkpoint.py", "export", here, here, "--format", "hf"), f"{here} exists")
    with pytest.raises(UserError, match=f"no checkpoint in '{new}'"):
        import_weights(tmp_path / "new", tmp_path / "other", None)
    with pytest.raises(UserError, match=r"tokenizer bytes has 267 tokens, .* 101"):
        import_weights(tmp_path, tmp_path / "new", "bytes")
    result = launch("generate.py", here, "--prompt", "a")
    refused(result, "has no tokenizer.model: give its --tokenizer")


def test_a_tokenizer_of_another_kind_is_left_behind(tmp_path, capsys):
    """As Llama 2's. The weights go on alone, and a tokenizer can be given."""
    (tmp_path / "hf").mkdir()
    config = replace(PLAIN, vocab_size=267)
    formats.save_hf(tmp_path / "hf", config, stored(ours(config)))
    (tmp_path / "hf" / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15")
    export_weights(tmp_path / "hf", tmp_path / "meta", "meta", None)
    assert "warning: without a tokenizer, as " in capsys.readouterr().err
    assert not (tmp_path / "meta" / "tokenizer.model").exists()
    import_weights(tmp_path / "hf", tmp_path / "run", "bytes")
    assert read_config(tmp_path / "run")["tokenizer"] == "bytes"


# ------------------------------------------------------------------------------------ safetensors


def samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): (torch.randn(3, 5, generator=generator) * 4).abs().to(dtype)
        for dtype in formats.DTYPES.values()
    }
    transposed = torch.randn(4, 6, generator=generator).T
    return tensors | dict(scalar=torch.tensor(2.5), empty=torch.empty(0, 4), transposed=transposed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and a.contiguous().view(-1).view(torch.uint8).equal(
        b.contiguous().view(-1).view(torch.uint8)
    )


def test_safetensors_reads_what_we_write_and_the_other_way_round(tmp_path):
    tensors = samples()
    entries = {n: Stored(t.dtype, tuple(t.shape), lambda t=t: t) for n, t in tensors.items()}
    save_safetensors(tmp_path / "ours", entries, {"format": "pt"})
    by_them = safetensors.torch.load_file(tmp_path / "ours")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, tmp_path / "theirs", {"made": "there"})
    by_us = {name: entry.read() for name, entry in open_safetensors(tmp_path / "theirs").items()}
    assert by_them.keys() == by_us.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(by_them[name], tensor) and same(by_us[name], tensor), name


def write_raw(path: Path, header: bytes | dict, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin=0, end=8, dtype="F32", shape=(2,)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header, message",
    [
        (b"[]", "no JSON object"),
        (b" {}", "no JSON object"),
        (b"{" * 100_000, "not JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), "twice"),
        ({"a": 3}, "'a' does not have"),
        ({"a": entry() | {"more": 1}}, "'a' does not have"),
        ({"a": entry(dtype="F7")}, "unknown dtype F7"),
        ({"a": entry(dtype=["F32"])}, "unknown dtype"),
        ({"a": entry(end=12)}, "does not fill"),
        ({"a": entry(begin=8, end=0)}, "does not fill"),
        ({"a": entry(shape=(-2, -1))}, "cannot have shape"),
        ({"a": entry(shape=(True, 2))}, "cannot have shape"),
        ({"a": entry(shape=(0, 2**40, 2**40), end=0)}, "cannot have shape"),
        ({"a": entry(shape=(1,) * 65, end=4)}, "cannot have shape"),
        ({"a": entry(shape=(2.0,))}, "cannot have shape"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(4, 12)}, "gap"),
        ({"a": entry(0, 4, shape=(1,))}, "bytes where its header says"),
        ({"a": entry(0, 2**40, shape=(2**38,))}, "bytes where its header says"),
        ({"a": entry(), "__metadata__": {"n": 1}}, "__metadata__ is not text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_safetensors_are_refused(header, message, tmp_path):
    with pytest.raises(UserError, match=message):
        open_safetensors(write_raw(tmp_path / "file", header, bytes(8)))


def test_a_header_longer_than_the_file_or_than_100_mb(tmp_path):
    path = tmp_path / "file"
    for content in (b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="a header of"):
            open_safetensors(path)
    with open(path, "wb") as file:
        file.write((101_000_000).to_bytes(8, "little") + b"{}")
        file.truncate(200_000_000)  # a hole, not a real 200 MB
    with pytest.raises(UserError, match="a header of 101,000,000 bytes"):
        open_safetensors(path)


def test_a_file_of_more_than_4_gb(tmp_path):
    """Whose data is a hole but for its last numbers."""
    n = 2**30 + 2**20
    header = {"a": entry(0, 4 * n, shape=(n,)), "b": entry(4 * n, 4 * n + 8)}
    path = write_raw(tmp_path / "file", header, b"")
    with open(path, "r+b") as file:
        begin = file.seek(0, 2) + 4 * n
        file.seek(begin)
        file.write(torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert open_safetensors(path)["b"].read().tolist() == [1, 2]


def test_a_file_that_shrinks_is_not_read_beyond_its_end(tmp_path):
    path = write_raw(tmp_path / "file", {"a": entry()}, bytes(8))
    tensors = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="has changed"):
        tensors["a"].read()


def mutated(content: bytes, choice: random.Random) -> bytes:
    """A file with a few bits, bytes, numbers or stretches of it changed."""
    data = bytearray(content)
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(choice.choice([1, 1, 1, 2, 4])):
        at = choice.randrange(header if choice.random() < 0.9 else len(data)) % max(len(data), 1)
        kind = choice.randrange(6)
        if kind == 0:
            data[at] ^= 1 << choice.randrange(8)
        elif kind == 1:
            data[at] = choice.choice(b'0123456789{}[]",:-eE. \x00\xff')
        elif kind == 2:
            del data[at : at + choice.choice([1, 2, 8, 100])]
        elif kind == 3:
            data[at:at] = choice.choice([b"0", b"9", b"[", b'"', b"-", b"18446744073709551616"])
        elif kind == 4:
            data[:8] = choice.choice([0, 1, header, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        else:
            end = at + choice.choice([4, 16, 64])
            data[at:end] = data[at:end][::-1]
        if not data:
            break
    return bytes(data)


def test_mutated_safetensors_never_crash_and_are_judged_as_by_the_safetensors_package(tmp_path):
    """3,000 files: what we take, the package takes too, with the same bytes."""
    tensors = {name: t.contiguous() for name, t in samples().items() if "uint" not in name}
    few = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(3, dtype=torch.int64)}
    originals = [safetensors.torch.save(few, {"x": "y"}), safetensors.torch.save(tensors)]
    choice, path = random.Random(0), tmp_path / "file"
    taken = refused_by_us_alone = 0
    for i in range(3000):
        path.write_bytes(mutated(originals[i % 4 == 0], choice))
        try:
            their = safetensors.torch.load(path.read_bytes())
        except Exception:  # of many types, some of its own, some of Python's
            their = None
        try:
            our = {name: entry.read() for name, entry in open_safetensors(path).items()}
        except UserError:
            refused_by_us_alone += their is not None
            continue
        assert their is not None and their.keys() == our.keys(), i
        assert all(same(our[name], their[name]) for name in our), i
        taken += 1
    assert taken > 50  # names and data may change: not every mutation does harm
    assert refused_by_us_alone < 30, refused_by_us_alone
