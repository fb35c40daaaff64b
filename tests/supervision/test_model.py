"""From an operator's settings to the runner of a replica, without loading any weights."""

from callboard.supervision.model import replica_parts
from callboard.supervision.settings import Settings


def test_a_runner_is_made_as_the_settings_say() -> None:
    settings = Settings(
        model="random:tiny",
        device="cpu",
        dtype="float64",
        threads=3,
        block_tokens=8,
        batch_invariant=True,
    )

    description = replica_parts(settings).make_runner().describe()

    said = {name: description[name] for name in ("dtype", "threads", "block_tokens")}
    assert said == {"dtype": "float64", "threads": 3, "block_tokens": 8}
    assert description["batch_invariant"] == 1
