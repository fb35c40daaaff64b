import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from callboard.gpu.attention.base import build_metadata
from callboard.gpu.kv_cache import KVCache
from callboard.gpu.loading import LoadedModel, ModelError, load_model, read_config

CPU = torch.device("cpu")


def load(source: str | Path) -> LoadedModel:
    return load_model(source, device=CPU, dtype=torch.float32)


def greedy(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    config = model.config.decoder
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=1,
        block_tokens=64,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    tokens, done = list(prompt), 0
    with torch.inference_mode():
        for _ in range(count):
            feed = tokens[done:]
            done = len(tokens)
            metadata = build_metadata([len(feed)], [done], [[0]], block_tokens=64)
            hidden = model.decoder.forward(torch.tensor(feed), metadata, cache)
            tokens.append(int(model.decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def test_the_tiny_random_model_says_something_else_to_each_prompt() -> None:
    model = load("random:tiny")

    outputs = [greedy(model, [token, token + 1], 12) for token in range(0, 60, 10)]

    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert sum(len(set(output)) > 4 for output in outputs) >= 5


def test_the_same_seed_makes_the_same_model_and_another_one_another() -> None:
    prompt = [1, 2, 3]

    first, again, other = (load(f"random:tiny{seed}") for seed in ("", "#0", "#7"))

    assert greedy(first, prompt, 8) == greedy(again, prompt, 8)
    assert greedy(first, prompt, 8) != greedy(other, prompt, 8)


def test_any_configuration_can_have_random_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "vocab_size": 50,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
                "eos_token_id": 3,
                "tie_word_embeddings": True,
            }
        )
    )

    model = load(f"random:{path}")

    assert model.config.format == "random"
    assert model.config.source == f"random:{path}"
    assert model.config.eos_token_ids == (3,)
    assert model.config.decoder.qkv_bias
    assert len(greedy(model, [1], 3)) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("random:huge", "'huge' is neither a config.json nor one of tiny"),
        ("random:tiny#x", "the seed behind '#' is 'x', not a number"),
        ("no/such/model", "no/such/model: no such file or folder"),
    ],
)
def test_a_source_that_names_nothing_is_refused(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(source)


def test_what_loading_came_to_is_told() -> None:
    model = load("random:tiny")

    d = model.config.decoder
    heads = (2 * d.num_heads + 2 * d.num_kv_heads) * d.head_dim
    per_layer = d.hidden_size * (heads + 3 * d.intermediate_size + 2)
    weights = 2 * d.vocab_size * d.hidden_size + d.num_layers * per_layer + d.hidden_size
    assert model.weights_bytes == 4 * weights
    assert model.attention.name == "sdpa"
    assert model.seconds > 0


def test_an_attention_backend_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="'flash' cannot be used"):
        load_model("random:tiny", device=CPU, dtype=torch.float32, attention="flash")


def test_a_configuration_is_read_without_the_heavy_packages() -> None:
    script = (
        "import sys; from callboard.gpu.loading import read_config; read_config('random:tiny');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'gguf')))"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
