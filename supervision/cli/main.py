"""The command line: `callboard`, also `python -m callboard` and `python -m callboard.supervision`.

Exit codes: 0 done, 1 refused or failed, 2 nobody answers at the endpoint, 3 no answer in time,
64 the command line itself is wrong, 130 interrupted.
"""

import functools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio
import typer

from callboard.actors.ledger import TextOut
from callboard.messages.base import unpack_floats, unpack_ids
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    Pause,
    PauseMode,
    Resume,
    State,
    StatusReply,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdateWeights,
    Verb,
    WeightsLevel,
)
from callboard.messages.errors import (
    ActorStopped,
    CallboardError,
    ConfigError,
    DeadlineExceeded,
    Unreachable,
)
from callboard.messages.membership import Role
from callboard.messages.requests import ChatMessage
from callboard.messages.sampling import LogprobsMode, SamplingParams
from callboard.supervision.cli import render
from callboard.supervision.cli.streams import announce, open_standard_streams
from callboard.supervision.engine import Engine, connect, open_engine
from callboard.supervision.keys import add_key, load_client_keys, make_keys
from callboard.supervision.logging import configure_logging
from callboard.supervision.record import Completion
from callboard.supervision.settings import DEFAULT_ENDPOINT, Settings, is_endpoint, load_settings
from callboard.supervision.submission import PromptLike
from callboard.version import __version__

DONE, REFUSED, UNREACHABLE, TIMED_OUT, USAGE = 0, 1, 2, 3, 64

INTERRUPTED = 130  # what shells say of a command that SIGINT ended

HANDSHAKE_S = 5.0
MIN_HANDSHAKE_S = 1.0
RETRY_S = 0.2

# typer brings a click of its own in some versions, and this is the one name it has in all.
_UsageProblem: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Serve a language model, generate with it, and control the tree of actors that runs it.",
    epilog="Exit codes: 0 done, 1 refused or failed, 2 nobody answers at the endpoint, "
    "3 no answer in time, 64 the command line is wrong, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _check_endpoint(endpoint: str | None) -> str | None:
    if endpoint and not is_endpoint(endpoint):
        raise typer.BadParameter(f"{endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")
    return endpoint


def _check_wait(state: State | None) -> State | None:
    if state in (State.STOPPED, State.FAILED):
        raise typer.BadParameter(f"a server that has {state} has no process that could say so")
    return state


Endpoint = Annotated[
    str,
    typer.Option(
        "--connect",
        envvar="CALLBOARD_ENDPOINT",
        help="Where the server listens.",
        metavar="ENDPOINT",
        callback=_check_endpoint,
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        envvar="CALLBOARD_KEYS",
        help="A key file, for a server that wants one; see the command keys.",
        metavar="FILE",
    ),
]
Timeout = Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the effect.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        render.line(f"callboard {__version__}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Option(
            help="A .gguf file, a Hugging Face folder, or random:tiny; by default what "
            "fetch-model has fetched."
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help=f"Where clients connect: tcp://HOST:PORT or ipc://PATH; by default "
            f"{DEFAULT_ENDPOINT}.",
            metavar="ENDPOINT",
        ),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Replica processes.")] = None,
    kv_cache_gb: Annotated[float | None, typer.Option(help="GiB of KV cache a replica.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of settings; options here win.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(help="Seconds open requests get to finish at the first signal; else 30."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the server's keys, as the command keys makes it.", metavar="FOLDER"
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Listen at any address without keys."),
    ] = None,
) -> int:
    """Run the server until `callboard stop` or a signal.

    It prints "callboard: ready at ENDPOINT" when it is.

    The first SIGINT or SIGTERM lets open requests finish, the second ends them.
    """
    from callboard.supervision.serve import serve as run_server
    from callboard.supervision.watchdog import watched_loop

    settings = _with_model(
        load_settings(
            config,
            model=model,
            listen=listen,
            replicas=replicas,
            kv_cache_gb=kv_cache_gb,
            device=device,
            drain_s=drain_s,
            log_level=log_level,
            keys=None if keys is None else str(keys),
            insecure=insecure,
        )
    )
    configure_logging(settings.log_level, as_json=settings.log_json)

    async def run() -> None:
        with watched_loop(settings.loop_timeout_s):
            await run_server(settings, announce=announce)

    trio.run(run)
    return DONE


@app.command()
def replica(
    join: Annotated[
        str,
        typer.Option(
            help="The server to bring replicas to.", metavar="ENDPOINT", callback=_check_endpoint
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="What the server calls this host; by default the machine's name."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Replica processes; by default one.", min=1)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Where the server's model is on this machine, if elsewhere."),
    ] = None,
    kv_cache_gb: Annotated[
        float | None, typer.Option(help="GiB of KV cache a replica; else as the server's.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file of settings that differ here; options here win."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    keys: Keys = None,
) -> int:
    """Bring replicas on this machine to a server elsewhere, until it stops or a signal.

    It waits for a server that is not there yet, and joins again when it lost it.

    The first SIGINT or SIGTERM hands the requests to other replicas; the second waits for nothing.
    """
    from callboard.supervision.host import join as join_server
    from callboard.supervision.watchdog import watched_loop

    def adapt(settings: Settings) -> Settings:
        return load_settings(
            config,
            base=settings,
            replicas=replicas,
            model=model,
            kv_cache_gb=kv_cache_gb,
            device=device,
            log_level=log_level,
        )

    own = adapt(Settings())
    configure_logging(own.log_level, as_json=own.log_json)
    called = socket.gethostname().partition(".")[0] if name is None else name
    client_keys = None if keys is None else load_client_keys(keys)

    async def run() -> None:
        with watched_loop(own.loop_timeout_s):
            await join_server(join, called, adapt=adapt, keys=client_keys, announce=announce)

    trio.run(run)
    return DONE


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Text to continue.")],
    connect_to: Annotated[
        str | None,
        typer.Option(
            "--connect", metavar="ENDPOINT", help="A running server.", callback=_check_endpoint
        ),
    ] = None,
    keys: Keys = None,
    model: Annotated[str | None, typer.Option(help="Load this model here instead.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's turn.")] = False,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.")] = 1,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate at most; 0 only scores the prompt.")
    ] = 128,
    min_tokens: Annotated[int, typer.Option(help="Tokens before it may stop.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Makes sampling repeatable; answer i has it plus i.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 disfavours tokens of prompt and output; 1 is off.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken off the logits of tokens of the output; 0 is off.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken off for each time a token is in the output; 0 is off.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(help="ID=BIAS, added to the logit of a token.", metavar="ID=BIAS"),
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Never complete this text.")] = None,
    bad_tokens: Annotated[
        list[str] | None,
        typer.Option(help="ID,ID,...: never complete these tokens.", metavar="ID,ID,..."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="Stop at this token.")] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Show the text it stopped at.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on behind the end-of-sequence token.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, and of so many alternatives.")
    ] = None,
    logprobs_mode: Annotated[
        LogprobsMode,
        typer.Option(help="Of the model's logits, or of what the token was chosen from."),
    ] = LogprobsMode.RAW,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same of the prompt's tokens, always of the logits.")
    ] = None,
    special: Annotated[bool, typer.Option("--special", help="Show control tokens.")] = False,
    priority: Annotated[int, typer.Option(help="Smaller runs earlier.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds for all of it.")] = 600.0,
) -> int:
    """Generate text, with a server or, when none is named, with a model loaded here.

    CALLBOARD_ENDPOINT names a server too.
    """
    if connect_to and model:
        raise typer.BadParameter("--connect and --model exclude each other")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        include_stop=include_stop,
        ignore_eos=ignore_eos,
        skip_special_tokens=not special,
        logprobs=logprobs,
        logprobs_mode=logprobs_mode,
        prompt_logprobs=prompt_logprobs,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(map(_bias, logit_bias or ())),
        bad_words=tuple(bad_word or ()),
        bad_token_ids=tuple(map(_token_ids, bad_tokens or ())),
    )
    endpoint = connect_to or (
        None if model else _check_endpoint(os.environ.get("CALLBOARD_ENDPOINT"))
    )
    asked: list[PromptLike] = [
        [ChatMessage(role="user", content=prompt)] if chat else prompt for prompt in prompts
    ]

    async def run(engine: Engine) -> None:
        if len(asked) == n == 1 and not as_json:
            await _stream(engine, asked[0], params, priority)
            return
        answers = await engine.generate(asked, params, n=n, priority=priority)
        for place, answer in enumerate(answers):
            _show(prompts[place // n], answer, as_json)

    async def with_engine() -> int:
        with trio.fail_after(timeout):
            if endpoint:
                async with connect(endpoint, timeout=_handshake_s(timeout), keys=keys) as engine:
                    await run(engine)
            else:
                async with open_engine(_with_model(load_settings(None, model=model))) as engine:
                    await run(engine)
        return DONE

    return trio.run(with_engine)


@app.command()
def pause(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    mode: Annotated[PauseMode, typer.Option(help="What happens to running requests.")] = (
        PauseMode.KEEP
    ),
    drain_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds they get to finish, in mode drain.")
    ] = 60.0,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Run no forward pass until `unpause`. Requests are still taken, and wait."""
    extra = drain_s if mode is PauseMode.DRAIN else 0.0
    return _control(endpoint, keys, Pause(mode=mode, drain_s=drain_s), timeout + extra, as_json)


@app.command()
def unpause(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Go on after `pause`."""
    return _control(endpoint, keys, Unpause(), timeout, as_json)


@app.command()
def step(
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="Forward passes.")] = 1,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Run N forward passes in each replica of a paused server, one by default."""
    return _control(endpoint, keys, Step(count=count), timeout, as_json)


@app.command()
def suspend(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    kv: Annotated[KVLevel, typer.Option(help="What happens to the KV cache.")] = KVLevel.DROP,
    weights: Annotated[WeightsLevel, typer.Option(help="What happens to the weights.")] = (
        WeightsLevel.KEEP
    ),
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Pause, and free device memory. No request is lost."""
    return _control(endpoint, keys, Suspend(kv=kv, weights=weights), timeout, as_json)


@app.command()
def resume(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> int:
    """Take the memory back, and be as before `suspend`: running or paused."""
    return _control(endpoint, keys, Resume(), timeout, as_json)


@app.command()
def update_weights(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A model of the same shape, as the server sees it."),
    ],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Its number; by default one more than now.")
    ] = None,
    keep_kv: Annotated[
        bool,
        typer.Option("--keep-kv", help="Leave running requests what the old weights computed."),
    ] = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> int:
    """Change the weights of a paused or suspended server, in all replicas or in none."""
    verb = UpdateWeights(source=source, version=version or 0, keep_kv=keep_kv)
    return _control(endpoint, keys, verb, timeout, as_json)


@app.command()
def stop(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    drain_s: Annotated[float, typer.Option(min=0.0, help="Seconds open requests get.")] = 0.0,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """End every request, then the server."""
    return _control(endpoint, keys, Stop(drain_s=drain_s), timeout + drain_s, as_json)


@app.command()
def abort(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The id its client gave it.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Abort every open request.")] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
    """Abort one request, or all."""
    if bool(request_id) == every:
        raise typer.BadParameter("give one request id, or --all")

    async def run() -> None:
        async with connect(endpoint, timeout=_handshake_s(timeout), keys=keys) as engine:
            with trio.fail_after(timeout):
                answer = await engine.abort(request_id, all=every)
        if as_json:
            render.as_json(answer)
        else:
            render.line(f"abort: {answer.aborted} requests")

    trio.run(run)
    return DONE


@app.command()
def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    keys: Keys = None,
    wait: Annotated[
        State | None,
        typer.Option(
            help="Wait until it is so, also for a server yet to start.", callback=_check_wait
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait.")] = 60.0,
    as_json: AsJson = False,
) -> int:
    """Show the tree and what it is doing."""
    answer = trio.run(_status, endpoint, keys, wait, timeout)
    if as_json:
        render.as_json(answer)
    else:
        render.status(answer)
    return DONE


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(help="A file of a journal, or its folder.")],
    about: Annotated[
        str, typer.Option(help="Only messages with this id in them, say that of a request.")
    ] = "",
    actor: Annotated[
        list[str] | None, typer.Option(help="Only messages from or to this actor; repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show so many messages, the last ones.")] = 200,
    check: Annotated[
        bool,
        typer.Option("--check", help="Run schedulers and allocators again, and compare."),
    ] = False,
) -> int:
    """Show the conversation in a journal as a diagram, or run its pure parts again."""
    from callboard.supervision import replay as journal

    try:
        processes = journal.read(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if check:
        verdicts = [
            verdict
            for process in processes
            for verdict in journal.run_again(process, _text_for(journal.settings_of(process)))
        ]
        render.verdicts(verdicts)
        return REFUSED if any(verdict.difference for verdict in verdicts) else DONE
    shown = list(journal.arrows(processes, about=about, actors=actor or ()))
    for text in journal.diagram(shown[-limit:]):
        render.line(text)
    return DONE


@functools.lru_cache(maxsize=1)  # processes of one server have one model
def _text_for(settings: Settings) -> Callable[[SamplingParams], TextOut] | None:
    """Return what makes text of the tokens of a journal's model; None where it is not here."""
    from callboard.supervision.model import replica_parts

    try:
        return replica_parts(settings).text_for
    except CallboardError:
        return None


@app.command()
def keys(
    folder: Annotated[
        Path, typer.Option("--dir", help="Where the keys are put.", metavar="FOLDER")
    ] = Path("keys"),
    add: Annotated[
        str | None, typer.Option(help="Make one more key for the server whose folder it is.")
    ] = None,
    role: Annotated[Role, typer.Option(help="What the added key may be used for.")] = Role.CLIENT,
    force: Annotated[bool, typer.Option("--force", help="Replace keys that exist.")] = False,
) -> int:
    """Make the keys of a server, of a client and of an operator.

    The server gets the folder, clients and operators their key file.
    """
    made = (
        make_keys(folder, force=force) if add is None else add_key(folder, add, role, force=force)
    )
    for path in made:
        render.line(str(path))
    return DONE


@app.command()
def fetch_model() -> int:
    """Download the default model into the cache, if it is not there."""
    from callboard.supervision.default_model import fetch

    render.line(str(fetch()))
    return DONE


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    open_standard_streams()
    configure_logging()
    try:
        code = app(arguments, prog_name="callboard", standalone_mode=False)
    except typer.Exit as error:
        return error.exit_code
    except _UsageProblem as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BaseExceptionGroup as group:  # an interrupt that met tasks of several nurseries
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        return INTERRUPTED
    except Unreachable as error:
        render.complain(str(error))
        return UNREACHABLE
    except (DeadlineExceeded, trio.TooSlowError) as error:
        render.complain(str(error) or "no answer in time")
        return TIMED_OUT
    except (CallboardError, OSError) as error:
        render.complain(str(error))
        return REFUSED
    return code if isinstance(code, int) else DONE


def _with_model(settings: Settings) -> Settings:
    """Fill in the default model where none is named. Raises ConfigError when it is not there."""
    if settings.model:
        return settings
    from callboard.supervision.default_model import default_model

    return msgspec.structs.replace(settings, model=str(default_model()))


def _handshake_s(timeout: float) -> float:
    """Return the time to find the server in: a short timeout is meant for what comes then."""
    return max(MIN_HANDSHAKE_S, min(timeout, HANDSHAKE_S))


def _control(endpoint: str, keys: Path | None, verb: Verb, timeout: float, as_json: bool) -> int:
    async def run() -> ControlReply:
        async with connect(endpoint, timeout=_handshake_s(timeout), keys=keys) as engine:
            return await engine.ask_tree(verb, timeout)

    answer = trio.run(run)
    if as_json:
        render.as_json(answer)
    else:
        render.reply(answer)
    if answer.refused:
        return REFUSED
    return TIMED_OUT if answer.late else DONE


async def _status(
    endpoint: str, keys: Path | None, wait: State | None, timeout: float
) -> StatusReply:
    deadline = trio.current_time() + timeout
    while True:
        left = deadline - trio.current_time()
        try:
            async with connect(endpoint, timeout=_handshake_s(left), keys=keys) as engine:
                left = max(0.0, deadline - trio.current_time())
                if wait is None:
                    return await engine.status(timeout=left)
                return await engine.wait_for(wait, timeout=left)
        except (Unreachable, ActorStopped):
            # A server that is just being started, or started again, is worth waiting for.
            if wait is None or trio.current_time() + RETRY_S >= deadline:
                raise
            await trio.sleep(RETRY_S)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias {text!r} is not ID=BIAS") from None


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(token_id) for token_id in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--bad-tokens {text!r} is not ID,ID,...") from None


async def _stream(
    engine: Engine, prompt: PromptLike, params: SamplingParams, priority: int
) -> None:
    async with engine.submit(prompt, params, priority=priority) as stream:
        wants_prompt = params.prompt_logprobs is not None
        try:
            async for delta in stream:
                if wants_prompt and (scores := stream.record.prompt_logprobs) is not None:
                    _show_logprobs(stream.prompt_token_ids[1:], scores)
                    wants_prompt = False
                render.piece(delta.text)
                if params.logprobs is not None:
                    _show_logprobs(unpack_ids(delta.token_ids), unpack_floats(delta.logprobs))
        finally:
            render.line()


def _show_logprobs(token_ids: list[int], logprobs: list[float]) -> None:
    pairs = zip(token_ids, logprobs, strict=False)
    render.piece("".join(f" [{token_id}: {logprob:.3f}]" for token_id, logprob in pairs))


def _show(prompt: str, answer: Completion, as_json: bool) -> None:
    if as_json:
        render.as_json(render.completion(answer))
    else:
        choice = f" #{answer.choice}" if answer.choice else ""
        render.line(f"{prompt!r}{choice} → {answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    sys.exit(main())
