"""Reading collectives from the texts of programs, of several compilers."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist import collectives
from jdist.collectives import _traffic
from jdist.profiling import _hlo

Collective = _traffic.Collective

# Cut from programs of jax 0.10.2 (groups as lists) and 0.12.0.1 (by names).
WITH_LISTS = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%region_0.0 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main.4_spmd (param: f32[1,4], param.1: f32[1,2,4]) -> f32[4] {
  %param = f32[1,4]{1,0} parameter(0)
  %param.1 = f32[1,2,4]{2,1,0} parameter(1)
  %all-reduce.2 = (f32[1,4]{1,0}, f32[1,2,4]{2,1,0}) all-reduce(%param, %param.1), channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true, to_apply=%region_0.0, metadata={op_name="jit(step)/psum"}
  %gte = f32[1,4]{1,0} get-tuple-element(%all-reduce.2), index=0
  ROOT %all-reduce.3 = f32[1,4]{1,0} all-reduce(%gte), channel_id=2, replica_groups=[1,4]<=[4], to_apply=%region_0.0
}
"""  # noqa: E501
WITH_NAMES = WITH_LISTS.replace(
  "{{0,2},{1,3}}", "mesh['worker'=2,'fsdp'=2] {'worker'}"
).replace("[1,4]<=[4]", "mesh['worker'=2,'fsdp'=2] {'worker','fsdp'}")

# As compilers for GPUs write: started and done, in a conditional, in a loop.
ASYNCHRONOUS = """\
HloModule jit_step

%rare (p: (bf16[8,4])) -> bf16[64,4] {
  %p = (bf16[8,4]{1,0}) parameter(0)
  %x.1 = bf16[8,4]{1,0} get-tuple-element(%p), index=0
  %start.1 = (bf16[8,4]{1,0}, bf16[64,4]{1,0}) all-gather-start(%x.1), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %done.1 = bf16[64,4]{1,0} all-gather-done(%start.1)
}

%never (q: (bf16[8,4])) -> bf16[64,4] {
  %q = (bf16[8,4]{1,0}) parameter(0)
  ROOT %zero = bf16[64,4]{1,0} constant({...})
}

%body (r: (s32[], u8[100])) -> (s32[], u8[100]) {
  %r = (s32[], u8[100]{0}) parameter(0)
  %u = u8[100]{0} get-tuple-element(%r), index=1
  %perm = (u8[100]{0}, u8[100]{0}) collective-permute-start(%u), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %perm-done = u8[100]{0} collective-permute-done(%perm)
  %i = s32[] get-tuple-element(%r), index=0
  ROOT %t = (s32[], u8[100]{0}) tuple(%i, %perm-done)
}

%cond.2 (s: (s32[], u8[100])) -> pred[] {
  %s = (s32[], u8[100]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: bf16[8,4], flag: pred[], loop: (s32[], u8[100])) -> bf16[64,4] {
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %flag = pred[] parameter(1)
  %loop = (s32[], u8[100]{0}) parameter(2)
  %start.2 = bf16[8,4]{1,0} all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
  %done.2 = bf16[8,4]{1,0} all-reduce-done(%start.2)
  %while = (s32[], u8[100]{0}) while(%loop), condition=%cond.2, body=%body
  %tuple = (bf16[8,4]{1,0}) tuple(%done.2)
  ROOT %c = bf16[64,4]{1,0} conditional(%flag, %tuple, %tuple), true_computation=%rare, false_computation=%never
}
"""  # noqa: E501


@pytest.mark.smoke
@pytest.mark.parametrize(
  "text", [WITH_LISTS, WITH_NAMES], ids=["lists", "names"]
)
def test_merged_reductions_are_read_with_their_groups(text):
  assert _hlo.read_collectives(text) == (
    Collective("all-reduce", 16 + 32, num_workers=2),
    Collective("all-reduce", 16, num_workers=4),
  )


def test_started_collectives_loops_and_conditionals_are_read():
  assert _hlo.read_collectives(ASYNCHRONOUS) == (
    Collective("all-gather", 64, num_workers=8, conditional=True),
    Collective("permute", 100, num_workers=4),
    Collective("all-reduce", 64, num_workers=8),
  )


def test_program_without_collectives_has_none():
  step = jax.jit(lambda x: x + 1).lower(np.zeros(3, np.float32)).compile()
  assert _hlo.read_collectives(step) == ()
  assert _hlo.read_collectives(step.as_text()) == ()


def test_groups_are_read_on_a_2x2_mesh():
  """By lists or by names, whichever this version of JAX writes."""
  mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"), jax.devices()[:4])
  team = collectives.workers(2, mesh=mesh)
  x = team.replicate(np.ones((4, 6), np.float32), PartitionSpec("fsdp"))
  step = team.jit(lambda x: collectives.mean(x, team.axis))
  assert _hlo.read_collectives(step.lower(x).compile()) == (
    Collective("all-reduce", 2 * 6 * 4, num_workers=2),
  )


def test_phase_of_a_branch_is_read_and_the_entry_may_be_first():
  path = "jit(step)/cond/branch_0_fun/jdist_phase_from_2_to_5/psum"
  named = f'dimensions={{0}}, metadata={{op_name="{path}"}}'
  text = ASYNCHRONOUS.replace("dimensions={0}", named)
  head, entry = text.split("ENTRY")
  text = head.replace("jit_step\n", f"jit_step\n\nENTRY{entry}")
  found = _hlo.read_collectives(text)
  assert [x.phase for x in found if x.conditional] == [collectives.Phase(2, 5)]
  assert [x.payload_bytes for x in found] == [64, 64, 100]


def test_numbers_of_operands_are_no_names():
  text = ASYNCHRONOUS.replace(
    "tuple(%i, %perm-d", "tuple(%i, /*index=1*/%perm-d"
  )
  root = _hlo.parse(text).instructions["t"]
  assert root.operands == ("i", "perm-done")
