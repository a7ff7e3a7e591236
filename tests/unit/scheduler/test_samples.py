"""Several answers to one prompt: what their sequences are, and what a plan says of them."""

from __future__ import annotations

from minisgl_backend.messages.codec import Decoder, encode
from minisgl_backend.messages.engine import Samples, Sequence, TextToScheduler
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.plan import StepResult
from minisgl_backend.messages.sampling import NO_LOGPROBS, Grammar, Sampling
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.samples import sequences_of
from minisgl_backend.scheduler.scheduler import Scheduler

FORM, OTHER = (Grammar(name, b"what it is: " + name * 100, pack_tokens([2])) for name in (b"form", b"other"))


def sampling(grammar: Grammar | None = None, prompt_logprobs: int = NO_LOGPROBS) -> Sampling:
    return Sampling(1.0, 0, 1.0, 9, 0, prompt_logprobs=prompt_logprobs, grammar=grammar)


def several(first: int, count: int, grammar: Grammar | None) -> list[Sequence]:
    return sequences_of(Samples(Sequence(SequenceId(first), pack_tokens([5, 6]), sampling(grammar), 9, (2,)), count))


def test_each_has_the_next_id_and_index_and_the_first_alone_the_prompts_logprobs() -> None:
    first = Sequence(SequenceId(7), pack_tokens([5]), sampling(prompt_logprobs=1), 9, (2,), deadline_s=1.0)
    got = sequences_of(Samples(first, 3))
    assert got[0] is first
    assert [(one.id, one.sampling.sample_index) for one in got] == [(7, 0), (8, 1), (9, 2)]
    assert [one.sampling.prompt_logprobs for one in got] == [1, NO_LOGPROBS, NO_LOGPROBS]
    assert {(one.prompt, one.sampling.seed, one.max_new_tokens, one.deadline_s) for one in got} == {
        (first.prompt, 9, 9, 1.0)
    }


def test_they_cross_to_the_scheduler_with_one_prompt_and_one_grammar_and_share_them_there() -> None:
    prompt = pack_tokens(range(5, 500))
    message = Samples(Sequence(SequenceId(1), prompt, sampling(FORM), 9, (2,)), 128)
    frame = encode(message)
    assert (frame.count(prompt), frame.count(FORM.compiled)) == (1, 1)
    decoder: Decoder[TextToScheduler] = Decoder(TextToScheduler)
    decoded = decoder.decode(frame)
    assert decoded == message and isinstance(decoded, Samples)
    got = sequences_of(decoded)
    assert len({id(one.prompt) for one in got}) == 1
    assert len({id(one.sampling.grammar) for one in got}) == 1


def test_a_plan_says_what_a_grammar_is_with_its_first_admission_and_another_plan_says_it_again() -> None:
    limits = Limits(max_running=6, token_budget=64, page_size=4, num_pages=64, context_tokens=32)
    scheduler = Scheduler(limits, 0)
    for sequence in (*several(1, 3, FORM), *several(4, 1, None), *several(5, 1, OTHER), *several(6, 2, FORM)):
        scheduler.add(sequence, 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and len(plan.admissions) == 6
    grammars = [admission.sampling.grammar for admission in plan.admissions]
    said = [None if grammar is None else (grammar.key, bool(grammar.compiled)) for grammar in grammars]
    assert said == [(b"form", True), (b"form", False), (b"form", False), None, (b"other", True), (b"form", False)]
    assert encode(plan).count(FORM.compiled) == 1
    scheduler.apply(StepResult(plan.step, (5,) * 6), 1.0)
    scheduler.abort(SequenceId(1))
    later = scheduler.plan(2.0)
    assert later is not None
    (admission,) = later.admissions
    assert admission.sampling.grammar == FORM
