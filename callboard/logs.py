"""The loggers of this package: structlog's interface on top of the standard library's logging.

So a program that embeds the engine decides about our lines as it does about everybody's: until it
says otherwise, warnings go to standard error and the rest nowhere.
"""

import logging
from typing import Any

import structlog

ROOT = "callboard"

_PROCESSORS: list[structlog.typing.Processor] = [
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.render_to_log_kwargs,
]


def get_logger(**context: Any) -> structlog.stdlib.BoundLogger:
    """Return a logger with the given context bound to each of its lines."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(ROOT),
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return logger.bind(**context)
