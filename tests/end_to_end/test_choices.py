"""Several choices for one prompt, by a model that computes."""

from callboard.supervision.engine import open_engine


async def test_a_choice_is_what_a_request_with_its_seed_gives() -> None:
    prompt = list(range(1, 40))
    async with open_engine(model="random:tiny", kv_cache_gb=0.05, threads=1) as engine:
        choices = await engine.generate([prompt], n=5, seed=40, max_tokens=6, ignore_eos=True)
        alone = [
            answer
            for seed in range(40, 45)
            for answer in await engine.generate([prompt], seed=seed, max_tokens=6, ignore_eos=True)
        ]

    assert [one.token_ids for one in choices] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in choices}) == 5
