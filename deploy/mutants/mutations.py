"""The stored mutations: at least one for each trap of issue GAUDI's simulator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One wrong edit: in `file`, `old` (found exactly once) becomes `new`; then `test` must fail.

    `reason` says what would happen on a card, with the row of docs/gaudi-facts.md.
    """

    trap: str
    reason: str
    file: str
    old: str
    new: str
    test: str


_HPU = "services/engine/device/hpu"
_TRAPS = "tests/sim/simulator/test_traps.py"
_SERVED = "tests/sim/simulator/test_traps_served.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap="varying-number",
        reason="4.2: numbers are part of a graph's key by value, so each step would capture, and leak, anew",
        file=f"{_HPU}/execution.py",
        old="            own.copy_(given)\n"
        "        return self._module(*self._inputs, cache_tensors_list=self._kept)",
        new="            own.copy_(given)\n"
        "        step = torch.randint(2**31, ()).item()\n"
        "        return self._module(*self._inputs, cache_tensors_list=[step])",
        test=f"{_TRAPS}::test_a_bucket_is_captured_once_whatever_its_inputs_are",
    ),
    Mutation(
        trap="untrimmed-arguments",
        reason="4.2: the view of every tensor given is in the key, of those that are not needed too",
        file=f"{_HPU}/execution.py",
        old="            own.copy_(given)\n"
        "        return self._module(*self._inputs, cache_tensors_list=self._kept)",
        new="            own.copy_(given)\n"
        "        return self._module(*self._inputs, cache_tensors_list=list(tensors))",
        test=f"{_TRAPS}::test_a_bucket_is_captured_once_whatever_its_inputs_are",
    ),
    Mutation(
        trap="inputs-not-cloned",
        reason="4.2: a replay copies into the captured inputs, which here would be somebody else's",
        file=f"{_HPU}/execution.py",
        old="self._inputs = tuple(tensor.clone() for tensor in tensors)",
        new="self._inputs = tuple(tensors)",
        test=f"{_TRAPS}::test_a_replay_leaves_its_callers_tensors_alone",
    ),
    Mutation(
        trap="buffers-not-named",
        reason="4.2: without the tensor cache a graph frees what it writes and was not told to keep",
        file=f"{_HPU}/execution.py",
        old='        """Record the forward, which runs once."""\n'
        "        result = self._module(*self._inputs, cache_tensors_list=self._kept)",
        new='        """Record the forward, which runs once."""\n'
        "        result = self._module(*self._inputs, cache_tensors_list=[])",
        test=f"{_TRAPS}::test_buffers_that_a_graph_writes_stay_usable",
    ),
    Mutation(
        trap="compile-only-garbage",
        reason="2.2: what was written while nothing was launched is garbage, the KV's padding block too",
        file=f"{_HPU}/execution.py",
        old="        finally:\n            self.buffers.clear()",
        new="        finally:\n            pass",
        test=f"{_TRAPS}::test_after_a_warm_up_that_only_compiled_the_kv_is_clear",
    ),
    Mutation(
        trap="dynamo-limit",
        reason="2.2: beyond 8 shapes dynamo stops compiling without a word",
        file=f"{_HPU}/execution.py",
        old="config.recompile_limit = max(config.recompile_limit, _LEAST_ENTRIES, 1 + each * count)",
        new="config.recompile_limit = max(config.recompile_limit, 1)",
        test=f"{_TRAPS}::test_every_bucket_is_compiled_beyond_dynamos_own_limit",
    ),
    Mutation(
        trap="output-not-copied",
        reason="4.2: a graph's results are overwritten by its next replay, or freed: they must be copied",
        file="services/engine/runner/execution.py",
        old="                buffer.index_copy_(0, rows, values.to(buffer.dtype))",
        new="                buffer.raw = values.to(buffer.dtype).raw",
        test=f"{_SERVED}::test_scores_of_prompts_and_tokens_are_those_of_the_cpu",
    ),
    Mutation(
        trap="graph-memory-ignored",
        reason="2.1: nothing keeps graphs inside of a reserve: without one the KV leaves them no memory",
        file="services/engine/core/sizing.py",
        old="prior = GraphReserve(options.graph_reserved_mem if device.execution.reserves_graphs else 0.0)",
        new="prior = GraphReserve(0.0)",
        test=f"{_SERVED}::test_memory_for_graphs_is_set_aside_before_the_kv",
    ),
    Mutation(
        trap="int64-overflow",
        reason="4.7: in lazy mode int64 is int32, without a word",
        file="services/engine/sampling/draw.py",
        old="torch.float32: (torch.int32, 2.0**30)",
        new="torch.float32: (torch.int64, 2.0**40)",
        test=f"{_TRAPS}::test_sums_of_probabilities_fit_the_integers_of_the_device",
    ),
    Mutation(
        trap="cpu-fallback",
        reason="4.2 and 4.4: what has no kernel runs on the host, which no graph can hold",
        file="services/engine/sampling/static.py",
        old="    search = ComparingSearch()",
        new="    from services.engine.sampling.draw import IndexedSearch\n\n    search = IndexedSearch()",
        test=f"{_SERVED}::test_nothing_is_compiled_or_captured_after_warm_up_and_nothing_falls_back",
    ),
    Mutation(
        trap="int64-gather",
        reason="4.4: outside of lazy mode int64 is int64, which the bridge gathers on the host",
        file="services/engine/sampling/draw.py",
        old="    return ids.to(torch.int32).gather(1, places).to(torch.int64)",
        new="    return ids.gather(1, places)",
        test=f"{_TRAPS}::test_the_largest_scores_are_found_on_the_device",
    ),
    Mutation(
        trap="view-update",
        reason="4.2: a graph cannot update what is older than its capture through a view",
        file="services/engine/model/paged.py",
        old="            tensor.index_fill_(0, slots, 0)",
        new="            tensor.view(-1, block_size, *tensor.shape[1:]).index_fill_(0, blocks, 0)",
        test=f"{_TRAPS}::test_blocks_are_cleared_and_copied_in_a_graph",
    ),
    Mutation(
        trap="host-read",
        reason="4.2: while a graph is captured the host cannot look at what is computed",
        file=f"{_HPU}/attention.py",
        old="    usable = torch.isfinite(query)\n",
        new="    usable = torch.isfinite(query)\n"
        "    if bool(usable.all()):\n"
        "        usable = torch.ones_like(usable)\n",
        test=f"{_TRAPS}::test_a_decode_can_be_captured_and_equals_the_cpus",
    ),
    Mutation(
        trap="data-dependent-shape",
        reason="4.2: shapes in a graph are static: padding is masked, not left out",
        file=f"{_HPU}/attention.py",
        old="    owners = (rows.unsqueeze(1)",
        new="    own = rows < batch\n"
        "    blocks, rows, bias = blocks[own], rows[own], bias[own]\n"
        "    count = bias.shape[0]\n"
        "    owners = (rows.unsqueeze(1)",
        test=f"{_TRAPS}::test_a_decode_can_be_captured_and_equals_the_cpus",
    ),
    Mutation(
        trap="host-tensor",
        reason="9: a card does not compute with tensors of the host",
        file=f"{_HPU}/attention.py",
        old="    owners = (rows.unsqueeze(1) == torch.arange(batch, device=rows.device))",
        new="    owners = (rows.unsqueeze(1) == torch.arange(batch))",
        test=f"{_TRAPS}::test_a_decode_can_be_captured_and_equals_the_cpus",
    ),
    Mutation(
        trap="mask-and-lengths",
        reason="3.4: FusedSDPA takes valid_seq_len without a mask alone",
        file=f"{_HPU}/attention.py",
        old="    if mask is None and lengths is not None:",
        new="    if lengths is not None:",
        test=f"{_TRAPS}::test_a_mask_and_lengths_are_not_given_to_the_kernel_together",
    ),
    Mutation(
        trap="pageable-results",
        reason="BRG: a copy to memory that is not pinned ends some time after its event",
        file=f"{_HPU}/device.py",
        old="host = memory[:count].view(tensor.dtype).view(tensor.shape)",
        new="host = torch.empty(tensor.shape, dtype=tensor.dtype)",
        test="tests/sim/hpu/test_parts.py::test_a_copy_to_the_host_is_void_until_it_is_waited_for",
    ),
    Mutation(
        trap="rounded-scores",
        reason="3.3: scores in the hundreds, as Qwen2 has them, lose their differences in bfloat16",
        file=f"{_HPU}/attention.py",
        old="    if softmax is Softmax.FP32:\n        query = query.float()",
        new="    if softmax is Softmax.FP32:\n        query = query.clone()",
        test="tests/sim/hpu/test_attention.py::test_large_scores_keep_their_differences_in_float32",
    ),
    Mutation(
        trap="adjustment-for-qwen2",
        reason="3.3: the adjustment is never right for the family qwen2",
        file=f"{_HPU}/fused.py",
        old="    if not asked and (float32_scores or attention.softmax is Softmax.FP32):",
        new="    if False:",
        test="tests/sim/hpu/test_kernels.py::test_rules_by_model",
    ),
    Mutation(
        trap="buffers-hashed",
        reason="BRG: every tensor of a call is hashed in each replay, of the persistent buffers too",
        file=f"{_HPU}/execution.py",
        old="kept = Kept(buffers) if self._objects else buffers",
        new="kept = buffers",
        test=f"{_TRAPS}::test_a_replay_hashes_its_inputs_alone",
    ),
    Mutation(
        trap="compile-without-reserve",
        reason="2.1: recipes and workspaces of the compiled mode lie in HBM as graphs do",
        file=f"{_HPU}/execution.py",
        old="return self.mode.captures",
        new="return self.budgets_graphs",
        test="tests/sim/hpu/test_memory.py::test_the_modes_that_keep_recipes_leave_them_memory",
    ),
    Mutation(
        trap="early-bridge",
        reason="BRG: torch imports it by an entry point, before versions are checked and variables are set",
        file="services/engine/__init__.py",
        old='os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"',
        new='os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"',
        test="tests/sim/hpu/test_opening.py::test_torch_does_not_load_a_bridge_by_itself",
    ),
    Mutation(
        trap="second-process",
        reason="4.3: a process owns a whole card; the next one must be told so, not of mismatched releases",
        file=f"{_HPU}/open_card.py",
        old='        if "acquire" in text.lower():',
        new='        if "busy" in text.lower():',
        test=f"{_TRAPS}::test_a_card_of_another_process_is_named_as_taken",
    ),
    Mutation(
        trap="wait-in-a-compiled-step",
        reason="3.5: nothing raises where a step between compiled regions waits for the device",
        file=f"{_HPU}/attention.py",
        old="    usable = torch.isfinite(query)\n",
        new="    usable = torch.isfinite(query)\n    if int(rows[0]) > batch:\n        raise ValueError\n",
        test=f"{_SERVED}::test_no_step_waits_or_changes_what_it_is_given[compile]",
    ),
    Mutation(
        trap="upload-in-a-step",
        reason="3.5: a tensor that the host makes in each step is a copy that the host waits for",
        file="services/engine/runner/execution.py",
        old="        hidden = self._model.decode(tokens, positions, slots, blocks, owners, starts)",
        new="        tokens = tokens + torch.tensor([0], device=tokens.device)\n"
        "        hidden = self._model.decode(tokens, positions, slots, blocks, owners, starts)",
        test=f"{_SERVED}::test_no_step_waits_or_changes_what_it_is_given[eager]",
    ),
    Mutation(
        trap="changed-argument",
        reason="4.2: a forward's arguments are its caller's, and of a graph they are its own inputs",
        file="services/engine/runner/execution.py",
        old="        hidden = self._model.decode(tokens, positions, slots, blocks, owners, starts)",
        new="        positions.add_(1)\n"
        "        hidden = self._model.decode(tokens, positions - 1, slots, blocks, owners, starts)",
        test=f"{_SERVED}::test_no_step_waits_or_changes_what_it_is_given[eager]",
    ),
    Mutation(
        trap="input-updated-by-view",
        reason="4.2: a graph cannot update its inputs through a view either",
        file=f"{_HPU}/attention.py",
        old="    owners = (rows.unsqueeze(1)",
        new="    rows.view(-1).clamp_(max=batch)\n    owners = (rows.unsqueeze(1)",
        test=f"{_TRAPS}::test_a_decode_can_be_captured_and_equals_the_cpus",
    ),
    Mutation(
        trap="upload-into-a-recipe",
        reason="3.5: what a step sends would be part of recipes, as many as there are kinds of steps",
        file=f"{_HPU}/device.py",
        old="        self._execution.flush()\n        return tensor.to(self.torch_device, non_blocking=True)",
        new="        return tensor.to(self.torch_device, non_blocking=True)",
        test=f"{_TRAPS}::test_what_is_sent_to_a_lazy_device_is_no_part_of_an_open_recipe",
    ),
    Mutation(
        trap="forward-left-open",
        reason="4.1: a forward that does not end with a flush is another recipe with all that may follow it",
        file=f"{_HPU}/execution.py",
        old="        result = forward(*tensors)\n        self.flush()\n",
        new="        result = forward(*tensors)\n",
        test=f"{_TRAPS}::test_a_lazy_forward_is_a_recipe_of_its_own_whatever_surrounds_it",
    ),
    Mutation(
        trap="forward-joins-a-recipe",
        reason="4.1: nor may it begin in the recipe of what came before",
        file=f"{_HPU}/execution.py",
        old="        self.flush()\n        result = forward(*tensors)\n",
        new="        result = forward(*tensors)\n",
        test=f"{_TRAPS}::test_a_lazy_forward_is_a_recipe_of_its_own_whatever_surrounds_it",
    ),
    Mutation(
        trap="adjustment-without-padding",
        reason="3.3: padding belongs to a row that the kernel has to be told of",
        file=f"{_HPU}/attention.py",
        old="rows, batch + 1, shape",
        new="rows, batch, shape",
        test="tests/sim/hpu/test_attention.py::test_blocks_of_nobody_may_hold_anything",
    ),
    Mutation(
        trap="fused-adjustment-without-padding",
        reason="3.3: the same where both kernels work together",
        file=f"{_HPU}/attention.py",
        old="highest, sums, rows, batch + 1, [count",
        new="highest, sums, rows, batch, [count",
        test="tests/sim/hpu/test_attention.py::test_blocks_of_nobody_may_hold_anything",
    ),
    Mutation(
        trap="keys-of-another-dtype",
        reason="BRG: FusedSDPA takes queries, keys and values of one dtype",
        file=f"{_HPU}/attention.py",
        old="    wide = pad(value, (0, missing)) if missing else value",
        new="    wide = pad(value.float(), (0, missing)) if missing else value",
        test="tests/sim/hpu/test_attention.py::test_bfloat16",
    ),
    Mutation(
        trap="pivots-without-their-own",
        reason="3.3: the bridge has index_reduce for amax that includes the target alone",
        file=f"{_HPU}/attention.py",
        old='return pivot.index_reduce_(0, rows, highest, "amax")',
        new='return pivot.index_reduce_(0, rows, highest, "amax", include_self=False)',
        test="tests/sim/hpu/test_attention.py::test_nothing_is_read_by_the_host_and_nothing_runs_on_it",
    ),
    Mutation(
        trap="garbage-in-modules",
        reason="2.2: what a module keeps of a warm-up that launched nothing is garbage for ever",
        file=f"{_HPU}/execution.py",
        old="if left := tensors.changed(self.buffers.alive()):",
        new="if left := []:",
        test=f"{_TRAPS}::test_what_a_module_keeps_of_a_warm_up_that_only_compiled_is_refused",
    ),
)
