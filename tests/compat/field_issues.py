"""What users of other servers complain about (section 4 of the facts on the field), and the tests that show
that it does not happen here. Numbers are those of the facts."""

from __future__ import annotations

_CHAOS = "tests/chaos"
_COMPAT = "tests/compat"
_E2E = "tests/e2e"
_INT_ENGINE = "tests/integration/engine"
_INT_GATEWAY = "tests/integration/gateway"
_INT_HANDOVER = "tests/integration/handover"
_INT_ROUTER = "tests/integration/router"
_INT_RPC = "tests/integration/rpc"
_UNIT_ENGINE_CORE = "tests/unit/engine/core"
_UNIT_ROUTER = "tests/unit/router"
_UNIT_ROUTER_DISPATCH = "tests/unit/router/dispatch"
_UNIT_ROUTER_FLEET = "tests/unit/router/fleet"
_UNIT_ROUTER_PLACEMENT = "tests/unit/router/placement"
_FIELD = "tests/compat/test_field_issues.py"

# Of each: what happened there, in short, and "file::test" here.
ISSUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "1": (
        "a client that hangs up is computed for on and on",
        (
            f"{_INT_GATEWAY}/test_disconnect.py::test_hang_up_during_decode",
            f"{_COMPAT}/test_disconnects_and_failures.py::test_c54_who_hangs_up_is_computed_for_no_longer",
        ),
    ),
    "2": (
        "with prefill and decode apart, a cancel reaches one of the two",
        (
            f"{_UNIT_ROUTER_DISPATCH}/test_handover_failures.py::test_an_abort_reaches_the_engine_of_the_part_that_runs",
            f"{_INT_HANDOVER}/test_handover.py::test_a_client_that_goes_away_leaves_nothing_in_either_engine",
        ),
    ),
    "3": (
        "an abort gets lost and its KV leaks",
        (
            f"{_INT_ROUTER}/test_session.py::test_aborts_at_each_stage",
            f"{_INT_ROUTER}/test_scripted.py::test_cancels_at_every_moment_leave_nothing_behind",
            f"{_COMPAT}/test_caching_and_preemption.py::test_c54_an_abort_at_any_stage_gives_everything_back",
        ),
    ),
    "4": (
        "a cancel before the first token does not arrive",
        (
            f"{_INT_GATEWAY}/test_disconnect.py::test_hang_up_during_prefill",
            f"{_INT_GATEWAY}/test_disconnect.py::test_hang_up_while_queued",
        ),
    ),
    "5": (
        "a cancel while KV is on its way, or before it is fetched, leaks its blocks",
        (
            f"{_UNIT_ENGINE_CORE}/test_handover_faults.py::test_an_abort_while_the_kv_is_on_its_way",
            f"{_UNIT_ENGINE_CORE}/test_handover.py::test_offers_expire_and_are_withdrawn",
            f"{_UNIT_ROUTER_DISPATCH}/test_handover_failures.py::test_an_offer_without_an_engine_to_fetch_it_is_withdrawn",
        ),
    ),
    "6": (
        "queued streams end without an error and without [DONE]",
        (f"{_FIELD}::test_6_a_stream_that_waited_in_vain_is_told_so",),
    ),
    "7": (
        "cancelled calls leak memory",
        (
            f"{_INT_RPC}/test_calls.py::test_a_cancelled_call_closes_its_generator_and_counts",
            f"{_INT_RPC}/test_calls.py::test_a_failed_call_holds_nothing_until_the_garbage_collector_comes",
        ),
    ),
    "8": (
        "load is not counted, so one worker gets everything",
        (
            f"{_INT_ROUTER}/test_session.py::test_two_hundred_sequences_over_two_engines_are_byte_exact_and_balanced",
        ),
    ),
    "9": (
        "load is counted too late, so a burst herds",
        (
            f"{_INT_ROUTER}/test_session.py::test_a_burst_is_spread_before_any_report",
            f"{_UNIT_ROUTER_PLACEMENT}/test_cost.py::test_a_burst_with_one_prefix_spreads",
        ),
    ),
    "10": (
        "a cold or restarted worker attracts everything",
        (f"{_UNIT_ROUTER_PLACEMENT}/test_cost.py::test_a_restarted_engine_does_not_attract_everything",),
    ),
    "11": (
        "placement sees the first message alone",
        (
            f"{_UNIT_ROUTER_PLACEMENT}/test_request.py::test_they_are_the_engines_names_in_whatever_order_they_are_read",
        ),
    ),
    "12": (
        "no backlog signal, unequal engines, several routers that each see their own load",
        (
            f"{_UNIT_ROUTER_PLACEMENT}/test_least_loaded.py::test_unequal_engines_fill_up_alike",
            f"{_UNIT_ROUTER_PLACEMENT}/test_least_loaded.py::test_others_load_counts_by_the_report",
            f"{_INT_ROUTER}/test_fleet_lifecycle.py::test_two_routers_fill_one_engine_between_them_and_nothing_is_lost",
        ),
    ),
    "13": (
        "prefills gather on one engine; affinity points to a dead one",
        (
            f"{_UNIT_ROUTER_PLACEMENT}/test_cost.py::test_what_was_sent_since_the_report_counts_until_it_is_computed",
            f"{_UNIT_ROUTER_PLACEMENT}/test_session_affinity.py::test_it_follows_when_its_engine_dies_and_stays_there",
        ),
    ),
    "14": (
        "errors of clients open the breaker",
        (
            f"{_FIELD}::test_14_bad_requests_never_close_an_engine_off",
            f"{_UNIT_ROUTER_DISPATCH}/test_health.py::test_errors_that_requests_earned_never_open_a_breaker",
        ),
    ),
    "15": (
        "one failed probe removes a worker; nothing is served until all workers are well",
        (
            f"{_FIELD}::test_15_one_engine_that_serves_is_enough",
            f"{_UNIT_ROUTER_FLEET}/test_breaker.py::test_it_opens_after_faults_and_closes_after_a_probe",
        ),
    ),
    "16": (
        "dead workers are still chosen; marks of overload and cooldowns never clear",
        (
            f"{_FIELD}::test_16_a_full_engine_is_given_sequences_again",
            f"{_CHAOS}/test_chaos_engine.py::test_the_streams_of_a_killed_engine_go_on_elsewhere",
            f"{_UNIT_ROUTER_FLEET}/test_breaker.py::test_it_is_never_open_for_longer_than_the_longest_wait",
        ),
    ),
    "17": (
        "probes starve behind traffic; blocking calls on the loop",
        (
            f"{_FIELD}::test_17_probes_are_answered_beside_many_streams",
            f"{_INT_GATEWAY}/test_prompts.py::test_health_answers_while_a_megabyte_is_tokenized",
            f"{_INT_RPC}/test_lifecycle.py::test_calls_are_limited_and_health_is_not",
        ),
    ),
    "18": (
        "ready without a single engine",
        (f"{_INT_GATEWAY}/test_failures.py::test_before_anything_is_there",),
    ),
    "19": (
        "pings on a quiet link are taken for abuse",
        (
            f"{_INT_RPC}/test_lifecycle.py::test_pings_on_an_idle_channel_are_not_called_abuse",
            f"{_CHAOS}/test_chaos_frozen.py::test_an_idle_session_is_kept",
        ),
    ),
    "20": (
        "one dead backend holds up requests to the others",
        (
            f"{_CHAOS}/test_chaos_engine.py::test_a_stopped_engine_beside_a_good_one",
            f"{_INT_GATEWAY}/test_failures.py::test_a_frozen_tokenizer_is_passed_over",
        ),
    ),
    "21": (
        "large bodies fail as exhausted resources",
        (
            f"{_INT_RPC}/test_calls.py::test_an_oversized_message_is_resource_exhausted_and_named",
            f"{_INT_GATEWAY}/test_bad_input.py::test_a_body_over_the_limit_is_refused_unread",
        ),
    ),
    "22": (
        "several gateways each keep their own state",
        (
            f"{_CHAOS}/test_chaos_batches.py::test_a_gateway_killed_twice_in_a_batch",
            f"{_E2E}/test_up.py::test_scaled_out_with_keys_a_template_and_https",
        ),
    ),
    "23": (
        "the index of prefixes grows without a bound",
        (
            f"{_UNIT_ROUTER}/test_kv_index.py::test_the_bound_holds_and_what_is_left_is_true",
            f"{_UNIT_ROUTER_PLACEMENT}/test_prefix.py::test_approximate_remembers_no_more_than_an_engine_can_hold",
        ),
    ),
    "24": (
        "a part of an engine dies and the rest looks alive; a panic ends the front; no room for long prompts",
        (
            f"{_INT_ENGINE}/test_health.py::test_a_crashed_core_ends_its_sequences_and_is_started_again",
            f"{_INT_GATEWAY}/test_failures.py::test_a_defect_is_the_fixed_500",
            f"{_COMPAT}/test_caching_and_preemption.py::test_c51_preempted_sequences_hit_their_own_blocks",
        ),
    ),
    "24b": (
        "health says 200 while nothing is generated",
        (
            f"{_COMPAT}/test_disconnects_and_failures.py::test_c56_health_tells_of_an_engine_that_is_dead_or_stuck",
            f"{_INT_ROUTER}/test_fleet_lifecycle.py::test_an_engine_that_stalls_loses_its_work_until_it_makes_steps_again",
        ),
    ),
    "25": (
        "parsers are skipped or lose their state in streams",
        (
            f"{_COMPAT}/test_tool_calls_and_reasoning.py::test_c33_required_calls_as_json_are_told_once",
            f"{_COMPAT}/test_tool_calls_and_reasoning.py::test_c34_calls_have_indices_and_ids_of_their_own",
        ),
    ),
    "26": (
        "gRPC clients can do less than HTTP ones",
        (f"{_E2E}/test_client.py::test_chats_and_texts",),
    ),
    "27": (
        "tokenization holds up streams and probes",
        (f"{_INT_GATEWAY}/test_prompts.py::test_health_answers_while_a_megabyte_is_tokenized",),
    ),
    "28": (
        "versions that do not fit are noticed at the first request",
        (
            f"{_INT_ROUTER}/test_attach.py::test_another_schema_is_refused_with_both_revisions",
            f"{_INT_ENGINE}/test_links.py::test_a_router_with_an_older_schema_is_left",
            f"{_INT_ROUTER}/test_session.py::test_a_session_must_say_hello_with_a_known_schema",
        ),
    ),
    "29": (
        "SIGTERM cuts streams; a restarted front knows one of many models",
        (
            f"{_CHAOS}/test_chaos_failover.py::test_a_rolling_restart_of_all_engines_and_routers",
            f"{_INT_ROUTER}/test_drain.py::test_a_drained_engine_finishes_leaves_and_ends_with_0",
            f"{_FIELD}::test_29_a_gateway_that_was_restarted_knows_all_models",
        ),
    ),
    "30": (
        "no queue in the router, no migration of requests",
        (
            f"{_INT_ROUTER}/test_fleet_lifecycle.py::test_an_engine_that_joins_under_load_gets_what_waits",
            f"{_CHAOS}/test_chaos_failover.py::test_engines_and_a_router_die_for_some_seconds",
        ),
    ),
    "31": (
        "prompts of equal length are taken for one; text in a prompt is taken for a session",
        (
            f"{_UNIT_ROUTER_PLACEMENT}/test_consistent_hash.py::"
            "test_the_key_is_the_session_or_how_the_prompt_begins_and_never_its_length",
        ),
    ),
    "32": (
        "a dead engine keeps its share of round robin",
        (
            f"{_UNIT_ROUTER_PLACEMENT}/test_round_robin.py::test_one_that_left_gets_no_share_and_one_that_joins_does",
        ),
    ),
}
