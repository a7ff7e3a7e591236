"""Users of a load test under gevent, as locust runs them: `python -m load.gevent_users HOST:PORT USERS SECONDS`.

Locust replaces Python's threads, queues and sockets by greenlets; gRPC waits outside Python and must be told. Both
are done before anything else is imported, else the first blocking call stops every user and looks like a hanging
server. Each user streams one answer after another with tritonclient's synchronous client, and is killed in the middle
of one when the time is over. Prints one JSON line: how many requests were sent, answered to their end, left.
"""

# ruff: noqa: E402
from __future__ import annotations

from gevent import monkey

monkey.patch_all()

from grpc.experimental import gevent as grpc_gevent

grpc_gevent.init_gevent()

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import gevent
from gevent.queue import Queue
from tritonclient import grpc

from load.streams import MODEL, inputs

MAX_TOKENS = 10
_LEAVE_S = 30.0


@dataclass
class Count:
    """Of all users together."""

    sent: int = 0
    answered: int = 0
    left: int = 0


def user(url: str, count: Count) -> None:
    """One answer after another, until killed."""
    answers: Queue[tuple[Any, Any]] = Queue()
    client = grpc.InferenceServerClient(url, channel_args=[("grpc.use_local_subchannel_pool", 1)])
    client.start_stream(lambda result, error: answers.put((result, error)))
    waiting = begun = False
    try:
        while True:
            client.async_stream_infer(
                MODEL, inputs("the cat", stream=True, sampling_parameters={"max_tokens": MAX_TOKENS})
            )
            count.sent += 1
            waiting, begun = True, False
            while waiting:
                waiting = not _is_last(answers.get())
                begun = True
            count.answered += 1
    finally:
        count.left += waiting
        if waiting and not begun:
            answers.get(timeout=_LEAVE_S)  # so that the server has seen every request that was counted
        client.stop_stream(cancel_requests=True)
        client.close()


def _is_last(answer: tuple[Any, Any]) -> bool:
    result, error = answer
    if error is not None:
        raise error
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def main(url: str, users: int, seconds: float) -> None:
    """Raises when a user met an error or did not leave in time."""
    count = Count()
    greenlets = [gevent.spawn(user, url, count) for _ in range(users)]
    gevent.sleep(seconds)
    gevent.killall(greenlets, timeout=_LEAVE_S)
    for greenlet in greenlets:
        assert greenlet.dead, "a user did not leave"
        assert greenlet.successful(), greenlet.exception
    print(json.dumps(asdict(count)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
