"""What the plain test command leaves to the tests marked `integration`: long tests, and most cases of long families.

One table instead of marks in fifty files, so that it can be weighed as a whole. Nothing is lost: `.ci/run` runs the
rest in its section `processes`. Seconds are of one fast core, 2026-11-22; a test of more than 4 s belongs here, unless
it is the only guard of a claim of the README.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

# test function -> how many of its cases the plain command keeps, evenly spread, or which by their names; 0: none
KEPT: dict[str, int | tuple[str, ...]] = {
    "cli/test_refusals.py::test_a_command_ends_in_one_sentence": 40,  # 60
    "cli/test_cli.py::test_a_source_key_survives_resume_and_parquet": 0,  # 2
    "cli/test_cli.py::test_every_method_and_order_packs_every_sample": 6,
    "cli/test_cli.py::test_several_saved_tables_keep_what_they_skipped_and_assumed": 0,  # 3
    "cli/test_cli.py::test_the_same_command_gives_the_same_bytes_whatever_the_workers_and_the_hash_seed": 0,
    "cli/test_formats.py::test_a_plan_of_a_meta_file_knows_repeats_and_roots": 0,  # 3
    "cli/test_frameworks.py::test_a_plan_that_megatron_cannot_run_is_refused_and_fitted": 0,  # 7
    "cli/test_frameworks.py::test_an_export_of_a_plan_made_for_it_warns_of_nothing": 0,  # 28
    "cli/test_frameworks.py::test_real_models_are_exported_without_a_warning_or_refused_in_a_sentence": 0,  # 20
    "cli/test_frameworks.py::test_frameworks_without_stages_take_a_plan_without_pipeline": 0,
    "cli/test_output.py::test_the_demo_is_drawn_sized_planned_and_told": 0,  # 6
    "cli/test_profile_verb.py::test_a_timed_profile_makes_a_plan_that_says_so": 0,  # 3
    "cli/test_profile_verb.py::test_a_traced_profile_counts_bytes_and_makes_a_plan_that_is_checked": 0,  # 30 s
    "cli/test_profile_verb.py::test_logged_runs_are_fitted_and_shown_beside_the_fit": 0,  # 3
    "cli/test_profile_verb.py::test_what_cannot_be_timed_is_one_sentence": 1,  # 8
    "docs/test_docs.py::test_every_example_runs": 0,  # 9
    "docs/test_docs.py::test_every_snippet_runs": ("README.md",),  # 50
    "torch/test_analytic_against_autograd.py::test_frozen_layer_keeps_only_what_input_gradients_need": 2,
    "torch/test_analytic_against_autograd.py::test_kept_bytes_equal_autograd": 5,
    "torch/test_analytic_against_autograd.py::test_selective_tier_holds_the_results_of_products_and_attention": 2,
    "torch/test_analytic_against_autograd.py::"
    "test_unread_layers_are_those_that_no_gradient_reaches_and_keep_nothing": 2,
    "torch/test_asked.py::test_families_without_a_line_here_are_described_by_their_folder": 1,  # 8
    "torch/test_asked.py::test_gated_delta_attention_is_priced_by_what_runs": 0,  # 2
    "torch/test_asked_images.py::test_a_formula_and_a_clip_are_the_processors": 0,  # 8
    "torch/test_asked_images.py::test_a_processor_that_cuts_to_one_size_is_a_constant": 0,  # 6
    "torch/test_asked_images.py::test_rows_of_tiles_are_written_as_the_processor_writes_them": 0,  # 8
    "torch/test_described_placement.py::test_a_described_family_is_loaded_by_its_map_and_answers_as_before": 1,
    "torch/test_described_placement.py::test_the_cache_of_every_layer_is_the_one_that_its_own_code_makes": 1,
    "torch/test_families.py::test_a_family_has_a_value_for_a_capability_or_a_sentence": ("llava_next",),  # 30
    "torch/test_internvl_chat.py::test_a_published_folder_answers_as_transformers_model": 2,
    "torch/test_internvl_chat.py::test_other_language_models_keep_their_names": 0,
    "torch/test_internvl_chat.py::test_what_is_split_cannot_stay_in_the_folders_files_and_the_rest_can": 0,
    "torch/test_internvl_chat.py::test_what_transformers_classes_would_compute_otherwise_is_refused": 3,
    "torch/test_internvl_chat.py::test_what_was_loaded_is_saved_in_transformers_own_format": 1,
    "torch/test_lora_memory.py::test_a_backward_with_adapters_needs_no_gradient_of_a_weight": 1,  # 12
    "torch/test_lora_memory.py::test_adapters_keep_their_inputs_once_and_their_middles": 3,
    "torch/test_lora_memory.py::test_a_traced_model_keeps_what_the_formulas_say": 1,  # 3
    "torch/test_model_support.py::test_a_sample_of_the_sweep_gives_the_written_cells": 0,  # 60
    "torch/test_packed_collator.py::test_fillers_reach_every_parameter_and_move_none": 4,
    "torch/test_packed_gradients.py::"
    "test_two_ranks_with_accumulation_have_the_gradient_of_one_process_unpacked": 4,  # 3 a family
    "torch/test_packed_logits.py::test_packed_logits_equal_those_of_the_samples_alone": 4,  # 2
    "torch/test_pipeline_build.py::"
    "test_a_model_has_the_layers_of_the_description_and_reads_those_it_says_are_read": 3,  # 6
    "torch/test_pipeline_build.py::"
    "test_something_crosses_every_cut_with_images_and_text_alone_behind_the_embedding": 3,  # 6
    "torch/test_placement_families.py::test_every_map_gives_the_whole_models_answer": 2,  # 95
    "torch/test_placement_load.py::test_a_written_map_runs_what_is_copied_where_the_plan_says": 0,  # 3
    "torch/test_placement_load.py::test_host_memory_never_holds_a_shard_beside_what_stays_there": 0,  # 10
    "torch/test_placement_memory.py::test_a_devices_bytes_are_those_counted_on_the_real_modules": 6,  # 7
    "torch/test_placement_memory.py::test_every_kind_of_layer_peaks_where_it_is_said_to": 4,  # 5
    "torch/test_probe.py::test_a_budget_that_full_recompute_exceeds_is_refused_with_the_missing_bytes": 0,  # 5
    "torch/test_probe.py::test_an_understated_profile_steps_back_until_a_run_passes": 0,
    "torch/test_probe.py::test_measured_bytes_are_those_that_autograd_keeps": 0,
    "torch/test_probe.py::test_the_choice_fits_and_one_layer_fewer_recomputed_does_not": 0,
    "torch/test_recompute.py::test_a_frozen_tower_is_not_run_again": 1,
    "torch/test_recompute.py::test_gradients_are_bit_equal_and_nothing_is_left_behind": 4,  # 3
    "torch/test_recompute.py::test_gradients_are_bit_equal_with_eager_attention_and_what_is_held_in_part": 2,
    "torch/test_recompute.py::test_transformers_trainer_trains_to_the_same_weights": 1,  # 2
    "torch/test_recompute.py::test_under_ddp_and_fsdp2_gradients_are_bit_equal": 0,  # 7
    "torch/test_recompute_memory.py::test_a_recomputed_block_needs_what_it_computes_again_as_well": 1,  # 11
    "torch/test_recompute_memory.py::test_elsewhere_the_workspace_is_an_upper_bound": 1,  # 10
    "torch/test_recompute_memory.py::test_sizes_alone_need_the_same_bytes": 0,  # 4
    "torch/test_recompute_memory.py::test_the_backward_of_a_block_needs_its_workspace": 1,  # 13
    "torch/test_serve.py::test_torchserves_handler_answers_as_the_model": 0,
    "torch/test_smart_resize_against_processors.py::test_smart_resize_equals_tensors_and_placeholders_of_a_full_run": 2,
    "torch/test_tiles_against_processors.py::test_llava_equals_tensors_and_placeholders_of_a_full_run": 0,
    "torch/test_tiles_against_processors.py::test_llava_onevision_equals_the_processor_everywhere": 1,
    "torch/test_timed.py::test_a_family_that_is_named_nowhere_is_timed": ("smolvlm",),  # 9
    "torch/test_timed.py::test_one_layer_of_each_kind_is_timed": 4,
    "torch/test_traced.py::test_a_blocks_transient_is_its_workspace_without_what_it_computes_again": 1,  # 7
    "torch/test_traced.py::test_a_stage_that_begins_inside_a_tower_holds_its_masks": 0,
    "torch/test_traced.py::test_bytes_of_every_subset_are_those_autograd_keeps": 3,  # 10
    "torch/test_traced.py::test_flash_keeps_neither_masks_nor_repeated_keys": 0,  # 6
    "torch/test_traced.py::test_fused_kernels_save_norm_copies_and_an_activation": 0,
    "torch/test_traced.py::test_layers_add_up_to_a_whole_model_of_another_size": 0,  # 21
    "torch/test_traced.py::test_peak_is_the_allocators_but_for_the_kernels_workspaces": 1,  # 16
    "torch/test_traced.py::test_recompute_flops_are_those_that_recompute_adds": 0,  # 2
    "torch/test_timed.py::test_towers_are_timed_at_their_sizes_and_words_at_theirs": 0,  # 2
    "torch/test_traced_batches.py::test_images_have_as_many_places_as_the_forward_fills": 1,  # 2
    "torch/test_train.py::test_a_broken_image_stops_the_run_or_becomes_a_filler": 0,  # 3
    "torch/test_train.py::test_a_tied_model_trains_resumes_and_exports_wherever_its_halves_lie": 0,  # 8
    "torch/test_train.py::test_bfloat16_loses_nearly_as_float32": 0,
    "torch/test_train.py::test_every_schedule_trains_as_one_process_does": 0,  # 40
    "torch/test_train.py::test_frozen_towers_stay_as_they_are": 0,
    "torch/test_train.py::test_gradients_are_clipped_over_all_stages_together": 0,  # with the same runs
    "torch/test_train.py::test_recompute_changes_no_bit": 0,
    "torch/test_train.py::test_resuming_gives_the_same_losses_under_dropout_and_with_momentum": 0,  # 3
    "torch/test_train.py::test_the_log_compares_every_step_with_the_plan": 0,
    "torch/test_train.py::test_the_report_takes_the_run": 0,
    "torch/test_verify_pipeline.py::test_stages_that_cut_tower_and_decoder_have_the_models_loss_and_gradients": 1,  # 12
    "torch/test_verify_packing.py::test_packs_of_text_are_exact": 2,
    "torch/test_verify_packing.py::test_packs_with_images_are_exact": 2,
    "torch/test_vision_families.py::test_images_apart_are_encoded_as_together": 3,
    "torch/test_videos.py::test_a_video_is_sized_trained_and_packed_as_its_processor_makes_it": 0,  # 16
    "unit/test_export_gate.py::test_a_setting_is_read_back_or_refused": 12,  # 3 each
    "unit/test_expressible.py::test_the_next_degrees_are_taken_where_nothing_fits_that_can_be_run": 0,  # 2
    "unit/test_gains_on_real_data.py::test_no_plan_is_slower_than_its_baseline_and_a_slower_row_says_why": 1,  # 30
    "unit/test_jitter.py::test_mean_and_quantile_are_those_of_steps_drawn_one_by_one": 2,
    "unit/test_build.py::test_gpipe_fits_with_the_micro_batches_it_was_priced_with": 1,
    "unit/test_build.py::test_interleaved_steps_hold_whole_rounds_of_the_pipeline": 1,  # 4
    "unit/test_build.py::test_no_variant_beats_the_plan": 0,  # 2
    "unit/test_build.py::test_other_choices_give_plans_that_check_and_simulate_alike": 2,  # 9
    "unit/test_build.py::test_what_is_left_open_is_chosen_so_that_it_fits": 0,
    "unit/test_data_files.py::test_every_planned_record_is_written_once_in_the_order_of_the_plan": 0,  # 2
    "unit/test_description.py::test_damage_gives_a_model_that_can_be_priced_or_a_sentence": 0,  # 2
    "unit/test_expressible.py::test_a_framework_of_one_tier_is_priced_in_seconds_and_bytes": 0,
    "unit/test_expressible.py::test_a_frozen_tower_has_nothing_to_recompute": 1,  # 2
    "unit/test_expressible.py::test_a_refusal_quotes_the_price_of_the_plan_that_fit_writes": 1,
    "unit/test_logs.py::test_the_truth_is_found_from_steps_that_bind_every_stage_kind": 0,  # 2
    "unit/test_probed.py::test_a_device_that_keeps_otherwise_is_predicted_to_the_byte": 1,  # 2
    "unit/test_saved.py::test_a_plan_from_a_traced_profile_reads_its_bytes": 0,  # 2
    "unit/test_search.py::test_the_search_is_near_the_best_of_all_splits": 4,  # 20 cases
    "unit/test_setting.py::test_an_open_zero_stage_is_the_best_of_those_asked_for": 0,  # 7
    "unit/test_setting.py::test_no_setting_looks_faster_by_larger_steps": ("exact-256.0",),  # 4
    "unit/test_steps.py::test_every_step_holds_the_batch_that_was_asked_for": 4,  # 2 each
    "unit/test_whole_search.py::test_no_forced_option_makes_a_faster_plan": ("2",),  # 8 each
    "unit/test_whole_search.py::test_pruning_loses_less_than_one_per_cent": ("2", "3", "7"),  # 3 each
    "unit/test_whole_search.py::test_sharing_images_is_never_worse_than_not_sharing": 0,  # 5
    "unit/test_setting.py::test_auto_takes_the_fastest_of_all_schedules_that_fit": 0,  # 3
    "unit/test_setting.py::test_zero_bubble_plans_check": 1,  # 4
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
        if isinstance(kept, int):
            stays = {round(i * (len(found) - 1) / max(kept - 1, 1)) for i in range(min(kept, len(found)))}
        else:
            stays = {number for number, item in enumerate(found) if item.name.partition("[")[2][:-1] in kept}
        for number, item in enumerate(found):
            if number not in stays:
                item.add_marker("integration")
