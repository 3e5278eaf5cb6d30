"""A dict of faults that can happen to a run, and for each fault the tests that provoke it.

For each fault, a table row of docs/reliability.md describes what the user sees.
"""

A, B, C = "tests/checkpoints/test_", "tests/ranks/test_", "tests/cli/test_"
U, H = "tests/unit/test_", "tests/hosts/test_"
FAULTS: dict[str, tuple[str, ...]] = {
    "a rank is killed": (f"{A}kills.py::test_a_few_kills", f"{B}faults.py::test_all_ranks_end_with_a_report"),
    "a machine loses its power, hangs or loses its network": (
        f"{H}heartbeat.py::test_a_silent_host_is_named_by_all_others",
    ),
    "a rank freezes in a run with a pipeline": (f"{B}faults.py::test_all_ranks_end_with_a_report",),
    "the process that hosts torch's TCPStore freezes": (
        f"{B}failure_reports.py::test_a_frozen_process_that_keeps_the_store",
    ),
    "a rank freezes in a run without a pipeline": (
        f"{B}initialize.py::test_a_run_without_a_pipeline_says_where_each_rank_stands",
    ),
    "a rank never joins the run": (f"{B}initialize.py::test_a_rank_that_does_not_come_ends_the_wait",),
    "the ranks reach `MASTER_ADDR`, but not each other": (
        f"{H}meeting.py::test_ranks_that_cannot_meet_end_together_with_a_sentence",
        f"{H}meeting.py::test_ranks_behind_a_silent_network_end_at_the_timeout",
    ),
    "a layer raises an exception": (f"{B}failure_reports.py::test_a_layer_that_raises_is_reported_once",),
    "memory runs out": (
        f"{B}failure_reports.py::test_want_of_memory_is_one_line",
        f"{B}initialize.py::test_want_of_memory_has_a_sentence",
    ),
    "the ranks get SIGTERM": (f"{C}pretrain.py::test_signals_save_and_stop_in_order",),
    "the ranks get SIGUSR1": (f"{C}pretrain.py::test_signals_save_and_stop_in_order",),
    "the user presses Ctrl-C": (
        f"{B}failure_reports.py::test_ctrl_c_is_one_line",
        f"{C}launch.py::test_ctrl_c_in_a_process_started_by_hand",
    ),
    "the launcher gets a signal": (
        f"{C}launch.py::test_ranks_save_and_end",
        f"{C}launch.py::test_ranks_that_do_not_end_are_ended",
    ),
    "the launcher is killed": (f"{B}orphans.py",),
    "a data worker is killed": (
        f"{U}shrunk_files.py::test_a_worker_that_fails_and_one_that_is_killed",
        f"{U}shrunk_files.py::test_the_end_of_a_worker_is_one_sentence",
    ),
    "a file of a corpus becomes shorter while a run reads it": (
        f"{U}shrunk_files.py::test_a_file_that_became_shorter_is_named",
    ),
    "a rank dies, and --max-restarts is given": (
        f"{C}launch.py::test_a_run_goes_on_by_itself",
        f"{C}launch.py::test_a_new_attempt_does_not_read_what_the_one_before_has_left",
    ),
    "a port is in use, or a node is missing": (f"{C}launch.py::test_a_port_in_use_and_a_missing_node_are_a_sentence",),
    "a second run starts in the directory of a running one": (
        f"{U}run_lock.py::test_a_run_that_lives_keeps_its_directory",
        f"{U}run_lock.py::test_who_is_faster_wins",
    ),
    "a crashed run has left its run.lock": (f"{U}run_lock.py::test_what_a_crash_left_is_taken_over_with_a_note",),
    "the directory of a run is removed, renamed or replaced while it trains": (
        f"{A}lost_directories.py::test_a_run_whose_directory_is_gone_ends",
    ),
    "a run is resumed without its --save": (f"{U}run_lock.py::test_a_forgotten_save_is_noticed",),
    "a run starts again from iteration 0": (
        f"{U}run_lock.py::test_a_run_that_begins_again_keeps_the_lines_of_the_one_before",
    ),
    "ranks of one run are started with different settings, code or versions": (
        f"{B}agreement.py::test_ranks_that_were_started_differently_say_so",
        f"{B}agreement.py::test_ranks_with_other_scripts_or_modules_are_refused",
    ),
    "copies of a weight differ between replicas": (
        f"{B}agreement.py::test_copies_that_differ_by_a_bit_are_not_saved",
        f"{B}agreement.py::test_of_three_the_one_that_differs_is_named",
    ),
    "a rank is slow": (f"{B}agreement.py::test_the_rank_that_others_wait_for_is_in_the_line",),
    "a gradient is NaN or Inf": (f"{B}bad_gradients.py::test_no_rank_applies_a_step_that_is_bad_on_one",),
    "steps in a row are skipped": (
        f"{B}bad_gradients.py::test_a_run_that_learns_nothing_ends_and_keeps_its_last_good_checkpoint",
    ),
    "a batch causes skipped steps": (
        f"{B}bad_gradients.py::test_passing_over_a_batch_is_what_leaving_out_its_step_is",
    ),
    "fp16 gradients overflow at the smallest loss scale": (
        f"{U}health.py::test_fp16_may_search_for_its_scale_and_ends_at_the_least_one",
    ),
    "the loss jumps": (f"{U}health.py::test_jumps_are_named_and_noise_is_not",),
    "a process that writes a checkpoint dies": (
        f"{A}incomplete.py::test_every_error_of_a_writer_ends_the_save_and_nothing_else",
    ),
    "new checkpoints are damaged": (f"{A}incomplete.py::test_the_newest_whole_checkpoint_stays",),
    "the nodes do not share the folder of the checkpoints, or use different object storage": (
        f"{B}shared_folder.py::test_separate_folders_are_refused_unless_nothing_is_saved",
        f"{H}disks.py::test_separate_disks_are_refused_before_the_first_step",
    ),
    "the disk of the checkpoints is full": (
        f"{A}damage.py::test_a_disk_that_takes_no_more",
        f"{U}failing_outputs.py::test_a_failed_save_is_tried_again",
    ),
    "standard output or standard error cannot be written": (f"{U}streams.py::test_a_run_trains_and_saves",),
    "a save takes longer than 5 minutes": (f"{U}hostile_input.py::test_a_save_that_hangs_is_named",),
    "metrics.jsonl has an invalid line": (
        f"{U}hostile_input.py::test_a_strange_line_of_metrics_is_dropped_by_name_when_a_run_resumes",
        f"{U}hostile_input.py::test_a_report_names_file_and_line",
    ),
    "an output file in the run directory is a link": (f"{U}tool_outputs.py",),
    "the disk of the run directory is full": (f"{U}failing_outputs.py::test_metrics_wait_for_a_disk_with_space",),
    "an old checkpoint cannot be deleted": (f"{U}failing_outputs.py::test_an_old_checkpoint_that_cannot_be_deleted",),
    "the plot of a report cannot be drawn": (f"{U}failing_outputs.py::test_a_report_that_cannot_be_drawn",),
    "a run crashes while it saves the same iteration again": (
        f"{A}damage.py::test_a_crash_while_the_same_iteration_is_saved_again",
    ),
    "a byte of a checkpoint file has changed": (f"{A}damage.py::test_any_flipped_byte_is_found_and_the_file_is_named",),
    "a file of a checkpoint is truncated or missing": (
        f"{A}damage.py::test_any_cut_or_missing_file_is_found_and_named",
    ),
    "a checkpoint belongs to another model": (f"{C}pretrain.py::test_a_checkpoint_of_another_model_is_refused",),
    "a tool reads a checkpoint that a run with `--keep-last` deletes": (
        f"{C}pruned_checkpoints.py::test_the_newest_checkpoint_is_read_instead",
    ),
    "a file of a corpus is truncated": (f"{C}pretrain.py::test_a_truncated_corpus",),
    "a corpus was made with another tokenizer": (f"{C}pretrain.py::test_data_of_another_tokenizer",),
    "a block of a corpus has another SHA-256 than its sidecar, or an interrupted copy left a hole": (
        f"{U}corpus_damage.py::test_the_sha_256_is_that_of_the_sidecar",
        f"{U}corpus_damage.py::test_a_run_refuses_a_corpus_with_a_hole",
    ),
    "a local file of a corpus is changed while a run trains on it": (
        f"{U}corpus_checks.py::test_a_run_on_a_corpus_that_changes_saves_nothing_more",
    ),
    "the checkpoint to resume from, or `latest`, is damaged or missing": (
        f"{U}unreadable_checkpoints.py::test_an_unreadable_checkpoint_leads_to_the_one_before",
    ),
    "a token id in a corpus is damaged": (f"{C}pretrain.py::test_a_damaged_id_stops_the_run",),
    "tools/preprocess_data.py is killed": (f"{C}tools.py::test_a_killed_run_goes_on",),
    "tools/preprocess_data.py loses a worker process, or can no longer write its output or read its input": (
        f"{U}resumed_preprocessing.py::test_only_success_removes_what_is_done",
    ),
}  # fmt: skip
# Tests that run only with pytest --full, since they take long.
ONLY_FULL = (f"{C}launch.py::test_a_run_goes_on_by_itself",)
