"""What is written on the outside of a message that crosses a process border.

Whoever only routes reads the envelope and leaves the body as the bytes it came in.
"""

import msgspec

MessageId = int


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`answers` is the id of the ask this replies to, `cause` the id of the message that led to

    this one (0: none), `timeout_ns` what is left of the deadline as a duration, since clocks
    differ between hosts (-1: none).
    """

    version: int
    message_id: MessageId
    answers: MessageId
    cause: MessageId
    sender: str
    receiver: str
    timeout_ns: int
    body: msgspec.Raw
