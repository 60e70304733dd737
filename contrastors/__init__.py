"""The library behind the scripts: flat modules, imports point down the floors.

floor 0, no torch    records, images, validation, metrics, comparison, plots, runlog, cli, train_flags, watch
                     mining and search: corpus, negatives, search_api, served
                     the judge: vlm, vlm_messages, verdicts, candidates, reviews, report, demo_judge
                     publishing: shards, datacard, splits, sources, swift_rows
floor 1, torch       rand_state, distributed, logit_scale, pixels, index
floor 2              loss, biqwen3, processing, data
floor 3              batches, chunking, evaluation, checkpoint, loading, embeddings, mining, gates, demo
floor 4              datasets, run_folder, resume, query_side, served_eval, export_files, checks, costs, swift
floor 5              export_check, step_checks, plan
floor 6              export, doctor

`docs/design.md` tells the way of a batch through them. This file imports nothing, so that `--help` stays quick.
"""
