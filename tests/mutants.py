"""`make mutants`: one-line faults, each of which must turn a named test red. A fault that no test sees is a hole.

Each is put into a copy of the tracked files, never into the checkout. First the named tests must pass without one.
`python tests/mutants.py WORD ...` tries only the faults whose name holds one of the words.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
LIMIT_S = 400
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that it did not run the tests


class Fault(NamedTuple):
    """What is broken: in `file`, `old` (there exactly once) becomes `new`; `test` must fail then."""

    name: str
    file: str
    old: str
    new: str
    test: str


RING = "tests/test_ring.py::test_ring_equals_the_reference"
FAULTS = [
    Fault(
        "dlse dropped", "ringflash/kernels/eager.py",
        "return total if dlse is None else total - dlse.float()", "return total",
        "tests/test_kernels.py::test_either_result_alone_carries_its_gradient[eager-lse]",
    ),
    Fault(
        "local instead of global lse in the backward", "ringflash/kernels/eager.py",
        "weights = scores.sub_(b_lse).exp_()", "weights = scores.softmax(-1).nan_to_num()",
        f"{RING}[causal-4-zigzag]",
    ),
    Fault(
        "delta per hop", "ringflash/kernels/eager.py",
        "(b_dout @ b_v.mT).sub_(b_delta)",
        "(b_dout @ b_v.mT).sub_((weights * (b_dout @ b_v.mT)).sum(-1, keepdim=True))",
        f"{RING}[causal-4-zigzag]",
    ),
    Fault(
        "dk, dv not sent home", "ringflash/travel.py",
        "torch.add(x, y, out=", "torch.add(x, 0.0 * y, out=",
        f"{RING}[causal-3-contiguous]",
    ),
    Fault(
        "a rest of the own block that is never computed", "ringflash/routes.py",
        "*route.visits[1:], replace(own, part=REST))", "*route.visits[1:])",
        "tests/test_ring.py::test_two_lanes_change_nothing[causal-zigzag-keys-2]",
    ),
    Fault(
        "the second lane adds to what nobody wrote", "ringflash/ring.py",
        "adds=lane not in self._new", "adds=len(self._new) < 2",
        "tests/test_ring.py::test_two_lanes_change_nothing[causal-zigzag-queries-3]",
    ),
    Fault(
        "sums of one lane alone are passed on", "ringflash/travel.py",
        "for lane in self._lanes.all if is_new or others else ():", "for lane in self._lanes.all[:1]:",
        "tests/test_ring.py::test_two_lanes_change_nothing[causal-zigzag-queries-3]",
    ),
    Fault(
        "the second lane begins before its tensors are there", "ringflash/lanes.py",
        "stream.wait_stream(torch.cuda.current_stream(self._device))", "pass",
        "tests/test_lanes.py::test_no_stream_reads_or_writes_too_early[gather-balanced-causal-keys-torch.float32]",
    ),
    Fault(
        "gradients are taken before the second lane is done", "ringflash/lanes.py",
        "torch.cuda.current_stream(self._device).wait_stream(stream)", "pass",
        "tests/test_lanes.py::test_no_stream_reads_or_writes_too_early[ring-zigzag-causal-keys-torch.float32]",
    ),
    Fault(
        "the second lane reads what has not arrived", "ringflash/lanes.py",
        "with torch.cuda.stream(stream):", "with nullcontext():",
        "tests/test_lanes.py::test_no_stream_reads_or_writes_too_early[ring-zigzag-causal-keys-torch.float32]",
    ),
    Fault(
        "messages leave before the second lane has written them", "ringflash/lanes.py",
        "beside(self._device, self._others)", "beside(self._device, [])",
        "tests/test_lanes.py::test_no_stream_reads_or_writes_too_early[ring-zigzag-causal-keys-torch.float32]",
    ),
    Fault(
        "sums in memory in which the first lane still works", "ringflash/travel.py",
        "Pool(totals, shape, fp32, self._device, lanes.follow)", "Pool(totals, shape, fp32, self._device)",
        "tests/test_lanes.py::test_no_stream_reads_or_writes_too_early[ring-zigzag-documents_window-keys-torch.float32]",
    ),
    Fault(
        "the rest of the own block under no message", "ringflash/routes.py",
        "*route.visits[1:], replace(own, part=REST))", "replace(own, part=REST), *route.visits[1:])",
        "tests/test_ring.py::test_the_last_gradients_come_home_under_what_the_second_lane_has_left",
    ),
    Fault(
        "messages of long ago are waited for", "train/watch.py",
        "not (_is_over(entry) or _is_batched(entry))", "not _is_over(entry)",
        "tests/test_failures.py::test_a_message_of_a_batch_that_is_over_is_not_waited_for",
    ),
    Fault(
        "state rounded to bf16 each hop", "ringflash/ring.py",
        "acc = out if q.dtype == torch.float32 else", "acc = out if True else",
        "tests/test_ring.py::test_the_error_of_bf16_does_not_grow_with_the_ring[zigzag-0]",
    ),
    Fault(
        "top-left alignment", "ringflash/mask.py",
        "np.arange(num_queries, dtype=np.int64) + (num_keys - num_queries)", "np.arange(num_queries, dtype=np.int64)",
        "tests/test_mask.py::test_R39_row_0_of_2_sees_4_of_5_keys",
    ),
    Fault(
        "window ignored in one layer", "ringflash/hf.py",
        'window=given.get("sliding_window"),', 'window=given.get("sliding_window") if module.layer_idx else None,',
        "tests/test_hf.py::test_R34_R116_a_model_over_a_ring_is_the_model_on_one_process[mistral-one]",
    ),
    Fault(
        "documents joined at a shard border", "ringflash/ops.py",
        "cu_seqlens=borders,",
        "cu_seqlens=None if borders is None else np.array([x for i, x in enumerate(borders)"
        " if not i or x % (num_queries // 4) or x == num_queries], np.int32),",
        "tests/test_world.py::test_every_mask_over_4_processes[contiguous]",
    ),
    Fault(
        "sums forget where they have been", "ringflash/routes.py",
        "self.carried[leg.sink] |= self.carried[i]", "pass",
        f"{RING}[causal-3-contiguous]",
    ),
    Fault(
        "a needless hop", "ringflash/routes.py",
        "hops = [hop for hop in range(geometry.size) if needs.at(geometry, hop).any()]",
        "hops = list(range(geometry.size))",
        "tests/test_routes.py::test_hops_and_work_are_those_that_some_rank_needs[window-8-contiguous]",
    ),
    Fault(
        "rows travel that no later hop needs", "ringflash/routes.py",
        "self.kept[leg.parent] |= self.kept[i]", "self.kept[leg.parent][:] = True",
        "tests/test_routes.py::test_rows_that_travel_are_those_that_the_rest_of_the_way_needs_row_by_row"
        "[causal-keys-contiguous]",
    ),
    Fault(
        "whatever moves more bytes rotates", "ringflash/routes.py",
        "what, down = min(ways, key=cost)", "what, down = max(ways, key=cost)",
        "tests/test_routes.py::test_what_rotates_is_what_the_closed_form_says",
    ),
    Fault(
        "dk, dv of the last queries that came", "ringflash/ring.py",
        "adds=lane not in self._new", "adds=False",
        "tests/test_arrangements.py::test_queries_that_travel_give_the_same_gradients[causal-zigzag]",
    ),
    Fault(
        "the type on the way ignored", "ringflash/ring.py",
        "Sums(side.own, route, lanes, transit)", "Sums(side.own, route, lanes, torch.float32)",
        "tests/test_arrangements.py::"
        "test_gradients_in_bf16_on_the_way_cost_what_was_measured_and_only_those_that_travel",
    ),
    Fault(
        "the next node asked for when its round begins", "ringflash/arrangements.py",
        "parent = i - 1 if i > first else (head if outer else HOME)", "parent = i - 1 if i else HOME",
        "tests/test_routes.py::test_a_double_ring_asks_for_the_next_node_a_whole_round_ahead",
    ),
    Fault(
        "rows of several runs out of order", "ringflash/travel.py",
        "x.index_copy_(0, rows.index(x.device), values)", "x.index_copy_(0, rows.index(x.device).flip(0), values)",
        "tests/test_arrangements.py::test_arrangements_equal_the_reference[gather-None-causal-striped-keys]",
    ),
    Fault(
        "pieces of a message in another order than its rows", "ringflash/gathering.py",
        "zip(message.pieces, coming", "zip(message.pieces[::-1], coming",
        "tests/test_arrangements.py::test_arrangements_equal_the_reference[gather-None-causal-zigzag-queries]",
    ),
    Fault(
        "of several ranks that send the same rows home one is added", "ringflash/gathering.py",
        "room.sum(0, dtype=torch.float32) if others else room[0]", "room[0]",
        "tests/test_arrangements.py::test_arrangements_equal_the_reference[gather-None-causal-zigzag-queries]",
    ),
    Fault(
        "what comes home of a section is never added", "ringflash/gathering.py",
        "        if returned:\n            returned.finish()\n", "",
        "tests/test_arrangements.py::test_arrangements_equal_the_reference[gather-None-causal-zigzag-queries]",
    ),
    Fault(
        "a section is computed before its rows are here", "ringflash/gathering.py",
        """                for each in pending:
                    each.wait()
                for room, message in loose:
""",
        "                for room, message in loose:\n",
        "tests/test_lanes.py::test_no_stream_reads_or_writes_too_early[gather-balanced-causal-keys-torch.float32]",
    ),
    Fault(
        "steps that go on where the rows of one block do not", "ringflash/moving.py",
        "ends = [np.append(0, each.runs[:, 1].cumsum()) for each in (there, here)]",
        "ends = [np.append(0, each.runs[:, 1].cumsum()) for each in (there, there)]",
        "tests/test_moving.py::test_steps_are_all_rows_of_both_blocks_once_in_order[runs that end apart]",
    ),
    Fault(
        "of several sums for the same rows a kernel adds one", "ringflash/kernels/triton/moving_kernels.py",
        "for i_next in range(1, count):", "for i_next in range(1, 1):",
        "tests/test_moving.py::"
        "test_what_comes_home_is_added_in_order_and_rounded_once[torch.float32-torch.float32-1-one run]",
    ),
    Fault(
        "rows behind the end of a step are written", "ringflash/kernels/triton/moving_kernels.py",
        "mask = m_row[:, None] & (o_column < num_columns)[None, :]\n    o_column = o_column.to(tl.int64)\n    p_x",
        "mask = (o_column < num_columns)[None, :] | m_row[:, None]\n    o_column = o_column.to(tl.int64)\n    p_x",
        "tests/test_moving.py::test_rows_are_copied_into_a_block_and_no_other_byte_of_it[keys-1-runs that end apart]",
    ),
    Fault(
        "a table found by an id that other rows may get", "ringflash/needs.py",
        "at = key, weakref.ref(other)", "at = key, id(other)",
        "tests/test_moving.py::test_a_table_is_never_that_of_rows_that_are_gone",
    ),
    Fault(
        "more batch entries than a grid has", "ringflash/kernels/triton/moving.py",
        "return entries <= MAX_ENTRIES and", "return",
        "tests/test_moving.py::test_more_programs_than_a_grid_has_are_left_to_torch[shape1-False]",
    ),
    Fault(
        "own documents computed on a stream that nobody waits for", "ringflash/lanes.py",
        "streams = [*(lane.stream for lane in lanes), second]", "streams = [lane.stream for lane in lanes]",
        "tests/test_lanes.py::test_documents_of_one_rank_beside_a_single_section[documents-keys]",
    ),
    Fault(
        "rows of another view that a tile seems to see", "ringflash/routes.py",
        "np.where(sees, hi, point)", "np.where(sees, hi, lo)",
        "tests/test_routes.py::test_two_visits_of_a_gather_share_the_own_rows[random-keys]",
    ),
    Fault(
        "keys of another view set to 0", "ringflash/kernels/triton/launch.py",
        "some = adds or view.shares_keys", "some = adds",
        "tests/test_kernel_triton.py::test_views_that_share_rows_leave_each_other_alone[random-zigzag-queries]",
    ),
    Fault(
        "a part of the sequence that one rank begins and another ends taken for undivided", "ringflash/needs.py",
        "held = end <= ends[", "held = begin < ends[",
        "tests/test_routes.py::test_what_is_undivided_sees_nothing_of_other_ranks_and_is_seen_by_none[documents-zigzag]",
    ),
    Fault(
        "packed rows let go before they have gone", "ringflash/gathering.py",
        "return Asked(loan, pending, loose, sends)", "return Asked(loan, pending, loose, [])",
        "tests/test_lanes.py::test_a_gather_waits_for_what_it_packs_and_keeps_it_until_it_has_gone[full-zigzag-0-keys]",
    ),
    Fault(
        "gathered rows that lie between own ones left out of the block", "ringflash/routes.py",
        "block = np.union1d(own[~apart], walk.here(travel.kept, 0))", "block = own[~apart]",
        "tests/test_arrangements.py::test_arrangements_equal_the_reference[gather-None-causal-zigzag-queries]",
    ),
    Fault(
        "auto looks at the time alone", "ringflash/fitting.py",
        "min(even, key=rows.__getitem__)", "min(times, key=times.__getitem__)",
        "tests/test_arrangements.py::test_auto_takes_the_layout_that_suits_the_masks",
    ),
    Fault(
        "wait before the kernel", "ringflash/travel.py",
        "            yield visit, self._record.read(block.buffer[: visit.count])\n",
        """            for posted in self._posted.pop(i + 1, []):
                self._arrive(i + 1, posted)
            yield visit, self._record.read(block.buffer[: visit.count])
""",
        "tests/test_ring.py::test_blocks_are_posted_before_the_kernel_and_gradients_travel_under_the_next_one",
    ),
    Fault(
        "unshard's backward not summed", "ringflash/layout.py",
        "scatter(mine, ranks.float().contiguous(), group=ring.group, async_op=True)",
        "mine.copy_(ranks.chunk(ring.size)[ring.rank]) is mine and dist.barrier(ring.group, async_op=True)",
        "tests/test_layouts.py::test_R37_unshard_is_the_inverse_of_shard_and_its_gradient_is_summed[4-1-zigzag]",
    ),
    Fault(
        "loss scaled by the ring", "train/engine.py",
        "self._num_ranks = world.size", "self._num_ranks = world.size * world.ring.size",
        "tests/test_train.py::test_layouts_train_alike[striped]",
    ),
    Fault(
        "labels shifted after the cut", "train/loop.py",
        "layout.shard(labels), layout)",
        "torch.where(layout.shard(labels) < 0, -100, layout.shard(ids).roll(-1, 1)), layout)",
        "tests/test_train.py::test_layouts_train_alike[striped]",
    ),
    Fault(
        "open sequences left out of the state", "train/data/packing.py",
        "for piece in b.pieces] for b in self._open]", "for piece in b.pieces] for b in self._open[1:]]",
        "tests/test_data_state.py::test_R81_nothing_that_waits_in_the_packer_is_lost",
    ),
    Fault(
        "state of what was read ahead", "train/data/stream.py",
        "return self._state", "return self._cursor.state()",
        "tests/test_data_state.py::test_R78_a_resume_at_every_sequence[True]",
    ),
    Fault(
        "answers one token late", "train/data/tokens.py",
        "np.append(answers[1:], False)", "answers",
        "tests/test_data_sources.py::test_a_conversation_trains_on_the_answers_alone[jsonl]",
    ),
    Fault(
        "a save that copies nothing", "train/saver.py",
        "part=self._host[piece.key]", "part=piece.part",
        "tests/test_resume.py::test_steps_go_on_beside_the_writing_and_its_failure_ends_them_on_all_ranks",
    ),
    Fault(
        "step of one group loaded", "train/partitions.py",
        "for other in steps[1:]:", "for other in ():",
        "tests/test_resume.py::test_R82_R83_another_mesh_number_of_processes_and_stage_go_on[1]",
    ),
    Fault(
        "gradient of empty rows NaN", "ringflash/kernels/eager.py",
        "b_lse = b_lse.masked_fill(b_lse == -torch.inf, torch.inf)", "b_lse = b_lse",
        "tests/test_kernels.py::test_R17_rows_without_keys_put_no_nan_into_the_gradients_of_the_others[eager]",
    ),
    Fault(
        "sub-group rank used as global", "ringflash/exchange.py",
        "dist.P2POp(start, tensor, group=group, group_peer=self.members[peer])",
        "dist.P2POp(start, tensor, self.members[peer], group=group)",
        "tests/test_world.py::test_R25_sub_groups_are_rings_of_their_own",
    ),
    Fault(
        "ring run again in recompute", "train/checkpointing.py",
        "return self._attention.of(self._calls - 1, last=self._last)", "return op(*args, **(kwargs or {}))",
        "tests/test_model_memory.py::test_R33_rings_that_a_layer_runs_forward",
    ),
    Fault(
        "host memory taken anew in each step", "train/host_memory.py",
        "self._free[len(buffer)].append(buffer)", "pass",
        "tests/test_checkpointing.py::test_every_switch_gives_the_same_bits_in_every_step",
    ),
    Fault(
        "states of a group made from the layer itself", "train/checkpointing.py",
        "self._here = self._below.next_states()", "self._here = self._below.look()",
        "tests/test_checkpointing.py::test_every_switch_gives_the_same_bits_in_every_step",
    ),
    Fault(
        "norm of another module's backward without its weights at ZeRO 3", "train/tiling.py",
        "weight.data = copy", "pass",
        "tests/test_train.py::test_switches_of_memory_change_no_bit_and_tiles_hardly_any[3]",
    ),
    Fault(
        "what became of normalised states taken for them", "train/tiling.py",
        "x.storage_offset(), x._version", "x.storage_offset(), 0",
        "tests/test_tiling.py::test_what_is_not_what_the_norm_returned_is_kept_as_it_is",
    ),
    Fault(
        "peak looked for at the ends of the backward alone", "train/memory.py",
        "max(turns(sizes, step), key", "max((sizes.layers, 1), key",
        "tests/test_backward_memory.py::test_the_peak_is_at_the_layer_that_holds_most",
    ),
    Fault(
        "gradients of a whole partition kept on the GPU", "train/host_update.py",
        "waiting.pop(outer.get_param_id(parameter), None)", "pass",
        "tests/test_host_update.py::test_no_gradient_stays_on_the_gpu",
    ),
    Fault(
        "each piece of an update a step of its own", "train/host_update.py",
        """[state["step"].clone() for _ in weights]""", """[state["step"]] * len(weights)""",
        "tests/test_host_update.py::test_an_update_in_pieces_has_the_bits_of_the_whole",
    ),
    Fault(
        "states of the next group back a group too early", "train/checkpointing.py",
        "(self._here,) = self.kept.get()", "(self._here,), _ = self.kept.get(), self.kept.fetch_next()",
        "tests/test_backward_memory.py::test_what_each_layer_holds_is_what_is_planned",
    ),
    Fault(
        "deterministic ignored by the op", "ringflash/ops.py",
        "scale=scale, deterministic=deterministic, rounded", "scale=scale, deterministic=False, rounded",
        "tests/test_choice.py::test_deterministic_reaches_the_kernel",
    ),
    Fault(
        "deterministic ignored by the ring", "ringflash/ring.py",
        "scale=scale, deterministic=deterministic)", "scale=scale, deterministic=False)",
        "tests/test_choice.py::test_deterministic_reaches_the_kernel",
    ),
    Fault(
        "deterministic ignored by the kernel", "ringflash/kernels/gluon/__init__.py",
        "if deterministic or columns", "if columns",
        "tests/test_kernel_gluon.py::test_gradients_that_must_repeat_are_summed_in_one_order",
    ),
    Fault(
        "deterministic algorithms of torch ignored", "ringflash/api.py",
        " or torch.are_deterministic_algorithms_enabled()", "",
        "tests/test_choice.py::test_deterministic_algorithms_of_torch_reach_the_kernel",
    ),
    Fault(
        "a rank refuses a mask alone", "ringflash/ops.py",
        "call.agree(call.refusal())", 'call.agree("")',
        "tests/test_world.py::test_a_mask_that_one_rank_s_kernel_refuses_is_refused_on_every_rank",
    ),
    Fault(
        "another memory order than the compiler was told", "ringflash/ring.py",
        "dq = fill(q.shape, dtype=q.dtype, device=q.device)", "dq = fill(q.mT.shape, dtype=q.dtype).mT",
        "tests/test_op.py::test_opcheck[causal]",
    ),
    Fault(
        "a sequence that fills up the rings is counted twice", "train/evaluation/score.py",
        "np.full_like(like.sequence.labels, IGNORED), [0, 1]", "like.sequence.labels, like.sequence.cu_seqlens",
        "tests/test_evaluation.py::test_R67_an_evaluation_over_a_mesh_is_that_of_one_process[(4, 1, 1)-0]",
    ),
    Fault(
        "a position on a border counts for the range below", "train/evaluation/evaluator.py",
        'side="right"', 'side="left"',
        "tests/test_evaluation.py::test_R67_an_evaluation_over_a_mesh_is_that_of_one_process[(4, 1, 1)-0]",
    ),
    Fault(
        "an evaluation is not left for a signal", "train/evaluation/score.py",
        "if facts[:, 2].any():", "if False:",
        "tests/test_evaluation.py::"
        "test_training_is_bitwise_the_same_with_evaluations_and_a_checkpoint_evaluates_alike[3]",
    ),
    Fault(
        "a restart forgets what its job saved", "train/resume.py",
        "        if restarted:  #", "        if False:  #",
        "tests/test_resume.py::test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks",
    ),
    Fault(
        "adapters go on beside any base", "train/resume.py",
        "if base is None or saved == base or", "if True or",
        "tests/test_export.py::test_adapters_go_on_beside_their_base_wherever_it_is_and_beside_no_other",
    ),
    Fault(
        "a kernel's refusal stays on its rank", "ringflash/ops.py",
        "self.refused = str(error)", "raise",
        "tests/test_world.py::"
        "test_a_kernel_that_refuses_on_one_rank_is_refused_on_every_rank_with_its_name_and_reason",
    ),
    Fault(
        "slurm sees torchrun's exit code", "launch/node.py",
        "return ending.code", "return 1",
        "tests/test_schedulers.py::test_a_node_ends_with_what_its_ranks_say[slurm]",
    ),
    # found while the tests were written
    Fault(
        "fp32 products cast under autocast", "ringflash/ops.py",
        "return torch.autocast(q.device.type, enabled=False) if on else", "return contextlib.nullcontext() if on else",
        "tests/test_op.py::test_R13_under_autocast_inputs_are_cast_and_gradients_come_back_in_their_own_type",
    ),
    Fault(
        "bounds fall behind intervals that reach into the padding", "ringflash/mask.py",
        "lo = np.minimum(lo, used)", "lo = lo.copy()",
        "tests/test_mask.py::test_neither_bound_ever_falls",
    ),
    Fault(
        "a key tile visits the padding", "ringflash/mask.py",
        "sees_some = lo_first < hi_last", "sees_some = lo_first <= hi_last",
        "tests/test_mask.py::test_a_key_tile_does_not_visit_the_padding_behind_it",
    ),
    Fault(
        "a call that was refused counts as agreed", "ringflash/agreement.py",
        "    agreed.turns += 1\n", "    agreed.turns += 1\n    agreed.texts[text] = None\n",
        "tests/test_world.py::test_ranks_called_with_different_arguments_all_raise_and_name_the_odd_one",
    ),
    Fault(
        "another number of documents compiles anew", "ringflash/group.py",
        "torch._dynamo.maybe_mark_dynamic(x, 0)", "pass",
        "tests/test_op.py::test_one_compilation_serves_every_batch_of_documents",
    ),
    Fault(
        "a ring over nodes predicted at the speed of a node", "ringflash/suggesting.py",
        "rate = problem.link if problem.nodes == 1 else problem.network", "rate = problem.link",
        "tests/test_suggest.py::test_a_double_ring_hides_the_network_behind_rounds",
    ),
    Fault(
        "documents over ranks beside each other", "ringflash/layouts/documents.py",
        "where[:, None] + stride * np.arange(size)[None]", "where[:, None] * size + np.arange(size)[None]",
        "tests/test_makespan.py::test_hops_of_packed_documents_are_even",
    ),
    Fault(
        "nobody waits for the rank below", "ringflash/makespan.py",
        "peers = np.maximum(before[(rank - jump) % size], before[(rank + jump) % size])",
        "peers = before[(rank + jump) % size]",
        "tests/test_makespan.py::test_a_hop_begins_when_the_neighbours_have_begun_the_one_before",
    ),
    Fault(
        "the gradient of a sink has the other sign", "ringflash/ops.py",
        "return -(weight * own).sum((0, 2))", "return (weight * own).sum((0, 2))",
        "tests/test_sinks_softcap.py::test_one_device_equals_the_reference[sinks-causal]",
    ),
    Fault(
        "Ulysses ranks take the sinks of the first heads", "ringflash/ops.py",
        "x.chunk(self.heads.size)[self.heads.rank]", "x.chunk(self.heads.size)[0]",
        "tests/test_sinks_softcap.py::test_ulysses_gives_each_rank_the_sinks_of_its_heads",
    ),
    Fault(
        "the slope of capped scores left out", "ringflash/kernels/eager.py",
        "dscores *= slope", "pass",
        "tests/test_sinks_softcap.py::test_one_device_equals_the_reference[softcap-causal]",
    ),
    Fault(
        "the slope of capped scores left out of triton's dq", "ringflash/kernels/triton/backward_kernels.py",
        "b_ds = b_p * (b_dp - b_delta[:, None])\n    if CAP:", "b_ds = b_p * (b_dp - b_delta[:, None])\n    if False:",
        "tests/test_kernel_triton.py::test_capped_scores[0.5-0.3]",
    ),
]  # fmt: skip


def copy(folder: Path) -> None:
    """The files of the checkout that git does not ignore, as they are."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]:
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((REPO / name).read_bytes())


def pytest(folder: Path, *tests: str) -> tuple[int, str]:
    """Run tests in the copy; the exit code, or FAILED if they hang, and what pytest said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return FAILED, f"not done within {LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def outcome(folder: Path, fault: Fault) -> str:
    """red: the test saw the fault. Anything else is a hole."""
    path = folder / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        return f"NOT APPLIED: the old text is there {source.count(fault.old)} times"
    path.write_text(source.replace(fault.old, fault.new))
    code, _ = pytest(folder, fault.test)
    path.write_text(source)
    return {FAILED: "red", PASSED: "SURVIVED"}.get(code, f"NOT RUN: pytest ended with {code}")


def main(words: list[str]) -> int:
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(folder)
        code, said = pytest(folder, *sorted({fault.test for fault in faults}))
        if code != PASSED:
            print(f"{said}\nthe named tests do not pass without a fault")
            return 1
        holes = 0
        for fault in faults:
            began = time.monotonic()
            result = outcome(folder, fault)
            holes += result != "red"
            print(
                f"{result:<10} {time.monotonic() - began:5.0f} s  {fault.name:<60} {fault.test.split('::')[-1]}",
                flush=True,
            )
    print(f"{len(faults) - holes} of {len(faults)} faults are seen")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
