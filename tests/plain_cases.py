"""What the plain test command leaves to the tests marked `integration`: long tests, and most cases of long families.

One table instead of marks in fifty files, so that it can be weighed as a whole. Nothing is lost: `.ci/run` runs the
rest in its section `processes`. Seconds are of one fast core, 2026-11-22; a test of more than 4 s belongs here, unless
it is the only guard of a claim of the README.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

# test function -> how many of its cases the plain command keeps, evenly spread; 0: none
KEPT = {
    "cli/test_profile_verb.py::test_a_traced_profile_counts_bytes_and_makes_a_plan_that_is_checked": 0,  # 30 s
    "cli/test_profile_verb.py::test_what_cannot_be_timed_is_one_sentence": 1,  # 8
    "cli/test_frameworks.py::test_a_plan_that_megatron_cannot_run_is_refused_and_fitted": 0,  # 7
    "torch/test_asked.py::test_families_without_a_line_here_are_described_by_their_folder": 1,  # 8
    "torch/test_images_against_processors.py::test_smart_resize_equals_tensors_and_placeholders_of_a_full_run": 2,
    "torch/test_images_against_processors.py::test_llava_equals_tensors_and_placeholders_of_a_full_run": 0,
    "torch/test_offloaded_layers.py::test_gradients_are_bit_equal_and_nothing_is_left_behind": 6,  # 12
    "torch/test_offloaded_layers.py::"
    "test_what_is_moved_leaves_the_device_which_then_holds_no_more_than_under_full_recompute": 1,  # 14
    "torch/test_placement_families.py::test_every_map_gives_the_whole_models_answer": 2,  # 95
    "torch/test_placement_load.py::test_host_memory_never_holds_a_shard_beside_what_stays_there": 0,  # 10
    "torch/test_placement_memory.py::test_a_devices_bytes_are_those_counted_on_the_real_modules": 6,  # 7
    "torch/test_placement_memory.py::test_every_kind_of_layer_peaks_where_it_is_said_to": 4,  # 5
    "torch/test_placement_traffic.py::test_a_shortage_of_vision_tower_and_embedding_costs_a_fiftieth": 0,  # 47
    "torch/test_probe.py::test_a_budget_that_full_recompute_exceeds_is_refused_with_the_missing_bytes": 0,  # 5
    "torch/test_random_caps.py::test_no_plan_under_a_random_cap_holds_more_than_the_cap": 0,  # 25
    "torch/test_recompute.py::test_gradients_are_bit_equal_and_nothing_is_left_behind": 9,  # 3
    "torch/test_recompute.py::test_under_ddp_and_fsdp2_gradients_are_bit_equal": 0,  # 7
    "torch/test_recompute_memory.py::test_a_recomputed_block_needs_what_it_computes_again_as_well": 1,  # 11
    "torch/test_recompute_memory.py::test_elsewhere_the_workspace_is_an_upper_bound": 1,  # 10
    "torch/test_recompute_memory.py::test_the_backward_of_a_block_needs_its_workspace": 2,  # 13
    "torch/test_recompute_shares.py::test_bytes_of_micro_batches_in_flight_are_the_predicted_ones": 1,
    "torch/test_refine.py::test_a_run_over_its_time_is_stopped_with_its_workers": 0,  # 5
    "torch/test_refine.py::test_a_run_that_will_not_end_is_killed": 0,  # 3
    "torch/test_serve.py::test_a_connection_without_a_request_is_closed": 1,  # 10
    "torch/test_serve_command.py::test_a_second_interrupt_ends_what_is_left": 0,  # 6
    "torch/test_serve_command.py::test_a_signal_finishes_what_was_accepted_and_leaves_nothing": 1,  # 12
    "torch/test_simulator_against_torch.py::test_torch_runs_our_blocks_in_our_order": 2,  # 7
    "torch/test_traced.py::test_a_blocks_transient_is_its_workspace_without_what_it_computes_again": 1,  # 7
    "torch/test_traced.py::test_flash_keeps_neither_masks_nor_repeated_keys": 0,  # 6
    "torch/test_traced.py::test_layers_add_up_to_a_whole_model_of_another_size": 0,  # 21
    "torch/test_traced.py::test_peak_is_the_allocators_but_for_the_kernels_workspaces": 1,  # 16
    "torch/test_pipeline_build.py::"
    "test_a_model_has_the_layers_of_the_description_and_reads_those_it_says_are_read": 3,  # 6
    "torch/test_pipeline_build.py::"
    "test_something_crosses_every_cut_with_images_and_text_alone_behind_the_embedding": 3,  # 6
    "torch/test_pipeline_runs.py::test_one_replica_loses_bit_by_bit_what_one_process_loses": 0,
    "torch/test_pipeline_runs.py::test_twenty_optimizer_steps_lose_what_one_process_loses": 0,  # 10
    "torch/test_train.py::test_every_schedule_trains_as_one_process_does": 0,  # 40
    "torch/test_train.py::test_gradients_are_clipped_over_all_stages_together": 0,  # with the same runs
    "torch/test_train.py::test_recompute_changes_no_bit": 0,
    "torch/test_train.py::test_frozen_towers_stay_as_they_are": 0,
    "torch/test_train.py::test_bfloat16_loses_nearly_as_float32": 0,
    "torch/test_train.py::test_the_log_compares_every_step_with_the_plan": 0,
    "torch/test_train.py::test_the_report_takes_the_run": 0,
    "torch/test_train.py::test_a_tied_model_trains_resumes_and_exports_wherever_its_halves_lie": 0,  # 8
    "torch/test_verify_pipeline.py::test_stages_that_cut_tower_and_decoder_have_the_models_loss_and_gradients": 1,  # 12
    "torch/test_vision_families.py::test_images_apart_are_encoded_as_together": 13,  # 8
    "unit/test_build.py::test_interleaved_steps_hold_whole_rounds_of_the_pipeline": 1,  # 4
    "unit/test_build.py::test_other_choices_give_plans_that_check": 3,  # 7
    "unit/test_search.py::test_search_finds_the_optimum_of_small_instances": 14,  # 14
    "unit/test_search.py::test_top_candidates_are_the_best_of_all": 7,  # 8
    "unit/test_stages.py::test_split_equals_brute_force_where_layers_may_be_offloaded": 3,  # 9
    "cli/test_cli.py::test_the_same_command_gives_the_same_bytes_whatever_the_workers_and_the_hash_seed": 0,
    "cli/test_cli.py::test_every_method_and_order_packs_every_sample": 6,
    "cli/test_frameworks.py::test_frameworks_without_stages_take_a_plan_without_pipeline": 0,
    "torch/test_analytic_against_autograd.py::test_kept_bytes_equal_autograd": 12,
    "torch/test_analytic_against_autograd.py::"
    "test_unread_layers_are_those_that_no_gradient_reaches_and_keep_nothing": 4,
    "torch/test_analytic_against_autograd.py::test_frozen_layer_keeps_only_what_input_gradients_need": 4,
    "torch/test_analytic_against_autograd.py::test_selective_tier_holds_the_results_of_products_and_attention": 4,
    "torch/test_images_against_processors.py::test_llava_onevision_equals_the_processor_everywhere": 1,
    "torch/test_offloaded_layers.py::test_gradients_are_bit_equal_with_eager_attention": 1,
    "torch/test_probe.py::test_measured_bytes_are_those_that_autograd_keeps": 0,
    "torch/test_probe.py::test_the_choice_fits_and_one_layer_fewer_recomputed_does_not": 0,
    "torch/test_probe.py::test_an_understated_profile_steps_back_until_a_run_passes": 0,
    "torch/test_serve.py::test_an_answer_that_takes_too_long_is_given_up": 0,
    "torch/test_serve.py::test_tokens_are_those_of_the_plain_model": 2,
    "torch/test_serve_command.py::test_a_placed_model_answers_as_the_whole_one": 0,
    "torch/test_timed.py::test_one_layer_of_each_kind_is_timed": 8,
    "torch/test_traced.py::test_a_stage_that_begins_inside_a_tower_holds_its_masks": 0,
    "torch/test_traced.py::test_fused_kernels_save_norm_copies_and_an_activation": 0,
    "unit/test_build.py::test_gpipe_fits_with_the_micro_batches_it_was_priced_with": 1,
    "unit/test_build.py::test_other_plans_simulate_to_the_same_figures": 1,
    "unit/test_build.py::test_what_is_left_open_is_chosen_so_that_it_fits": 0,
    "unit/test_expressible.py::test_a_framework_without_stages_is_fitted_and_priced": 0,
    "unit/test_expressible.py::test_a_refusal_quotes_the_price_of_the_plan_that_fit_writes": 2,
    "unit/test_setting.py::test_auto_on_devices_alone_is_never_slower_than_1f1b": 0,
    "unit/test_size.py::test_a_killed_pass_resumes_to_the_same_bytes": 0,
    "unit/test_stages.py::test_split_equals_brute_force_on_a_thousand_instances": 4,
    "unit/test_vision_decision.py::test_a_pipeline_keeps_the_tower_whole_on_its_first_stage": 0,
}


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Marks what the table leaves out as `integration`."""
    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    for name, kept in KEPT.items():
        found = by_function.get(name, [])
        stays = {round(i * (len(found) - 1) / max(kept - 1, 1)) for i in range(min(kept, len(found)))}
        for number, item in enumerate(found):
            if number not in stays:
                item.add_marker("integration")
