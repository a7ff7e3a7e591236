"""What is reverted of the running engine, actor by actor, and the test that must notice.

Where it stands in the flow: read by `rules.py`, where the five rules of overlap stand, which show in the running engine
too. Each test named here is a narrow one.
"""

from __future__ import annotations

from .copies import Mutation

_OVERLAP = "tests/sim/test_overlap.py::"
_TRACE = "tests/sim/test_step_trace.py::"
_RUNNING = "tests/sim/test_running_engine.py::"
_CANCELS = "tests/sim/test_cancels.py::test_random_cancels_leak_nothing_and_all_other_answers_are_those_of_depth_0"
_RESUMED = "tests/sim/test_resumption.py::"
_LIFE = "tests/sim/test_life_of_requests.py::"
_PROMPTS = "tests/sim/test_prompts.py::"
_DEATHS = "tests/sim/test_deaths.py::"
_DOOR = "tests/unit/actors/test_door_and_connection.py::"
_PARENT = "tests/unit/actors/test_parent_death.py::"
_RECORD = "tests/unit/text/test_record.py::"
_REPLY = "tests/unit/serving/test_reply.py::"
_SENDER = "tests/unit/serving/test_sender.py::"
_DRAIN = "tests/unit/serving/test_drain.py::"
_SETTINGS = "tests/unit/serving/test_settings.py::"
_UNARY = "tests/contract/test_unary_model.py::"
_CONTRACT = "tests/contract/test_triton_model.py::"
_RUNNER = "tests/unit/worker/test_torch_runner.py::"
_LAUNCHED = "tests/unit/worker/test_launched_steps.py::"
_AHEAD = "tests/sim/test_launched_ahead.py::"

WORKER_RULES = (
    Mutation(
        "with overlap the next plan is handed out while a step runs",
        "actors/scheduler.py",
        "step=plan.step, rows=len(plan.row_slots))\n",
        "step=plan.step, rows=len(plan.row_slots))\n            return\n",
        (
            _OVERLAP + "test_with_host_time_equal_to_device_time_overlap_gives_1_8_times_the_throughput",
            _TRACE + "test_with_overlap_the_next_plan_is_received_before_the_present_step_ends[inline]",
        ),
        "engine-one-plan-a-result",
    ),
    Mutation(
        "the setting reaches the scheduler",
        "actors/executors/build.py",
        "depth=int(config.overlap)",
        "depth=0",
        (
            _OVERLAP + "test_a_step_that_runs_out_of_memory_voids_the_one_behind_it_and_costs_no_token[overlap]",
            _TRACE + "test_with_overlap_the_next_plan_is_received_before_the_present_step_ends[inline]",
        ),
        "engine-overlap-ignored",
    ),
    Mutation(
        "a plan made before a failure was known does not run on what is not there",
        "worker/spoilt.py",
        "self._spoilt.update(range(self._max_running))",
        "pass",
        (_OVERLAP + "test_a_step_that_runs_out_of_memory_voids_the_one_behind_it_and_costs_no_token[overlap]",),
        "engine-nothing-is-spoilt",
    ),
    Mutation(
        "nor does one behind it that names the same slots",
        "worker/spoilt.py",
        "        self._spoilt.update(plan.row_slots)\n        return",
        "        return",
        (
            "tests/unit/worker/test_spoilt_slots.py::"
            "test_after_a_failure_a_plan_is_void_until_all_its_slots_were_admitted_since",
        ),
        "engine-a-void-plan-spoils-nothing",
    ),
    Mutation(
        "the real runner asks for spoilt slots too",
        "worker/torch_runner.py",
        "void = self._spoilt.void(plan)",
        "void = None",
        (_RUNNER + "test_a_step_out_of_memory_is_answered_so_and_the_runner_goes_on_with_who_is_admitted_anew",),
        "engine-the-runner-asks-nobody",
    ),
    Mutation(
        "a Halt goes before the plans that wait",
        "actors/worker.py",
        "while not self._halted or (",
        "while not self._halted or self._plans or (",
        (_OVERLAP + "test_a_halt_goes_before_the_plan_that_waits",),
        "engine-halt-waits",
    ),
    Mutation(
        "a worker runs its plans in their order",
        "actors/worker.py",
        "self._plans.popleft()",
        "self._plans.pop()",
        (_RUNNING + "test_plans_that_wait_together_are_run_and_answered_in_their_order",),
        "engine-the-last-plan-first",
    ),
    Mutation(
        "the next row reads its token from the worker's pool",
        "worker/slots.py",
        "tokens[places[2]].clamp(min=0).to(torch.int32)",
        "tokens[places[2]].clamp(min=0, max=0).to(torch.int32)",
        ("tests/numeric/test_runner_equals_generate.py::test_a_sequence_alone_gives_the_tokens_of_generate",),
        "engine-the-token-stays-on-the-host",
    ),
    Mutation(
        "the last token that a slot knows grows with each step",
        "worker/slots.py",
        "self._known[slots] = np.minimum(positions + 1, self._context_tokens)",
        "pass",
        ("tests/numeric/test_runner_equals_generate.py::test_a_sequence_alone_gives_the_tokens_of_generate",),
        "engine-slots-forget-tokens",
    ),
    Mutation(
        "on a GPU the next step is launched while one is on its way",
        "actors/worker.py",
        "_UNDER_WAY = 2",
        "_UNDER_WAY = 1",
        (_AHEAD + "test_the_next_step_is_launched_while_one_is_on_its_way_and_no_third",),
        "engine-one-step-under-way",
    ),
    Mutation(
        "a step that failed at once is answered behind the one on its way",
        "actors/worker.py",
        "self._steps[0].done:\n                    await self._answer(self._steps.popleft())",
        "self._steps[-1].done:\n                    await self._answer(self._steps.pop())",
        (_AHEAD + "test_answers_keep_the_order_of_the_steps_also_when_a_later_one_fails_at_once",),
        "engine-the-last-answer-first",
    ),
    Mutation(
        "a buffer is written again when the device has read it",
        "device/staging.py",
        "buffer.free.wait()",
        "pass",
        ("tests/unit/device/test_staging.py::test_no_buffer_is_written_while_the_device_still_reads_it",),
        "engine-buffers-are-overwritten",
    ),
    Mutation(
        "a forward does not wait for the token that its masks need",
        "worker/torch_runner.py",
        "behind = self._undrawn is not None and self._streams.ahead",
        "behind = False",
        (
            _LAUNCHED
            + "test_the_mask_of_a_step_knows_the_token_of_the_one_before_and_the_forward_is_launched_meanwhile",
        ),
        "engine-masks-before-the-forward",
    ),
    Mutation(
        "grammars hear what a step drew before the next masks",
        "worker/torch_runner.py",
        "self._grammars.drew(drawn_slots, step.tokens())",
        "pass",
        (
            _LAUNCHED
            + "test_the_mask_of_a_step_knows_the_token_of_the_one_before_and_the_forward_is_launched_meanwhile",
        ),
        "engine-grammars-hear-nothing",
    ),
    Mutation(
        "results are applied in the order of the steps",
        "scheduler/scheduler.py",
        "step = self._in_flight.popleft()\n        assert number",
        "step = self._in_flight.pop()\n        assert number",
        ("tests/sim/test_overlap.py::test_no_step_is_planned_beyond_max_tokens[overlap]",),
        "engine-the-last-step-is-applied-first",
    ),
)

ENDS_RULES = (
    Mutation(
        "a cancelled request lets its sequence go",
        "actors/text.py",
        "                self._tell_scheduler(Abort(sequence))",
        "                pass",
        (_RUNNING + "test_a_cancel_reaches_the_scheduler_though_the_client_has_its_answer[overlap]",),
        "engine-a-cancel-ends-nothing",
    ),
    Mutation(
        "an id in use begins no second answer",
        "actors/text.py",
        "if (holder, request.id) in self._by_request:",
        "if False:",
        (_RUNNING + "test_an_id_in_use_begins_no_second_answer_and_is_free_again_after_the_end[overlap]",),
        "engine-an-id-twice",
    ),
    Mutation(
        "an id is free again after the end",
        "actors/text.py",
        "        del self._by_request[entry.holder, entry.request]",
        "        pass",
        (
            _RUNNING + "test_an_id_in_use_begins_no_second_answer_and_is_free_again_after_the_end[overlap]",
            _CANCELS,
        ),
        "engine-ids-are-never-free",
    ),
    Mutation(
        "who was cancelled while its prompt became tokens is not started",
        "actors/text.py",
        "        if message.sequence not in self._open:  # cancelled meanwhile\n            return\n",
        "",
        (_RUNNING + "test_a_prompt_that_became_tokens_after_its_request_was_cancelled_starts_nothing[overlap]",),
        "engine-the-cancelled-are-started",
    ),
    Mutation(
        "who was cancelled gives its turn for a thread up",
        "actors/text.py",
        "            entry.tokenising.cancel()",
        "            pass",
        (
            _PROMPTS + "test_templates_of_clients_that_do_not_end_hold_nobody_elses_prompt_up_"
            "and_those_given_up_never_run",
        ),
        "engine-the-cancelled-keep-their-turn",
    ),
    Mutation(
        "a record that gave its last output is closed",
        "actors/text.py",
        "            if entry.record.closed:\n                self._close(entry)",
        "            pass",
        (_RUNNING + "test_an_id_in_use_begins_no_second_answer_and_is_free_again_after_the_end[overlap]",),
        "engine-records-stay-open",
    ),
    Mutation(
        "the first reason wins",
        "text/record.py",
        "        if not self.ended:\n            self._error = error",
        "        if True:\n            self._error = error",
        (_RECORD + "test_a_finished_answer_can_not_fail_any_more",),
        "engine-the-last-reason-wins",
    ),
    Mutation(
        "a token after the end is dropped in the text, too",
        "text/sample.py",
        "        if self.reason is not None:\n            return\n        self._fresh.append(token)",
        "        self._fresh.append(token)",
        (_RECORD + "test_a_finished_answer_can_not_fail_any_more",),
        "engine-late-tokens-are-text",
    ),
    Mutation(
        "a record gives one terminal output",
        "text/record.py",
        "        if self.closed:\n            return []\n        outputs",
        "        outputs",
        (_RECORD + "test_the_first_end_wins_and_only_one_is_told",),
        "engine-two-terminal-outputs",
    ),
    Mutation(
        "a holder that is gone takes its requests along",
        "actors/text.py",
        '            self._end(id, Status.CANCELLED, "the client is gone")',
        "            pass",
        (_LIFE + "test_a_holder_that_is_gone_takes_only_its_own_requests_along[overlap]",),
        "engine-requests-of-nobody",
    ),
    Mutation(
        "and only its own",
        "actors/text.py",
        "if owner == holder]:",
        "if True]:",
        (_LIFE + "test_a_holder_that_is_gone_takes_only_its_own_requests_along[overlap]",),
        "engine-requests-of-others",
    ),
    Mutation(
        "the queue is bounded",
        "actors/text.py",
        'raise QueueFull("the queue is full; try again later")',
        "pass",
        (_LIFE + "test_over_the_queue_limit_requests_are_refused_as_retryable[overlap]",),
        "engine-no-queue-limit",
    ),
)

LIFE_RULES = (
    Mutation(
        "a request that kills twice is not tried again",
        "actors/resumption.py",
        "            if entry.memory.deaths >= _DEATHS:\n                return False\n",
        "",
        (_RESUMED + "test_a_poison_request_is_tried_twice_and_takes_nobody_with_it[overlap]",),
        "engine-poison-for-ever",
    ),
    Mutation(
        "what goes on does so behind its last token",
        "actors/open_request.py",
        "prompt=whole.prompt + pack_tokens(outputs),",
        "prompt=whole.prompt,",
        (_RESUMED + "test_every_stream_ends_as_if_nothing_had_died[overlap-(7, 30)]",),
        "engine-resumed-from-the-prompt",
    ),
    Mutation(
        "a death answers everybody",
        "actors/supervisor.py",
        "                self._to_text.post(EngineDown())",
        "                pass",
        (_DEATHS + "test_a_worker_death_answers_everybody_and_the_engine_comes_back[overlap]",),
        "engine-a-death-is-silent",
    ),
    Mutation(
        "a start that fails is not tried again",
        "actors/supervisor.py",
        "if not self._was_ready or self._deaths_in_a_row",
        "if self._deaths_in_a_row",
        (_DEATHS + "test_a_start_that_fails_is_not_tried_again[overlap]",),
        "engine-tries-for-ever",
    ),
    Mutation(
        "a finished request resets the count of deaths",
        "actors/supervisor.py",
        "            self._deaths_in_a_row = 0\n        await",
        "            pass\n        await",
        (_DEATHS + "test_a_finished_request_resets_the_count_of_deaths[overlap]",),
        "engine-old-deaths-count",
    ),
    Mutation(
        "the end of a lease is told",
        "actors/door.py",
        "        self._to_text.post(HolderGone(holder))",
        "        pass",
        (_DOOR + "test_a_holder_whose_lease_has_ended_is_told_to_take_a_new_one",),
        "engine-leases-end-unheard",
    ),
    Mutation(
        "a host without a lease ends",
        "actors/door.py",
        "            self._arm(self._lease_s)",
        "            pass",
        (_DOOR + "test_a_goodbye_ends_the_lease_and_the_door_is_deserted",),
        "engine-a-host-for-ever",
    ),
    Mutation(
        "a host that nobody ever comes to ends",
        "actors/door.py",
        "        self._arm(max(_FIRST_LEASE_S, lease_s))",
        "        pass",
        (_DOOR + "test_a_door_that_nobody_ever_comes_to_is_deserted_after_half_a_minute_or_a_longer_lease[10.0-30.0]",),
        "engine-unclaimed-hosts-stay",
    ),
    Mutation(
        "a process ends with its starter",
        "actors/parent_death.py",
        "_LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)",
        "pass",
        (_PARENT + "test_a_process_ends_with_its_killed_starter_only_where_that_was_asked_for[bound]",),
        "engine-orphans-stay",
    ),
    Mutation(
        "requests without a lease are turned away",
        "actors/door.py",
        "elif isinstance(message, Request | Cancel) and holder not in self._leases:",
        "elif False:",
        (_DOOR + "test_a_holder_whose_lease_has_ended_is_told_to_take_a_new_one",),
        "engine-no-lease-needed",
    ),
    Mutation(
        "a lease ends with its holder's process",
        "actors/lease.py",
        "        asyncio.get_running_loop().add_reader(pidfd, self.end, holder)",
        "        pass",
        ("tests/unit/actors/test_run_folder_and_leases.py::test_a_lease_ends_with_its_process_however_that_ends",),
        "engine-leases-of-the-dead",
    ),
    Mutation(
        "the death of a host is answered by the link",
        "actors/link.py",
        '        self._fail_open(Status.UNAVAILABLE, "the engine stopped unexpectedly; try again in a moment")\n',
        "",
        (
            "tests/sim/test_processes.py::test_a_host_that_is_killed_or_stopped_is_answered_at_once_and_started_again[killed]",
        ),
        "engine-a-dead-host-is-silent",
    ),
)

SERVING_RULES = (
    Mutation(
        "FINAL is sent once",
        "serving/reply.py",
        "        self._ended = True\n        attempts",
        "        attempts",
        (_REPLY + "test_after_the_end_everything_is_swallowed_and_logged",),
        "engine-final-twice",
    ),
    Mutation(
        "the server is not asked for a cancel after FINAL",
        "serving/reply.py",
        "return not self._ended and bool(self._sender.is_cancelled())",
        "return bool(self._sender.is_cancelled())",
        (_REPLY + "test_the_server_is_not_asked_for_a_cancel_after_final",),
        "engine-asks-after-final",
    ),
    Mutation(
        "a cancel is passed on once",
        "serving/sender.py",
        "            with self._changed:\n                self._polls.remove(id)\n            cancel(id)",
        "            cancel(id)",
        (_SENDER + "test_a_cancel_is_passed_on_once",),
        "engine-cancels-again-and-again",
    ),
    Mutation(
        "an answer that fails by itself frees the engine",
        "serving/sender.py",
        "                cancel(id)\n\n    def _ask",
        "                pass\n\n    def _ask",
        (_SENDER + "test_an_answer_that_fails_by_itself_frees_the_engine",),
        "engine-works-for-nobody",
    ),
    Mutation(
        "a request after finalize is refused",
        "serving/bridge.py",
        "        if self._closed:\n            return reply.fail(Status.UNAVAILABLE, UNLOADED)\n",
        "",
        (_CONTRACT + "test_a_request_after_finalize_is_refused_and_not_lost",),
        "engine-requests-after-finalize",
    ),
    Mutation(
        "answers that outlive the limit of an unload are ended",
        "serving/drain.py",
        "            self._end_all()",
        "            pass",
        (_DRAIN + "test_a_watch_ends_what_is_left_when_the_limit_has_passed",),
        "engine-drains-for-ever",
    ),
    Mutation(
        "here and in the engine",
        "serving/bridge.py",
        "            self._link.cancel(id)\n\n    def _take",
        "            pass\n\n    def _take",
        (_CONTRACT + "test_what_runs_when_the_limit_of_an_unload_passes_is_ended_here_and_in_the_engine",),
        "engine-drained-here-only",
    ),
    Mutation(
        "a model of another dialect takes the settings of the model whose engine it shares",
        "serving/settings.py",
        "        folder = folder.parent / owner\n",
        "",
        (_SETTINGS + "test_a_model_that_shares_an_engine_takes_all_settings_from_its_owner",),
        "engine-two-in-memory",
    ),
    Mutation(
        "a model that answers once refuses a stream",
        "serving/unary.py",
        "    if message.stream:",
        "    if False:",
        (_UNARY + "test_a_stream_is_refused_by_name_whichever_way_it_is_asked_for",),
        "engine-streams-unary",
    ),
)

ENGINE_RULES = WORKER_RULES + ENDS_RULES + LIFE_RULES + SERVING_RULES
