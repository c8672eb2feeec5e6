import struct
from pathlib import Path

import pytest

from legroom.errors import LegroomError
from legroom.facts.model_sources import load


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, value: int | str | list[str]) -> bytes:
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)


def tensor(name: str, shape: tuple[int, ...], kind: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)


def write_gguf(path: Path, kind: int = 12) -> None:
    metadata = [
        entry("general.architecture", "llama"),
        entry("general.name", "Tiny Llama"),
        entry("llama.block_count", 2),
        entry("llama.embedding_length", 256),
        entry("llama.feed_forward_length", 512),
        entry("llama.attention.head_count", 4),
        entry("llama.attention.head_count_kv", 2),
        entry("llama.context_length", 4096),
        entry("tokenizer.ggml.tokens", ["a", "b"]),
    ]
    tensors = [tensor("token_embd.weight", (256, 1000), kind), tensor("output_norm.weight", (256,), 0)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    path.write_bytes(head + b"".join(metadata) + b"".join(tensors))


def test_a_gguf_header_gives_the_architecture_and_the_bytes_of_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    model = load(str(path))
    assert (model.name, model.architecture) == ("Tiny Llama", "LlamaForCausalLM")
    assert (len(model.layers), model.hidden_size, model.vocab_size) == (2, 256, 1000)
    assert (model.max_position_embeddings, model.tie_word_embeddings) == (4096, True)
    # Q4_K: 144 bytes for 256 elements; F32: 4 for one.
    assert model.checkpoint_bytes == 1000 * 144 + 256 * 4
    assert model.quantization is not None
    assert (model.quantization.method, model.quantization.weight_bits) == ("gguf", 4)


def test_a_gguf_file_of_half_precision_is_not_quantized(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    write_gguf(path, kind=1)
    assert load(str(path)).quantization is None


def test_every_cut_of_a_gguf_file_is_a_clear_message(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole)
    content = whole.read_bytes()
    for length in range(0, len(content) - 1, 7):
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[:length])
        with pytest.raises(LegroomError) as error:
            load(str(path))
        assert error.value.exit_code == 2


def test_a_file_that_only_claims_to_be_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "liar.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 200)
    with pytest.raises(LegroomError):
        load(str(path))
