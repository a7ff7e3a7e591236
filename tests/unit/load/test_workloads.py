"""Generated workloads: the same seed, the same requests; what is said of their shape holds."""

from __future__ import annotations

from itertools import pairwise

from load.workloads import independent
from load.workloads.tenants import STOP_TOKEN, Request, Shape, distinct_tokens, generate

SHAPE = Shape(requests=120, tenants=5)


def test_the_same_seed_gives_the_same_workload_and_another_seed_another() -> None:
    assert generate(SHAPE, 3) == generate(SHAPE, 3)
    assert generate(SHAPE, 3) != generate(SHAPE, 4)


def test_requests_are_numbered_and_a_later_turn_follows_the_one_before_it() -> None:
    requests = generate(SHAPE, 1)
    assert [request.number for request in requests] == list(range(SHAPE.requests))
    later = [request for request in requests if request.after is not None]
    assert later
    for request in later:
        assert request.after is not None and request.after < request.number
        before = requests[request.after]
        assert request.prompt[: len(before.prompt) + len(before.answer)] == before.prompt + before.answer
        assert request.tenant == before.tenant


def test_first_turns_come_in_the_order_of_their_arrival() -> None:
    arrivals = [request.arrival_s for request in generate(SHAPE, 1) if request.after is None]
    assert all(one <= other for one, other in pairwise(arrivals))


def test_tenants_share_their_system_prompt_with_themselves_only() -> None:
    requests = generate(SHAPE, 1)
    heads = {request.tenant: request.prompt[: SHAPE.system[0]] for request in requests}
    assert len(set(heads.values())) == len(heads) > 1
    assert all(request.prompt[: SHAPE.system[0]] == heads[request.tenant] for request in requests)


def test_answers_stop_where_they_are_shorter_than_asked_and_nowhere_else() -> None:
    for request in [*generate(SHAPE, 1), *independent.generate(200, 8, 20, (1, 20), 0)]:
        assert 1 <= len(request.answer) <= request.max_new_tokens
        assert (request.answer[-1] == STOP_TOKEN) == (len(request.answer) < request.max_new_tokens)
        assert STOP_TOKEN not in request.answer[:-1]


def test_distinct_tokens_counts_each_prefix_once_and_no_answer() -> None:
    def request(prompt: tuple[int, ...], answer: tuple[int, ...] = (9,)) -> Request:
        return Request(0, 0, None, 0.0, prompt, answer, 4, 0)

    assert distinct_tokens([request((2, 3, 4)), request((2, 3, 5)), request((2, 3, 4, 9, 6))]) == 3 + 1 + 1
