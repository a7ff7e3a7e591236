"""What is reverted, rule by rule, and the test that must notice.

Where it stands in the flow: read by `__main__.py` and `test_mutations.py`. "Rule n" is one of docs/scheduler.md.
The rules of the running engine stand in `engine_rules.py`.
"""

from __future__ import annotations

from .copies import Mutation
from .engine_rules import ENGINE_RULES

_UNIT = "tests/unit/scheduler/"
_OVERLAP = _UNIT + "test_directed_overlap.py::"
_IN_ENGINE = "tests/sim/test_overlap.py::"  # the actors with their mailboxes
_IN_ENGINE_CANCELS = _IN_ENGINE + "test_hundreds_of_cancels_and_failed_steps_leak_nothing_and_change_no_answer[overlap]"
_PAGES = _UNIT + "test_directed_pages.py::"
_FAILURES = _UNIT + "test_directed_failures.py::"
_SHARING = _UNIT + "test_sharing.py::"
_URGENCY = _UNIT + "test_urgency.py::"
_ENDS = _UNIT + "test_directed_ends.py::"
_NUMBERS = _UNIT + "test_directed_numbers.py::"
_CASES = "tests/cases/test_prefix_cache.py::"
_RADIX = "tests/property/test_radix_tree.py::test_the_tree_holds_exactly_what_a_dict_of_prefixes_holds_whatever_happens"
_ORDERS = "tests/property/test_orders.py::test_each_order_puts_first_whom_its_definition_names_and_lets_nobody_starve"

OVERLAP_RULES = (
    Mutation(
        "the end by length is counted in planned tokens",
        "scheduler/planner.py",
        "if start == state.stored_tokens or state.slot < 0:",
        "if state.slot < 0:",
        (
            _OVERLAP + "test_fault_1_exactly_max_tokens_are_planned_and_told_though_the_count_runs_ahead",
            _IN_ENGINE + "test_no_step_is_planned_beyond_max_tokens[overlap]",
        ),
        "fault-1-length-by-confirmed-tokens",
    ),
    Mutation(
        "a token computed after the end is dropped",
        "scheduler/scheduler.py",
        "if state.epoch != epoch:",
        "if state.epoch != epoch and False:",
        (
            _OVERLAP + "test_fault_2_a_token_computed_after_the_end_is_dropped_and_brings_nothing_back",
            _IN_ENGINE_CANCELS,
        ),
        "fault-2-late-tokens-are-told",
    ),
    Mutation(
        "slots and pages wait for the last step that names them",
        "cache/quarantine.py",
        "return tag <= self._applied",
        "return True",
        (
            _OVERLAP + "test_fault_3_slot_and_pages_are_handed_out_only_when_the_last_step_that_names_them_is_applied",
            _IN_ENGINE_CANCELS,
        ),
        "fault-3-no-quarantine",
    ),
    Mutation(
        "an abort releases once",
        "scheduler/lives.py",
        "        del self.live[state.id]\n        if state.deadline_s",
        "        if reason is not EndReason.ABORT:\n            del self.live[state.id]\n        if state.deadline_s",
        (_OVERLAP + "test_fault_4_an_abort_of_a_prompt_in_flight_releases_it_once", _IN_ENGINE_CANCELS),
        "fault-4-an-abort-releases-twice",
    ),
    Mutation(
        "nobody is sent anything before every rank has answered",
        "actors/executors/process.py",
        "while len(ready) < len(self._roles):",
        "while len(ready) < len(self._roles) - 1:",
        (
            "tests/unit/actors/test_handshake.py::"
            "test_fault_5_the_scheduler_may_not_begin_before_every_rank_has_answered",
        ),
        "fault-5-begin-before-all-are-ready",
    ),
)

PLAN_RULES = (
    Mutation(
        "rule 2: nobody is admitted again while a token of it is in flight",
        "scheduler/planner.py",
        "if state.last_step > self._release.applied_step:",
        "if False:",
        (_PAGES + "test_nobody_is_admitted_again_before_its_token_in_flight_has_landed",),
        "rule-2-admitted-with-a-token-in-flight",
    ),
    Mutation(
        "rule 3: the budget holds a row for every slot and a page of prompt",
        "scheduler/limits.py",
        "need = self.max_running + self.page_size",
        "need = self.max_running",
        (_UNIT + "test_limits.py::test_the_budget_must_hold_a_row_for_every_slot_and_a_page_of_prompt",),
        "rule-3-budget-too-small",
    ),
    Mutation(
        "the budget of a step is never passed",
        "scheduler/planner.py",
        "left = self._caution.token_budget - draft.decode_rows",
        "left = self._caution.token_budget",
        (_UNIT + "test_steps.py::test_a_prompt_is_cut_to_what_the_decoding_leave_of_the_budget",),
        "budget-passed-by-decode-rows",
    ),
    Mutation(
        "rule 4: what was planned on top of a failed step is void",
        "scheduler/scheduler.py",
        "later.void = True",
        "later.void = False",
        (_FAILURES + "test_a_void_step_of_newcomers_only_is_void_too_though_the_worker_ran_it",),
        "rule-4-the-next-step-is-believed",
    ),
    Mutation(
        "rule 4: a failed step leaves nothing in the cache",
        "scheduler/scheduler.py",
        "        self._lives.sharing.reset()\n        self._caution.failed()",
        "        self._caution.failed()",
        (_FAILURES + "test_nothing_that_was_cached_before_a_failed_step_is_found_after_it",),
        "rule-4-the-tree-stays",
    ),
    Mutation(
        "rule 4: less is tried after a failure",
        "scheduler/scheduler.py",
        "        self._lives.sharing.reset()\n        self._caution.failed()",
        "        self._lives.sharing.reset()",
        (_FAILURES + "test_a_sequence_that_breaks_every_step_it_is_in_soon_fails_alone",),
        "rule-4-no-caution",
    ),
    Mutation(
        "an over-long prompt gets an answer",
        "scheduler/scheduler.py",
        "return Progress((), (), (Ended(sequence.id, EndReason.LENGTH),))",
        "return NOTHING",
        (_ENDS + "test_an_over_long_prompt_is_answered_at_once_and_holds_nobody_up",),
        "over-long-prompt-is-dropped",
    ),
    Mutation(
        "any of several end tokens ends an answer",
        "scheduler/scheduler.py",
        "if token in state.stop_token_ids:",
        "if token in state.stop_token_ids[:1]:",
        (_ENDS + "test_any_of_several_end_tokens_ends_an_answer_where_it_first_comes",),
        "one-end-token-only",
    ),
    Mutation(
        "rows are in an order that is data",
        "scheduler/running.py",
        "        self._sort()\n        return list(self._states.values())",
        "        return sorted(self._states.values(), key=lambda state: hash(str(state.id)))",
        (_UNIT + "test_directed_order.py::test_processes_with_different_hash_seeds_make_the_same_plans_to_the_byte",),
        "order-by-hash",
    ),
    Mutation(
        "the integrity check of the pages looks",
        "cache/allocator.py",
        "        seen = bytearray(self.num_pages)\n",
        "        return\n        seen = bytearray(self.num_pages)\n",
        (_UNIT + "test_directed_integrity.py::test_a_fault_in_the_books_is_found",),
        "integrity-of-pages-is-empty",
    ),
    Mutation(
        "the integrity check of the tree looks",
        "cache/integrity.py",
        "    locks = _locks_of_paths(locked)\n    place",
        "    return\n    locks = _locks_of_paths(locked)\n    place",
        (_UNIT + "test_directed_integrity.py::test_a_fault_in_the_books_is_found",),
        "integrity-of-the-tree-is-empty",
    ),
)

PAGE_RULES = (
    Mutation(
        "rule 5: a table is never switched to the tree's page",
        "scheduler/sharing.py",
        "        if grown is None:\n"
        "            return False\n"
        "        self._pages.share(pages)\n"
        "        state.node = grown",
        "        if grown is None:\n"
        "            key = state.key(first, end, self._page_size)\n"
        "            state.node, found = self.tree.follow(node, key, 0, end - first)\n"
        "            self._pages.release(pages[: len(found)], state.last_step)\n"
        "            state.pages[first : first + len(found)] = found\n"
        "            state.tree_pages += len(found)\n"
        "            return False\n"
        "        self._pages.share(pages)\n"
        "        state.node = grown",
        (_PAGES + "test_who_meets_its_own_page_in_the_tree_keeps_its_private_one",),
        "rule-5-the-table-is-switched",
    ),
    Mutation(
        "rule 6: who goes walks again and brings what is missing",
        "scheduler/sharing.py",
        "        end = tokens // self._page_size\n        first = state.tree_pages\n",
        "        end = first = state.tree_pages\n",
        (_PAGES + "test_who_is_left_alone_with_its_copies_brings_what_is_missing_when_it_goes",),
        "rule-6-nothing-enters-at-the-end",
    ),
    Mutation(
        "rule 6: who extends skips over what came into the tree",
        "scheduler/planner.py",
        "followed = self._sharing.follow(state)",
        "followed = 0",
        (_SHARING + "test_a_prompt_under_way_goes_on_over_the_pages_that_one_who_leaves_was_ahead_with",),
        "rule-6-nobody-skips-ahead",
    ),
    Mutation(
        "rule 6: only from a page's end",
        "scheduler/sharing.py",
        " or state.tree_pages * self._page_size != state.computed:",
        ":",
        (_SHARING + "test_in_the_middle_of_a_page_it_keeps_its_own",),
        "rule-6-skips-within-a-page",
    ),
    Mutation(
        "rule 7: of a prompt of L tokens at most L - 1 are found",
        "scheduler/sequence.py",
        "self.limit_pages = (self.known - 1) // page_size",
        "self.limit_pages = self.known // page_size",
        (_CASES + "test_kv_01_a_prompt_that_is_wholly_cached_still_computes_something",),
        "rule-7-a-whole-prompt-is-found",
    ),
    Mutation(
        "rule 7: on resume too",
        "scheduler/sequence.py",
        "self.limit_pages = (self.known - 1) // page_size",
        "self.limit_pages = self.known // page_size",
        (_PAGES + "test_a_resumed_sequence_whose_twin_went_on_still_computes_its_last_token",),
        "rule-7-a-whole-resumed-one-is-found",
    ),
    Mutation(
        "rule 8: the last sampled token is never cached",
        "scheduler/release.py",
        "state.known - 1 if leaves is Leaves.CONFIRMED else state.known",
        "state.known",
        (_CASES + "test_kv_06_nor_does_an_end_token_make_a_difference",),
        "rule-8-the-last-token-is-cached",
    ),
    Mutation(
        "full prompt pages are shared when they are planned",
        "scheduler/sharing.py",
        "        if state.node is None or first == end:\n            return False\n        return self._enter",
        "        if True:\n            return False\n        return self._enter",
        (
            _NUMBERS + "test_sixteen_prompts_of_400_shared_and_16_own_tokens_compute_656_and_not_6656",
            _NUMBERS + "test_n_samples_of_one_prompt_compute_it_once_and_less_than_a_page_each",
        ),
        "pages-enter-late",
    ),
    Mutation(
        "rule 9: pages of the tree are tagged with the last step that names them",
        "scheduler/sharing.py",
        "        self._pages.release(pages[max(first, end) :], step)\n        self.tree.unlock(node, step)",
        "        self._pages.release(pages[max(first, end) :], step)\n        self.tree.unlock(node, StepId(0))",
        (_PAGES + "test_a_page_that_a_step_in_flight_names_is_not_handed_out_though_its_sequence_has_ended",),
        "rule-9-unlocked-without-a-tag",
    ),
    Mutation(
        "rule 9: evicted pages keep their tag",
        "scheduler/sharing.py",
        "self._pages.release(one.pages, one.step, TREE)",
        "self._pages.release(one.pages, StepId(0), TREE)",
        (_PAGES + "test_a_page_that_a_step_in_flight_names_is_not_handed_out_though_its_sequence_has_ended",),
        "rule-9-evicted-without-a-tag",
    ),
    Mutation(
        "caches are apart by their salt",
        "scheduler/sequence.py",
        "self.namespace: bytes = sequence.cache_salt",
        'self.namespace: bytes = b""',
        (_CASES + "test_kv_07_adapters_are_refused_and_what_keeps_caches_apart_is_the_salt",),
        "salts-share",
    ),
    Mutation(
        "nobody finds what a sequence without finite numbers has read",
        "scheduler/sharing.py",
        "            self.tree.hide(state.node)\n",
        "",
        (
            _UNIT
            + "test_steps.py::test_nobody_reads_what_a_row_without_a_token_has_read_though_others_left_pages_behind_it",
        ),
        "hide-nothing",
    ),
    Mutation(
        "locks below what is hidden go with it",
        "cache/radix.py",
        "        root.locks -= top.locks\n",
        "",
        (_RADIX,),
        "hide-leaves-locks-behind",
    ),
    Mutation(
        "all that hangs below the first page is hidden",
        "cache/radix.py",
        "        while root is not None and root.parent is not None:\n            top, root = root, root.parent\n",
        "        while root is not None and root.parent is not None and len(top.pages) > 1:\n"
        "            top, root = root, root.parent\n",
        (_RADIX,),
        "hide-only-a-part",
    ),
    Mutation(
        "a page is cleared before it is written again",
        "worker/torch_runner.py",
        "self._pool.clear(tensors.cleared)",
        "pass",
        (
            "tests/numeric/test_runner_equals_generate.py::"
            "test_a_sequence_with_broken_numbers_fails_alone_and_leaves_clean_pages",
        ),
        "clear-nothing",
    ),
    Mutation(
        "a split keeps the locks on both halves",
        "cache/radix.py",
        "upper.locks = lower.locks",
        "upper.locks = 0",
        (_RADIX,),
        "a-split-loses-locks",
    ),
    Mutation(
        "a leaf grows in place only under its owner's lock alone",
        "cache/radix.py",
        "if not node.children and node.locks == 1 and node.parent is not None:",
        "if not node.children and node.parent is not None:",
        (_RADIX,),
        "a-shared-leaf-grows",
    ),
    Mutation(
        "what is locked is not evicted",
        "cache/radix.py",
        "self._lru.pop(entered, None)  # the upper half of a split is not listed yet",
        "pass",
        (_RADIX,),
        "a-locked-node-is-evicted",
    ),
)

ROOM_RULES = (
    Mutation(
        "rule 13: what is on its way is not evicted for",
        "scheduler/room.py",
        "        if short > pages.quarantined_pages:\n"
        "            self._sharing.evict(short - pages.quarantined_pages, applied)",
        "        if short > 0:\n            self._sharing.evict(short, applied)",
        (_PAGES + "test_a_need_that_pages_in_quarantine_cover_waits_for_them_and_takes_from_nobody",),
        "rule-13-evicts-beyond-the-need",
    ),
    Mutation(
        "rule 13: what no step names is evicted first",
        "cache/radix.py",
        "evicted = self._evict_upto(count, applied)",
        "evicted = self._evict_upto(count, None)",
        ("tests/unit/cache/test_radix.py::test_pages_of_an_unapplied_step_are_evicted_last_and_carry_its_number",),
        "rule-13-evicts-under-a-step",
    ),
    Mutation(
        "rule 14: pages are taken from younger ones only",
        "scheduler/planner.py",
        "if victim.arrival <= taker.arrival:",
        "if victim is taker:\n                continue\n            if False:",
        (_PAGES + "test_a_younger_one_that_lacks_a_page_waits_and_takes_none_from_an_older",),
        "rule-14-the-oldest-is-a-victim",
    ),
    Mutation(
        "rule 14: a page is kept for the oldest that extends",
        "scheduler/planner.py",
        "        self._keep_for_oldest()\n        if self._limits.mixed",
        "        if self._limits.mixed",
        (_PAGES + "test_rows_of_younger_ones_do_not_take_every_page_before_the_oldest_ones_prompt",),
        "rule-14-the-oldest-prompt-starves",
    ),
    Mutation(
        "rule 15: the prefix is locked before room is made",
        "scheduler/planner.py",
        "        self._sharing.begin(state)  # locked before room is made, or that would evict it (rule 15)\n"
        "        if not self._make_room(1, None):\n"
        "            self._sharing.cancel(state)\n"
        "            return 0\n",
        "        if not self._make_room(1, None):\n            return 0\n        self._sharing.begin(state)\n",
        (_PAGES + "test_making_room_for_a_newcomer_does_not_evict_the_prefix_that_it_came_for",),
        "rule-15-room-before-lock",
    ),
    Mutation(
        "rule 15: what a newcomer finds can not be evicted for it",
        "scheduler/admission.py",
        "room = free + evictable - found.unlocked_pages",
        "room = free + evictable",
        (_PAGES + "test_what_a_newcomer_finds_can_not_be_evicted_for_it_as_well",),
        "rule-15-own-match-counted-twice",
    ),
    Mutation(
        "rule 16: the last token needs no place",
        "scheduler/admission.py",
        "limits.pool_tokens - prompt_tokens + 1)",
        "limits.pool_tokens - prompt_tokens)",
        (_UNIT + "test_room.py::test_an_output_may_fill_the_pool_to_the_last_token_whose_own_kv_is_never_stored",),
        "rule-16-one-token-too-few",
    ),
    Mutation(
        "the learned reserve keeps less than all that was asked for",
        "scheduler/estimate.py",
        "self.ratio = min(1.0, self.share * self.margin)",
        "self.ratio = 1.0",
        (_NUMBERS + "test_at_equal_kv_the_learned_reserve_runs_half_as_many_again_and_loses_no_token",),
        "reserve-learns-nothing",
    ),
    Mutation(
        "one of so many admissions is the oldest's",
        "scheduler/order.py",
        "return self._oldest.first() if self._is_oldests_turn() else self._order.first()",
        "return self._order.first()",
        (_ORDERS,),
        "nobody-is-fair",
    ),
    Mutation(
        "an urgent prompt goes before the next chunk of one under way",
        "scheduler/planner.py",
        "left > kept and waiting.goes_before(state)",
        "False",
        (_URGENCY + "test_an_urgent_prompt_has_its_first_chunk_before_the_next_one_of_a_long_prompt_under_way",),
        "urgent-waits-for-a-long-prompt",
    ),
    Mutation(
        "the oldest in its turn does so too",
        "scheduler/order.py",
        "(self._is_oldests_turn() or by_priority(first) < by_priority(under_way))",
        "by_priority(first) < by_priority(under_way)",
        (_URGENCY + "test_the_turn_of_the_oldest_does_not_make_urgent_ones_wait_for_a_prompt_under_way",),
        "the-oldests-turn-blocks-the-urgent",
    ),
    Mutation(
        "rule 3: under priority too the oldest has a row every second step",
        "scheduler/planner.py",
        "if oldest is not None and oldest.last_step < draft.step - 1:",
        "if False:",
        (
            _URGENCY
            + "test_the_oldest_prompt_has_a_row_at_least_every_second_step_however_much_is_urgent[whole budget-0]",
        ),
        "rule-3-the-half-read-oldest-starves",
    ),
    Mutation(
        "rule 14: of those who free pages only together the youngest goes",
        "scheduler/planner.py",
        "return next((one for one in younger if self._sharing.frees_pages(one, nodes[one.node])), None)",
        "return None",
        (
            _URGENCY
            + "test_two_half_read_prompts_that_hold_the_same_pages_and_none_of_their_own_give_way_to_the_oldest",
        ),
        "rule-14-all-are-passed-over",
    ),
    Mutation(
        "rule 15: the rest of every prompt under way is kept",
        "scheduler/admission.py",
        "now = self.extend_pages + self._pages_of(state.known)",
        "now = self._pages_of(state.known)",
        (_URGENCY + "test_room_is_kept_for_the_rest_of_every_prompt_under_way",),
        "rule-15-half-read-prompts-forgotten",
    ),
    Mutation(
        "nobody is preempted in vain",
        "scheduler/preemption.py",
        "if not lower or not self._fits_without(lower, state, free_pages):",
        "if not lower:",
        (_URGENCY + "test_nobody_is_preempted_for_one_who_would_not_fit_all_the_same",),
        "preempted-in-vain",
    ),
    Mutation(
        "what the urgent one finds is no room for it",
        "cache/radix.py",
        "leaving.get(node, 0)",
        "0",
        (_URGENCY + "test_what_an_urgent_one_shares_with_those_who_would_go_is_not_counted_twice",),
        "preempted-for-its-own-pages",
    ),
)

MUTATIONS = OVERLAP_RULES + PLAN_RULES + PAGE_RULES + ROOM_RULES + ENGINE_RULES
