"""The mutants, of engine and kernels, randomness, data, training, checkpoints and promotion."""

from .mutant import Mutant as M

OPS = "xtrain/engine/ops/"
JUDGING = "gates/judging/"
LOSS = f"{OPS}linear_cross_entropy.py"
TINY = "tests/test_unearned_promotion.py::"

ENGINE = (
    M(
        "xtrain/engine/tensor.py",
        "gradient if self.grad is None else self.grad + gradient",
        "gradient",
        "tests/test_engine.py::test_a_leaf_used_k_times_gets_the_sum_of_k_gradients",
        "t4:fan_out",
    ),
    M(
        "xtrain/engine/tensor.py",
        "slots[tensor.index] = slots[tensor.index] + gradient",
        "slots[tensor.index] = gradient",
        "tests/test_engine.py::test_an_intermediate_used_k_times_gets_the_sum_of_k_gradients",
        "t4:fan_out",
    ),
    M(
        "xtrain/engine/tensor.py",
        "            slots[tensor.index] += gradient",
        "            slots[tensor.index] -= gradient",
        "tests/test_engine.py::test_an_intermediate_used_k_times_gets_the_sum_of_k_gradients",
        "t4:fan_out",
    ),
    M(
        "xtrain/engine/params.py",
        "self.grad += gradient",
        "self.grad[...] = gradient",
        "tests/test_params.py::test_a_gradient_is_added_in_place",
        "t4:fan_out",
    ),
    M(
        "xtrain/engine/params.py",
        "key=lambda item: not item[1].decay",
        "key=lambda item: item[1].decay",
        "tests/test_params.py::test_parameters_that_are_decayed_come_first",
        "t6:ten_steps",
    ),
    M(
        "xtrain/engine/params.py",
        "at += -(-p.size // ALIGNMENT) * ALIGNMENT",
        "at += p.size // ALIGNMENT * ALIGNMENT",
        "tests/test_params.py::test_parameters_start_at_aligned_places_and_do_not_overlap",
    ),
    M(
        "xtrain/engine/remat.py",
        "requires_grad=i.requires_grad) for i in inputs",
        "requires_grad=False) for i in inputs",
        "tests/test_engine.py::test_recomputation_gives_bitwise_the_same_gradients",
        "t4:fan_out",
    ),
    M(
        f"{OPS}rms_norm.py",
        "rstd = 1 / xp.sqrt((x32 * x32).mean(-1, keepdims=True) + eps)",
        "rstd = 1 / xp.sqrt((x32 * x32).mean(-1, keepdims=True))",
        "tests/test_ops.py -k equals_the_float64 and rms_norm",
        "t4:kernel_errors",
    ),
    M(
        f"{OPS}rms_norm.py",
        "dx = rstd * (dx_hat - x_hat * (dx_hat * x_hat).mean(-1, keepdims=True))",
        "dx = rstd * dx_hat",
        "tests/test_ops.py -k gradient_equals and rms_norm",
        "t4:op_gradients",
    ),
    M(
        f"{OPS}swiglu.py",
        "dgate = dy * up * s * (1 + gate * (1 - s))",
        "dgate = dy * up * s * (1 + gate * s)",
        "tests/test_ops.py -k gradient_equals and swiglu",
        "t4:op_gradients",
    ),
    M(
        f"{OPS}attention.py",
        "mask = key <= position[:, :, None]",
        "mask = key < position[:, :, None] + 2",
        "tests/test_ops.py -k equals_the_float64 and attention",
        "t4:kernel_errors",
    ),
    M(
        f"{OPS}attention.py",
        "return x.reshape(B, kv_heads, H // kv_heads, T, Dh)",
        "return x.reshape(B, H // kv_heads, kv_heads, T, Dh).swapaxes(1, 2)",
        "tests/test_ops.py -k equals_the_float64 and attention",
        "t4:kernel_errors",
    ),
    M(
        f"{OPS}attention.py",
        "ds = p * (dp - (dp * p).sum(-1, keepdims=True)) *",
        "ds = p * dp *",
        "tests/test_ops.py -k gradient_equals and attention",
        "t4:op_gradients",
    ),
    M(
        f"{OPS}qk_norm_rope.py",
        "[first * cos - second * sin, second * cos + first * sin]",
        "[first * cos + second * sin, second * cos - first * sin]",
        "tests/test_ops.py -k equals_the_float64 and qk_norm_rope",
        "t4:kernel_errors",
    ),
    M(
        LOSS,
        "coefficient = xp.where(flat >= 0, coefficient, 0)",
        "coefficient = xp.where(flat > 0, coefficient, 0)",
        "tests/test_ops.py -k gradient_equals and linear_cross_entropy",
        "t4:op_gradients",
    ),
    M(
        LOSS,
        "loss = -picked(xp, logp, flat).astype(xp.float64).sum() * scale.astype(xp.float64)",
        "loss = -picked(xp, logp, flat).astype(xp.float64).mean() * scale.astype(xp.float64)",
        "tests/test_ops.py -k equals_the_float64 and linear_cross_entropy",
        "t4:kernel_errors",
    ),
    M(
        f"{OPS}dropout.py",
        ".astype(xp.float32) * xp.float32(1 / (1 - p))",
        ".astype(xp.float32)",
        "tests/test_one_line_faults.py -k dropout",
        "t18:rates",
    ),
    M(
        f"{OPS}adamw.py",
        "g[...] = 0",
        "pass",
        "tests/test_ops.py -k equals_the_float64 and adamw",
        "t7:optimizer_bits",
    ),
    M(
        f"{OPS}adamw.py",
        "keep = apply == 0",
        "keep = apply == 1",
        "tests/test_cpu_kernels.py::test_adamw_equals_its_numpy_reference_bit_for_bit",
        "t7:optimizer_bits",
    ),
    M(
        f"{OPS}adamw.py",
        "shrink[:decayed] = f32(1) - lr * f32(weight_decay)",
        "shrink[:decayed] = f32(1) - f32(weight_decay)",
        "tests/test_cpu_kernels.py::test_adamw_equals_its_numpy_reference_bit_for_bit",
        "t7:optimizer_bits",
    ),
)

KERNELS = (
    M(
        "xtrain/cpu/global_norm.py",
        "blocks = (gradient.size + BLOCK - 1) // BLOCK",
        "blocks = max(gradient.size // BLOCK, 1)",
        "tests/test_ops.py -k equals_the_float64 and global_norm",
        "t4:kernel_errors",
    ),
    M(
        "xtrain/cpu/gemm.py",
        "_block(a, transpose_a, packed, block, first, last, k0, count, K, c, adds or k0 > 0)",
        "_block(a, transpose_a, packed, block, first, last, k0, count, K, c, adds)",
        "tests/test_cpu_kernels.py::test_own_gemm_agrees_with_blas",
        "t3:on_devices",
    ),
    M(
        "xtrain/cpu/gemm.py",
        "first, last = share * panels // shares, (share + 1) * panels // shares",
        "first, last = share * panels // shares, share * panels // shares + panels // shares",
        "tests/test_cpu_kernels.py::test_own_gemm_agrees_with_blas",
        "t3:on_devices",
    ),
    M(
        "xtrain/engine/scalar.py",
        "return m + (g - m) * one_minus_beta1",
        "return m + (g + m) * one_minus_beta1",
        "tests/test_golden.py::test_adamw_follows_torch_for_a_hundred_steps",
        "t6:adamw_100_steps",
    ),
    M(
        "xtrain/engine/scalar.py",
        "return v * beta2 + (g * g) * one_minus_beta2",
        "return v * beta2 + g * one_minus_beta2 * one_minus_beta2",
        "tests/test_golden.py::test_adamw_follows_torch_for_a_hundred_steps",
        "t6:adamw_100_steps",
    ),
    M(
        "xtrain/engine/scalar.py",
        "return p * shrink - step_size * (m / (root_v / sqrt_bias2 + eps))",
        "return p * shrink - step_size * (m / ((root_v + eps) / sqrt_bias2))",
        "tests/test_golden.py::test_adamw_follows_torch_for_a_hundred_steps",
        "t6:adamw_100_steps",
    ),
)

RANDOMNESS = (
    M(
        "xtrain/engine/rng.py",
        "for _ in range(10):",
        "for _ in range(9):",
        "tests/test_rng.py::test_philox_gives_the_published_words",
    ),
    M(
        "xtrain/engine/rng.py",
        "return xp.asarray([seed & 0xFFFFFFFF, seed >> 32, step, micro], dtype=xp.uint32)",
        "return xp.asarray([seed & 0xFFFFFFFF, 0, step, micro], dtype=xp.uint32)",
        "tests/test_rng.py::test_a_seed_uses_both_words_of_the_key",
    ),
    M(
        "xtrain/engine/rng.py",
        "return xp.stack(words, axis=1).reshape(-1)[start - 4 * first :][:n]",
        "return xp.stack(words, axis=1).reshape(-1)[:n]",
        "tests/test_rng.py::test_any_range_of_a_stream_can_be_drawn_alone",
    ),
    M(
        "xtrain/engine/rng.py",
        "radius = xp.sqrt(-2.0 * xp.log((words + 1.0) * 2.0**-32))",
        "radius = xp.sqrt(-1.0 * xp.log((words + 1.0) * 2.0**-32))",
        "tests/test_rng.py::test_normal_numbers_have_the_moments_of_a_normal",
    ),
    M(
        "xtrain/train/step.py",
        "rng.key_array(np, self.seed, step, a)",
        "rng.key_array(np, self.seed, step, 0)",
        "tests/test_train.py::test_dropout_differs_between_steps_micro_batches_and_seeds",
        "t6:step_inputs",
    ),
    M(
        "xtrain/train/step.py",
        "key = self.keys[a] if self.dropout > 0 else None",
        "key = self.keys[0] if self.dropout > 0 else None",
        "tests/test_train.py::test_equal_micro_batches_of_a_step_drop_different_elements",
    ),
)

DATA = (
    M(
        "xtrain/data/packing.py",
        "first = step * self._windows_per_step\n",
        "first = (step + 1) * self._windows_per_step\n",
        "tests/test_data_packing.py::test_every_window_comes_exactly_once_an_epoch",
        "t6:step_inputs",
    ),
    M(
        "xtrain/data/packing.py",
        "permutation(self._seed, number // self.windows, self.windows)",
        "permutation(self._seed, 0, self.windows)",
        "tests/test_data_packing.py::test_every_epoch_has_its_own_order",
        "t6:step_inputs",
    ),
    M(
        "xtrain/data/packing.py",
        "self.windows = (len(shard.tokens) - 1) // seq_len",
        "self.windows = (len(shard.tokens) - 1) // seq_len - 1",
        "tests/test_data_packing.py::test_every_window_comes_exactly_once_an_epoch",
        "t6:step_inputs",
    ),
    M(
        "xtrain/data/packing.py",
        'rows["targets"][at >= self.tokens] = IGNORED',
        'rows["targets"][at > self.tokens] = IGNORED',
        "tests/test_data_packing.py::test_evaluation_has_the_same_targets_for_any_batch",
    ),
    M(
        "xtrain/data/packing.py",
        "targets[row, : max(len(stream) - 1, 0)] = stream[1:]",
        "targets[row, : max(len(stream) - 1, 0)] = stream[:-1]",
        "tests/test_data_packing.py::test_a_batch_has_shifted_targets_in_int32",
    ),
    M(
        "xtrain/data/packing.py",
        "targets[document[:, 1:] != document[:, :-1]] = IGNORED",
        "pass",
        "tests/test_data_packing.py::test_documents_are_kept_apart",
    ),
    M(
        "xtrain/data/split.py",
        "out = index % every == every - 1 and (limit is None or heldout < limit)",
        "out = index % every == 0 and (limit is None or heldout < limit)",
        "tests/test_data_prepare.py::test_every_nth_document_is_held_out",
        "t19:unseen",
    ),
    M(
        "xtrain/data/dataset.py",
        "if recorded != [train.sha256, heldout.sha256]:",
        "if False:",
        f"{TINY}test_prepared_shards_that_are_not_those_of_their_manifest_are_refused",
    ),
    M(
        "xtrain/data/dataset.py",
        "log_p = np.log((counts + 1.0) / (counts.sum() + vocab))",
        "log_p = np.log((counts + 1.0) / counts.sum())",
        "tests/test_data_prepare.py::test_unigram_entropy_is_that_of_the_counts",
    ),
)

TRAINING = (
    M(
        "xtrain/train/loop.py",
        "lr = learning_rate(optim_config, number, last)",
        "lr = learning_rate(optim_config, number + 1, last)",
        "tests/test_golden.py::test_losses_of_ten_adamw_steps_equal_torch",
        "t6:step_inputs",
    ),
    M(
        "xtrain/train/loop.py",
        "step.load(source.batch(number), number, lr)",
        "step.load(source.batch(number), number + 1, lr)",
        "tests/test_what_a_step_is_given.py",
        "t6:step_inputs",
    ),
    M(
        "xtrain/train/loop.py",
        "step.load(source.batch(number), number, lr)",
        "step.load(source.batch(number + 1), number, lr)",
        "tests/test_what_a_step_is_given.py",
        "t6:step_inputs",
    ),
    M(
        "xtrain/train/loop.py",
        "for number in range(start, last):",
        "for number in range(start + (start > 0), last):",
        "tests/test_what_a_step_is_given.py",
        "t6:step_inputs",
    ),
    M(
        "xtrain/train/optimizer.py",
        "return config.lr * (step + 1) / config.warmup_steps",
        "return config.lr * step / config.warmup_steps",
        "tests/test_train.py::test_the_warm_up_moves_at_once_and_ends_at_the_peak",
        "t6:step_inputs",
    ),
    M(
        "xtrain/train/optimizer.py",
        "self.updates += finite",
        "self.updates += 1",
        "tests/test_train.py::test_a_skipped_gradient_leaves_no_trace_in_the_next_update",
    ),
    M(
        "xtrain/train/optimizer.py",
        "xp.minimum(c.clip_norm / (norm + 1e-6), 1.0)",
        "c.clip_norm / (norm + 1e-6)",
        "tests/test_train.py::test_a_gradient_below_the_limit_is_not_scaled",
    ),
    M(
        "xtrain/train/step.py",
        'valid = (self.batch["targets"] >= 0).sum()',
        'valid = (self.batch["targets"][0] >= 0).sum()',
        "tests/test_train.py::test_micro_batches_weigh_tokens_alike_when_they_have_10_and_1000",
        "t16:several",
    ),
    M(
        "xtrain/train/evaluate.py",
        'valid = batch["targets"] >= 0',
        'valid = batch["targets"] >= -200',
        "tests/test_train.py::test_the_evaluation_loss_does_not_depend_on_the_batch_size",
        "t19:batches",
    ),
    M(
        "xtrain/train/config.py",
        "return self.max_tokens // self.tokens_per_step",
        "return self.max_tokens // self.tokens_per_step + 1",
        f"{TINY}test_every_run_has_bars_on_what_a_loss_takes_for_granted",
    ),
)

CHECKPOINTS = (
    M(
        "xtrain/train/checkpoint.py",
        "getattr(optimizer, name)[...] = int(count[0])",
        "getattr(optimizer, name)[...] = int(count[0]) + 1",
        "tests/test_checkpoint.py::test_a_checkpoint_brings_back_every_bit",
        "t6:resume_after_kills",
    ),
    M(
        "xtrain/train/checkpoint.py",
        "put(state[name], view, device.array)",
        "pass",
        "tests/test_checkpoint.py::test_a_checkpoint_brings_back_every_bit",
        "t6:resume_after_kills",
    ),
    M(
        "xtrain/train/checkpoint.py",
        "key=lambda p: -int(p.name)",
        "key=lambda p: int(p.name)",
        "tests/test_checkpoint.py"
        "::test_the_last_complete_checkpoint_is_used_and_the_damaged_one_named",
        "t6:step_inputs",
    ),
    M(
        "xtrain/train/checkpoint.py",
        'if verify and _hash(path / name) != manifest["sha256"][name]:',
        "if False:",
        "tests/test_checkpoint.py::test_one_flipped_bit_anywhere_is_found",
    ),
    M(
        "xtrain/train/checkpoint.py",
        "if step != best_step:",
        "if True:",
        "tests/test_checkpoint.py::test_pruning_keeps_the_newest_and_the_best",
    ),
    M(
        "xtrain/models/hf_import.py",
        "or not has_bits_of(theirs[name], ours[name], host)",
        "or theirs[name].shape != ours[name].shape",
        f"{TINY}test_an_export_that_is_not_the_checkpoint_is_refused",
    ),
)

GATES = (
    M(
        f"{JUDGING}judge.py",
        "    if not math.isfinite(number):",
        "    if math.isnan(number):",
        "tests/test_gates_framework.py -k not_finite",
    ),
    M(
        "xtrain/config/check.py",
        '    "<=": operator.le,',
        '    "<=": operator.lt,',
        "tests/test_gates_framework.py -k judged_by_its_bar",
    ),
    M(
        f"{JUDGING}judge.py",
        "_WORST_FIRST = (ERROR, FAIL, STALE, NOT_MEASURED, PASS)",
        "_WORST_FIRST = (PASS, ERROR, FAIL, STALE, NOT_MEASURED)",
        "tests/test_gates_framework.py::test_the_worst_verdict_is_the_verdict_of_all",
    ),
    M(
        f"{JUDGING}measure.py",
        'if entry["fingerprint"].get(part) != fingerprint[part]]',
        "if False]",
        "tests/test_gates_framework.py::test_a_record_holds_until_the_code_changes",
    ),
    M(
        f"{JUDGING}measure.py",
        "changed = [*_changed(entry, fingerprint), *changed_versions(entry, device)]",
        "changed = _changed(entry, fingerprint)",
        "tests/test_gates_versions.py::test_a_verdict_records_the_versions_and_goes_stale_with_them",
    ),
    M(
        f"{JUDGING}ledger.py",
        'if entry["previous"] != previous:',
        "if False:",
        "tests/test_ledger.py::test_a_removed_swapped_or_repeated_line_is_found",
    ),
    M(
        f"{JUDGING}ledger.py",
        'if entry["hash"] != content_hash(entry):',
        "if False:",
        "tests/test_ledger.py::test_a_changed_value_is_found_on_its_line",
    ),
    M(
        f"{JUDGING}ledger.py",
        'return entry if date.fromisoformat(entry["until"]) >= today else None',
        "return entry",
        "tests/test_ledger.py::test_a_waiver_holds_to_its_last_day_and_names_who_and_why",
    ),
    M(
        f"{JUDGING}signing.py",
        'return entry.get("signed_by") in trusted and why_not_signed(entry) is None',
        'return entry.get("signed_by") in trusted',
        "tests/test_signing.py::test_rewritten_evidence_counts_for_nothing_where_keys_are_trusted",
    ),
    M(
        "gates/trained_run.py",
        "unigram - loss,",
        "loss - unigram,",
        f"{TINY}test_an_export_that_is_not_the_checkpoint_is_refused",
    ),
)

PROMOTION = (
    M(
        f"{JUDGING}promote.py",
        "if each.verdict not in (PASS, REPORTED)",
        "if each.verdict == FAIL",
        "tests/test_gates_promote.py::test_a_check_of_the_run_that_has_no_value_refuses",
    ),
    M(
        f"{JUDGING}promote.py",
        "elif known.verdict != PASS:",
        "elif known.verdict == FAIL:",
        "tests/test_gates_promote.py::test_every_phase_that_is_not_pass_refuses",
    ),
    M(
        f"{JUDGING}promote.py",
        "if known.device != device:",
        "if False:",
        "tests/test_gates_promote.py::test_a_pass_on_another_device_class_refuses",
    ),
    M(
        f"{JUDGING}promote.py",
        'if decision is None or decision["verdict"] != PASS:',
        "if decision is None:",
        "tests/test_gates_promote.py"
        "::test_a_request_that_the_ledger_does_not_grant_is_not_registered",
    ),
    M(
        f"{JUDGING}promote.py",
        'if decision["fingerprint"].get("export") != export_digest(run.path):',
        "if False:",
        "tests/test_gates_promote.py"
        "::test_a_request_that_the_ledger_does_not_grant_is_not_registered",
    ),
    M(
        f"{JUDGING}promote.py",
        "reasons = [*beside, *reasons]",
        "reasons = [*reasons]",
        "tests/test_gates_promote.py"
        "::test_what_else_refuses_is_among_the_reasons_and_in_the_ledger",
    ),
    M(
        f"{JUDGING}promote.py",
        'is_newest=promoted[-1]["id"] == run.id',
        "is_newest=True",
        "tests/test_gates_promote.py::test_a_late_registration_does_not_move_the_alias_back",
    ),
    M(
        "xtrain/config/bars.py",
        "if (known.source, known.fingerprint) == (source, fingerprint):",
        "if known.source == source:",
        f"{TINY}test_other_data_under_the_same_name_are_judged_and_not_promoted",
    ),
    M(
        "xtrain/config/files.py",
        "for root in (package_conf_dir(), conf_dir()):",
        "for root in (conf_dir(), package_conf_dir()):",
        f"{TINY}test_an_edited_copy_of_conf_lowers_no_bar_of_the_package",
    ),
    M(
        "xtrain/config/identity.py",
        "if key.startswith(TERMS) and ours[key] != theirs[key]",
        "if key in TERMS and ours[key] != theirs[key]",
        f"{TINY}test_a_changed_term_is_said_before_the_first_step",
    ),
    M(
        f"{JUDGING}audit.py",
        'if here != tags["ledger.head"]:',
        "if False:",
        "tests/test_audit.py::test_entries_cut_off_the_end_are_missed",
    ),
    M(
        f"{JUDGING}audit.py",
        'if exported != decision["fingerprint"].get("export"):',
        "if False:",
        "tests/test_audit.py::test_a_version_with_borrowed_tags_holds_another_export",
    ),
)

MUTANTS = (
    *ENGINE,
    *KERNELS,
    *RANDOMNESS,
    *DATA,
    *TRAINING,
    *CHECKPOINTS,
    *GATES,
    *PROMOTION,
)
