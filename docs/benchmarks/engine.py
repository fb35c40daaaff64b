"""How fast the whole engine is, as its caller sees it, on the four workloads of workloads.py.

    python docs/benchmarks/engine.py
    python docs/benchmarks/engine.py --device cuda --dtype bfloat16 --attention sdpa

prints one JSON object a line: first what runs, then each workload's figures, medians of three runs.
Without --model it takes the default model where `callboard fetch-model` has put it, and random
weights of the same shape where not, for speed does not depend on them.

ttft_ms               from submitting a request to its first token, median over the requests
itl_ms                between one token of a request and its next, likewise; none for one token
output_tokens_per_s   new tokens of all requests over the time from the first submit to the last end
prompt_tokens_per_s   prompt tokens of all requests over the same time
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import trio
import workloads
from workloads import Work

from callboard import Engine, open_engine
from callboard.gpu.loading import read_config
from callboard.messages.control import NodeStatus
from callboard.messages.errors import ConfigError
from callboard.supervision.default_model import default_model
from callboard.supervision.settings import Settings

REPETITIONS = 3

# Room for every request of W3 at once, whatever the blocks' size.
MAX_ROWS = 64
KV_CACHE_GB = 2.0

# A GPU takes a long prompt in one piece; on a CPU the others would wait for it too long.
STEP_TOKENS = {"cpu": 512, "cuda": 4096}

DEFAULT_MODEL_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}

Figures = dict[str, float | None]


class Timing(NamedTuple):
    """When things happened to one request, in seconds."""

    first_token: float
    end: float
    num_tokens: int

    @property
    def between_tokens(self) -> float | None:
        """The mean time from one token to the next."""
        if self.num_tokens == 1:
            return None
        return (self.end - self.first_token) / (self.num_tokens - 1)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    with model_or_random(arguments.model) as model:
        settings = Settings(
            model=model,
            device=arguments.device,
            dtype=arguments.dtype,
            attention=arguments.attention,
            threads=arguments.threads,
            batch_invariant=arguments.batch_invariant,
            max_rows=MAX_ROWS,
            max_step_tokens=STEP_TOKENS["cpu" if arguments.device == "cpu" else "cuda"],
            kv_cache_gb=KV_CACHE_GB,
        )
        trio.run(run, settings, workloads.make())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 is its own choice")
    parser.add_argument("--batch-invariant", action="store_true", help="takes many times as long")
    return parser.parse_args(argv)


@contextmanager
def model_or_random(named: str) -> Iterator[str]:
    """Yield the model named, or the default model, or random weights of its shape."""
    if named:
        yield named
        return
    try:
        found = str(default_model())
    except ConfigError:
        found = ""
    with tempfile.TemporaryDirectory(prefix="callboard-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(DEFAULT_MODEL_SHAPE))
        yield found or f"random:{config}"


async def run(settings: Settings, named: dict[str, Work], repetitions: int = REPETITIONS) -> None:
    """Print what runs, then the figures of each workload as soon as they are known."""
    vocab_size = read_config(settings.model).decoder.vocab_size
    began = perf_counter()
    async with open_engine(settings) as engine:
        start_s = perf_counter() - began
        status = await engine.status()
        say({"start_s": round(start_s, 2), **executor_details(status.tree)})
        for name, work in named.items():
            figures = []
            for repetition in range(repetitions + 1):
                again = workloads.within(workloads.fresh(work, repetition), vocab_size)
                figures.append(await measure(engine, again))
            # The first time does not count: kernels are loaded and memory is taken in it.
            say({"workload": name, **median_figures(figures[1:])})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


async def measure(engine: Engine, work: Work) -> Figures:
    """Submit the requests of a workload at once, wait for all, and return the figures."""
    timings: list[Timing] = []

    async def one(prompt: list[int], num_tokens: int) -> None:
        timings.append(await time_request(engine, prompt, num_tokens))

    began = perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt, num_tokens in work:
            nursery.start_soon(one, prompt, num_tokens)
    seconds = perf_counter() - began
    gaps = [timing.between_tokens for timing in timings]
    known_gaps = [gap for gap in gaps if gap is not None]
    return {
        "ttft_ms": 1e3 * statistics.median(timing.first_token for timing in timings),
        "itl_ms": 1e3 * statistics.median(known_gaps) if known_gaps else None,
        "output_tokens_per_s": sum(timing.num_tokens for timing in timings) / seconds,
        "prompt_tokens_per_s": sum(len(prompt) for prompt, _ in work) / seconds,
    }


async def time_request(engine: Engine, prompt: list[int], num_tokens: int) -> Timing:
    """Run one request to its end; raises AssertionError when it ended early."""
    began = perf_counter()
    times: list[float] = []
    async with engine.submit(
        prompt, temperature=0.0, max_tokens=num_tokens, ignore_eos=True
    ) as stream:
        async for delta in stream:
            times += [perf_counter() - began] * (len(delta.token_ids) // 4)
    assert len(times) == num_tokens, f"{len(times)} tokens came, not {num_tokens}"
    return Timing(times[0], times[-1], num_tokens)


def median_figures(figures: list[Figures]) -> Figures:
    """Return the median of each figure."""
    medians: Figures = {}
    for name in figures[0]:
        known = [value for one in figures if (value := one[name]) is not None]
        medians[name] = round(statistics.median(known), 3) if known else None
    return medians


def executor_details(node: NodeStatus) -> dict[str, Any]:
    """Return what the first executor of the tree says of itself."""
    if node.kind == "Executor":
        return dict(node.details)
    return next(filter(None, map(executor_details, node.children)), {})


if __name__ == "__main__":
    main()
