"""The command line: `callboard`, also `python -m callboard` and `python -m callboard.supervision`.

Exit codes: 0 done, 1 refused or failed, 2 nobody answers at the endpoint, 3 no answer in time,
64 the command line itself is wrong.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import trio
import typer

from callboard.messages.base import unpack_ids
from callboard.messages.control import KVLevel, PauseMode, State, WeightsLevel
from callboard.messages.errors import CallboardError, DeadlineExceeded, Unreachable
from callboard.messages.requests import ChatMessage, Delta
from callboard.messages.sampling import SamplingParams
from callboard.supervision.cli import render
from callboard.supervision.engine import Completion, Engine, PromptLike, connect, open_engine
from callboard.supervision.logging import configure_logging
from callboard.supervision.settings import DEFAULT_ENDPOINT, load_settings

T = TypeVar("T")

DONE, REFUSED, UNREACHABLE, TIMED_OUT, USAGE = 0, 1, 2, 3, 64

HANDSHAKE_S = 5.0
RETRY_S = 0.2

app = typer.Typer(
    help=__doc__.splitlines()[0],
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Endpoint = Annotated[
    str,
    typer.Option(
        "--connect", envvar="CALLBOARD_ENDPOINT", help="Where the server listens.", metavar="EP"
    ),
]
Timeout = Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the effect.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="A .gguf file or a model folder.")] = None,
    listen: Annotated[str | None, typer.Option(help="Endpoint to listen at.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Replica processes.")] = None,
    kv_cache_gb: Annotated[float | None, typer.Option(help="GiB of KV cache a replica.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> int:
    """Run the server until STOP or a signal."""
    from callboard.supervision.serve import print_line, serve as run_server

    settings = load_settings(
        config,
        model=model or _default_model(config),
        listen=listen,
        replicas=replicas,
        kv_cache_gb=kv_cache_gb,
        device=device,
        log_level=log_level,
    )
    configure_logging(settings.log_level, as_json=settings.log_json)

    async def run() -> int:
        return await run_server(settings, announce=print_line)

    return trio.run(run)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...")],
    connect_to: Annotated[
        str | None, typer.Option("--connect", metavar="EP", help="A running server.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Run this model here instead.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's turn.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, and of so many alternatives.")
    ] = None,
    special: Annotated[bool, typer.Option("--special", help="Show control tokens.")] = False,
    as_json: AsJson = False,
    timeout: Timeout = 600.0,
) -> int:
    """Generate text, with a server or, when none is named, with a model loaded here."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        skip_special_tokens=not special,
    )
    endpoint = connect_to or (None if model else os.environ.get("CALLBOARD_ENDPOINT"))
    asked: list[PromptLike] = [
        [ChatMessage(role="user", content=prompt)] if chat else prompt for prompt in prompts
    ]

    async def run(engine: Engine) -> None:
        if len(asked) == 1 and not as_json:
            await _stream(engine, asked[0], params)
            return
        for prompt, answer in zip(prompts, await engine.generate(asked, params), strict=True):
            _show(prompt, answer, as_json)

    async def with_engine() -> int:
        with trio.fail_after(timeout):
            if endpoint:
                async with connect(endpoint, timeout=min(timeout, HANDSHAKE_S)) as engine:
                    await run(engine)
            else:
                async with open_engine(model=model or _default_model(None)) as engine:
                    await run(engine)
        return DONE

    return trio.run(with_engine)


@app.command()
def pause(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    mode: Annotated[PauseMode, typer.Option(help="What happens to running requests.")] = (
        PauseMode.KEEP
    ),
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Run no forward pass until UNPAUSE."""
    return _control(endpoint, timeout, as_json, lambda engine: engine.pause(mode, timeout=timeout))


@app.command()
def unpause(
    endpoint: Endpoint = DEFAULT_ENDPOINT, timeout: Timeout = 60.0, as_json: AsJson = False
) -> int:
    """Step again."""
    return _control(endpoint, timeout, as_json, lambda engine: engine.unpause(timeout=timeout))


@app.command()
def suspend(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    kv: Annotated[KVLevel, typer.Option(help="What happens to the KV cache.")] = KVLevel.DROP,
    weights: Annotated[WeightsLevel, typer.Option(help="What happens to the weights.")] = (
        WeightsLevel.KEEP
    ),
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Pause and free device memory."""
    return _control(
        endpoint,
        timeout,
        as_json,
        lambda engine: engine.suspend(kv=kv, weights=weights, timeout=timeout),
    )


@app.command()
def resume(
    endpoint: Endpoint = DEFAULT_ENDPOINT, timeout: Timeout = 120.0, as_json: AsJson = False
) -> int:
    """Take the memory back and go on as before SUSPEND."""
    return _control(endpoint, timeout, as_json, lambda engine: engine.resume(timeout=timeout))


@app.command()
def stop(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    drain_s: Annotated[float, typer.Option(min=0.0, help="Seconds open requests get.")] = 0.0,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """End every request, then the server."""
    return _control(
        endpoint,
        timeout + drain_s,
        as_json,
        lambda engine: engine.stop(drain_s=drain_s, timeout=timeout),
    )


@app.command()
def abort(
    request_id: Annotated[str, typer.Argument(help="The id its client gave it.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Abort every open request.")] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Abort one request, or all."""

    async def run() -> int:
        with trio.fail_after(timeout):
            async with connect(endpoint, timeout=min(timeout, HANDSHAKE_S)) as engine:
                answer = await engine.abort(request_id, all=every)
        if as_json:
            render.as_json(answer)
        else:
            render.line(f"abort: {answer.aborted} requests")
        return DONE

    return trio.run(run)


@app.command()
def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    wait: Annotated[State | None, typer.Option(help="Wait until the tree is so.")] = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Show the tree and what it is doing."""

    async def run() -> int:
        answer = await _status(endpoint, wait, timeout)
        if as_json:
            render.as_json(answer)
        else:
            render.status(answer)
        return DONE

    return trio.run(run)


@app.command()
def fetch_model() -> int:
    """Download the default model into the cache, if it is not there."""
    from callboard.supervision.default_model import fetch

    render.line(str(fetch()))
    return DONE


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    configure_logging()
    try:
        code = app(arguments, prog_name="callboard", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, click.Abort):
        return 130
    except Unreachable as error:
        render.complain(str(error))
        return UNREACHABLE
    except (DeadlineExceeded, trio.TooSlowError) as error:
        render.complain(str(error) or "no answer in time")
        return TIMED_OUT
    except (CallboardError, ValueError, OSError) as error:
        render.complain(str(error))
        return REFUSED
    return code if isinstance(code, int) else DONE


def _default_model(config: Path | None) -> str | None:
    """Return the default model's path, where no configuration file could name another."""
    if config is not None:
        return None
    from callboard.supervision.default_model import default_model

    return str(default_model())


def _control(
    endpoint: str,
    timeout: float,
    as_json: bool,
    verb: Callable[[Engine], Awaitable[Any]],
) -> int:
    async def run() -> int:
        async with connect(endpoint, timeout=min(timeout, HANDSHAKE_S)) as engine:
            answer = await verb(engine)
        if as_json:
            render.as_json(answer)
        else:
            render.reply(answer)
        return DONE

    return trio.run(run)


async def _status(endpoint: str, wait: State | None, timeout: float) -> Any:
    deadline = trio.current_time() + timeout
    while True:
        left = deadline - trio.current_time()
        try:
            async with connect(endpoint, timeout=min(max(left, 0.0), HANDSHAKE_S)) as engine:
                if wait is None:
                    return await engine.status(timeout=left)
                return await engine.wait_for(wait, timeout=left)
        except Unreachable:
            # A server that is just being started is worth waiting for.
            if wait is None or trio.current_time() + RETRY_S >= deadline:
                raise
            await trio.sleep(RETRY_S)


async def _stream(engine: Engine, prompt: PromptLike, params: SamplingParams) -> None:
    async with engine.submit(prompt, params) as stream:
        async for delta in stream:
            render.piece(delta.text)
            if params.logprobs is not None:
                _show_logprobs(delta)
    render.line()


def _show_logprobs(delta: Delta) -> None:
    from callboard.messages.base import unpack_floats

    pairs = zip(unpack_ids(delta.token_ids), unpack_floats(delta.logprobs), strict=True)
    render.piece("".join(f" [{token_id}: {logprob:.3f}]" for token_id, logprob in pairs))


def _show(prompt: str, answer: Completion, as_json: bool) -> None:
    if as_json:
        render.as_json(render.completion(answer))
    else:
        render.line(f"{prompt!r} → {answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    sys.exit(main())
