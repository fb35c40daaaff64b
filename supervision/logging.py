"""Where the log lines of a process of ours go: to standard error, for people or as JSON."""

import logging
import sys

import structlog

from callboard.logs import ROOT


def configure_logging(level: str = "warning", *, as_json: bool = False) -> None:
    """Set logging up; a program that embeds the engine does its own.

    Raises ValueError for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"the log level {level} is none of debug, info, warning, error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(as_json=as_json))
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(number)


def _formatter(*, as_json: bool) -> logging.Formatter:
    if as_json:
        last: list[structlog.typing.Processor] = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
    else:
        last = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.ExtraAdder(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
