"""The context alone with a small model: a whole batch's life without runner or actors."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from callboard.gpu.blocks import BlockPool
from callboard.gpu.cache_spec import CacheSpec, KeyValueShape
from callboard.gpu.context import DynamicContext
from callboard.gpu.dimensions import BatchDimensions, BatchLimits, graph_list
from callboard.gpu.loading import LoadedModel, load_model
from callboard.messages.base import pack_ids
from callboard.messages.steps import RowSampling

CPU = torch.device("cpu")
NUM_BLOCKS = 60
PROMPTS = [
    [(17 * row + 5 * index) % 320 for index in range(length)]
    for row, length in enumerate([1, 9, 4, 13, 2, 7])
]
NUM_NEW = 10
LIMITS = BatchLimits(max_tokens=64, max_requests=8, max_model_len=60)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("random:tiny", device=CPU, dtype=torch.float32, attention="sdpa")


def make_context(
    model: LoadedModel,
    *,
    num_blocks: int = NUM_BLOCKS,
    paused_limit: int | None = None,
    graphs: Sequence[BatchDimensions] | None = None,
) -> DynamicContext:
    decoder = model.config.decoder
    return DynamicContext(
        max_rows=8,
        max_tokens=64,
        max_model_len=60,
        block_tokens=4,
        num_blocks=num_blocks,
        pool=BlockPool(num_blocks),
        paused_limit=paused_limit,
        cache_spec=CacheSpec(
            layers=("attention", "attention"),
            attention=KeyValueShape(num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim),
            dtype=torch.float32,
        ),
        graphs=graphs,
    )


def sampling(done: int = 0) -> RowSampling:
    return RowSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=NUM_NEW,
        min_tokens=0,
        stop_token_ids=(),
        first_position=done,
    )


def logits_of(
    model: LoadedModel, context: DynamicContext, graph: BatchDimensions | None = None
) -> torch.Tensor:
    inputs = context.begin_step(graph)
    assert inputs is not None
    with torch.inference_mode():
        hidden_TD = model.decoder.forward(inputs.input_ids_T, inputs.metadata, context.caches)
        logits_TV = model.decoder.logits(hidden_TD)
    return inputs.last_tokens(logits_TV)


def generate(model: LoadedModel, context: DynamicContext) -> list[list[int]]:
    """Run all prompts, one more of them a step; a row that is evicted begins again."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    waiting = list(range(len(PROMPTS)))
    while waiting or context.has_unfinished:
        if waiting and not context.num_paused:
            row = waiting[0]
            tokens = PROMPTS[row] + outputs[row]
            if context.check_availability(len(tokens)).fits:
                context.add_request(row, pack_ids(tokens), sampling(len(outputs[row])))
                waiting.pop(0)
        tokens_S = logits_of(model, context).argmax(dim=-1).numpy()
        rows = context.row_ids[context.num_paused :]
        for row, token in zip(rows, tokens_S.tolist(), strict=True):
            outputs[row].append(token)
        goes_on = np.array([len(outputs[row]) < NUM_NEW for row in rows], dtype=np.bool_)
        waiting = [*context.update_requests(goes_on, tokens_S).evicted[::-1], *waiting]
        context.check()
    return outputs


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[list[int]]:
    return generate(model, make_context(model))


@pytest.mark.parametrize(
    "graphs",
    [
        pytest.param((), id="round"),
        pytest.param(graph_list(LIMITS), id="graphs"),
        pytest.param(graph_list(LIMITS, num_sizes=1), id="one size"),
        pytest.param((BatchDimensions(24, 8, 0),), id="all presented as prefills"),
    ],
)
def test_padding_changes_no_token(
    model: LoadedModel, expected: list[list[int]], graphs: Sequence[BatchDimensions]
) -> None:
    assert generate(model, make_context(model, graphs=graphs)) == expected


@pytest.mark.parametrize("num_blocks", [8, 10, 13])
def test_rows_that_wait_or_are_evicted_get_the_same_tokens(
    model: LoadedModel, expected: list[list[int]], num_blocks: int
) -> None:
    context = make_context(model, num_blocks=num_blocks, paused_limit=2, graphs=())

    assert generate(model, context) == expected
    assert context.statistics().free_blocks == num_blocks - 1


def test_a_context_that_was_deallocated_begins_anew(
    model: LoadedModel, expected: list[list[int]]
) -> None:
    context = make_context(model)
    context.add_request(5, pack_ids(PROMPTS[5]), sampling())
    logits_of(model, context)

    context.deallocate()
    context.allocate()

    assert generate(model, context) == expected


def test_what_other_rows_left_in_the_dummy_block_reaches_nobody(model: LoadedModel) -> None:
    context = make_context(model, graphs=(BatchDimensions(32, 4, 4),))
    context.add_request(1, pack_ids(PROMPTS[1]), sampling())
    before = logits_of(model, context)

    for layer in (0, 1):
        for half in context.caches.layer(layer):
            half[context.dummy] = torch.nan
    after = logits_of(model, context)

    assert torch.equal(before, after)


def test_decodes_presented_as_prefills_compute_the_same(model: LoadedModel) -> None:
    context = make_context(model)
    for row in (1, 2, 3):
        context.add_request(row, pack_ids(PROMPTS[row][:3]), sampling())
    tokens_S = logits_of(model, context).argmax(dim=-1).numpy()
    context.update_requests(np.ones(3, dtype=np.bool_), tokens_S)
    context.add_request(4, pack_ids(PROMPTS[1]), sampling())

    plain = logits_of(model, context)
    crowded = logits_of(model, context, BatchDimensions(16, 5, 1))

    torch.testing.assert_close(crowded, plain, rtol=0, atol=1e-5)
    assert torch.equal(crowded.argmax(dim=-1), plain.argmax(dim=-1))
