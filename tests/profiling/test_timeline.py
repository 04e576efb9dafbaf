"""Orders of programs read from texts that XLA made for GPUs, shortened."""

import pytest

from jdist.profiling import _timeline

# One of each: a product in a fusion, a library's product, the three
# convolutions of a layer, an asynchronous all-reduce around two of them, a
# synchronous one, a conditional, a loop.
_TEXT = """HloModule jit_step, is_scheduled=true

%product (a: bf16[16,32], b: bf16[32,8]) -> bf16[16,8] {
  %a = bf16[16,32]{1,0} parameter(0)
  %b = bf16[32,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[16,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}
}

%rare (q: f32[10]) -> f32[10] {
  %q = f32[10]{0} parameter(0)
  ROOT %all-reduce.9 = f32[10]{0} all-reduce(%q), replica_groups={{0,1,2,3}}
}

%often (r: f32[10]) -> f32[10] {
  %r = f32[10]{0} parameter(0)
  ROOT %copy.9 = f32[10]{0} copy(%r)
}

%body (s: f32[10]) -> f32[10] {
  %s = f32[10]{0} parameter(0)
  ROOT %negate.9 = f32[10]{0} negate(%s)
}

ENTRY %main (x: bf16[16,32], w: bf16[32,8], i: f32[2,8,8,3]) -> f32[10] {
  %x = bf16[16,32]{1,0} parameter(0)
  %w = bf16[32,8]{1,0} parameter(1)
  %i = f32[2,8,8,3]{3,2,1,0} parameter(2)
  %k = f32[4,3,3,3]{3,2,1,0} constant({...})
  %v = f32[10]{0} constant({...})
  %all-reduce-start = bf16[16,32]{1,0} all-reduce-start(%x), replica_groups=[1,8]<=[8]
  %gemm = bf16[16,8]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  %lib = (bf16[16,8]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %all-reduce-done = bf16[16,32]{1,0} all-reduce-done(%all-reduce-start)
  %out = (f32[2,8,8,4]{3,2,1,0}, u8[0]{0}) custom-call(%i, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %g = f32[2,8,8,4]{3,2,1,0} get-tuple-element(%out), index=0
  %bw = (f32[2,8,8,3]{3,2,1,0}, u8[0]{0}) custom-call(%g, %k), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %bf = (f32[4,3,3,3]{3,2,1,0}, u8[0]{0}) custom-call(%i, %g), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %all-reduce.2 = f32[10]{0} all-reduce(%v), replica_groups={{0,1},{2,3}}
  %flag = pred[] constant(true)
  %cond = f32[10]{0} conditional(%flag, %v, %v), true_computation=%rare, false_computation=%often
  ROOT %loop = f32[10]{0} while(%cond), condition=%often, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_events_are_in_program_order():
  events = _timeline.read_timeline(_TEXT)
  assert [(event.kind, event.name) for event in events] == [
    ("start", "all-reduce-start"),
    ("compute", "gemm"),
    ("compute", "lib"),
    ("done", "all-reduce-start"),
    ("compute", "out"),
    ("compute", "bw"),
    ("compute", "bf"),
    # Synchronous: nothing runs at the same time.
    ("start", "all-reduce.2"),
    ("done", "all-reduce.2"),
    # Of the conditional, the branch that sends.
    ("start", "all-reduce.9"),
    ("done", "all-reduce.9"),
    *[("compute", "negate.9")] * 3,
  ]


def test_start_in_line_is_not_hidden():
  start = "replica_groups=[1,8]<=[8]\n"
  assert start in _TEXT
  marked = (
    start.strip()
    + ', backend_config={"collective_backend_config":{"is_sync":true}}\n'
  )
  events = _timeline.read_timeline(_TEXT.replace(start, marked))
  assert [event.kind for event in events][:3] == ["start", "done", "compute"]
  assert len(events) == len(_timeline.read_timeline(_TEXT))


def test_idle_step_takes_the_other_branch():
  events = _timeline.read_timeline(_TEXT, branch="idles")
  names = [event.name for event in events]
  assert "copy.9" in names and "all-reduce.9" not in names


# Neither branch sends, and each computes or moves more than the other.
_IDLE = """HloModule jit_step, is_scheduled=true

%product (a: f32[4,4], b: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  ROOT %dot = f32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%computes (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %gemm = f32[4,4]{1,0} fusion(%p, %p), kind=kCustom, calls=%product
}

%moves (q: f32[4,4]) -> f32[4,4] {
  %q = f32[4,4]{1,0} parameter(0)
  %wide = f32[SIZE]{0} broadcast(%q), dimensions={}
  ROOT %narrow = f32[4,4]{1,0} slice(%wide), slice={[0:4]}
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %flag = pred[] constant(true)
  ROOT %cond = f32[4,4]{1,0} conditional(%flag, %x, %x), true_computation=%computes, false_computation=%moves
}
"""


@pytest.mark.parametrize(
  # 312 bytes and no operation, and then 592, against 192 and 128 operations.
  ("size", "names"),
  [(30, ["gemm"]), (100, ["wide", "narrow"])],
)
def test_branches_that_do_not_send_weigh_operations_and_bytes(size, names):
  events = _timeline.read_timeline(_IDLE.replace("SIZE", str(size)))
  assert [x.name for x in events] == names


# As streaming has it: a slice of a large array is sent, and written into
# another one in place.
_SLICES = """HloModule jit_step, is_scheduled=true

%take (b: f32[1,1000], i: s32[]) -> f32[1,10] {
  %b = f32[1,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %view = f32[1,1000]{1,0} bitcast(%b)
  ROOT %ds = f32[1,10]{1,0} dynamic-slice(%view, %i, %i), dynamic_slice_sizes={1,10}
}

%put (w: f32[1,1000], p: f32[1,10], j: s32[]) -> f32[1,1000] {
  %w = f32[1,1000]{1,0} parameter(0)
  %p = f32[1,10]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %half = f32[1,10]{1,0} multiply(%p, %p)
  ROOT %dus = f32[1,1000]{1,0} dynamic-update-slice(%w, %half, %j, %j)
}

%both (v: f32[1,1000], k: s32[]) -> f32[1,1000] {
  %v = f32[1,1000]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %part = f32[1,10]{1,0} dynamic-slice(%v, %k, %k), dynamic_slice_sizes={1,10}
  %wide = f32[1,1000]{1,0} broadcast(%part), dimensions={0,1}
  ROOT %sum = f32[1,1000]{1,0} add(%v, %wide)
}

ENTRY %main (buffer: f32[1,1000], n: s32[]) -> f32[1,1000] {
  %buffer = f32[1,1000]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %taken = f32[1,10]{1,0} fusion(%buffer, %n), kind=kLoop, calls=%take
  %written = f32[1,1000]{1,0} fusion(%buffer, %taken, %n), kind=kLoop, calls=%put
  %alone = f32[1,10]{1,0} dynamic-slice(%written, %n, %n), dynamic_slice_sizes={1,10}
  %plain = f32[1,1000]{1,0} dynamic-update-slice(%written, %alone, %n, %n)
  %lib = (f32[1,10]{1,0}, s8[4096]{0}) custom-call(%alone), custom_call_target="f"
  ROOT %all = f32[1,1000]{1,0} fusion(%plain, %n), kind=kLoop, calls=%both
}
"""


def test_slices_count_with_their_own_bytes():
  moved = {e.name: e.num_bytes for e in _timeline.read_timeline(_SLICES)}
  index = 4
  assert moved["taken"] == 40 + 40 + index  # Read, written, and where.
  assert moved["written"] == 40 + 40 + index
  assert moved["alone"] == moved["plain"] == 80
  assert moved["lib"] == 80  # Scratch is not counted.
  # Read as a slice and as a whole is read as a whole.
  assert moved["all"] == 4000 + 4000 + index


def test_flops_match_hand_computation():
  flops = {e.name: e.flops for e in _timeline.read_timeline(_TEXT)}
  assert flops["gemm"] == flops["lib"] == 2 * 16 * 32 * 8
  # Every output sample has 3x3 weights of each of 3 features.
  assert (
    flops["out"]
    == flops["bw"]
    == flops["bf"]
    == (2 * (2 * 8 * 8 * 4) * (3 * 3 * 3))
  )
  assert flops["negate.9"] == 0


def test_flops_of_a_convolution_without_a_library():
  (event,) = _timeline.read_timeline("""HloModule jit_step, is_scheduled=true

ENTRY %main (i: f32[2,8,8,3], k: f32[4,3,3,3]) -> f32[2,8,8,4] {
  %i = f32[2,8,8,3]{3,2,1,0} parameter(0)
  %k = f32[4,3,3,3]{3,2,1,0} parameter(1)
  ROOT %out = f32[2,8,8,4]{3,2,1,0} convolution(%i, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f
}
""")
  assert event.flops == 2 * (2 * 8 * 8 * 4) * (3 * 3 * 3)


def test_sent_bytes_match_hand_computation():
  sent = {
    e.name: e.collective for e in _timeline.read_timeline(_TEXT) if e.collective
  }
  first = sent["all-reduce-start"]
  assert (first.payload_bytes, first.num_workers) == (2 * 16 * 32, 8)
  assert not first.conditional
  assert sent["all-reduce.2"].num_workers == 2
  assert sent["all-reduce.9"].conditional


_TWICE = """HloModule jit_step, is_scheduled=true

%halves (v: f32[10], k: s32[]) -> f32[8] {
  %v = f32[10]{0} parameter(0)
  %k = s32[] parameter(1)
  %one = f32[8]{0} dynamic-slice(%v, %k), dynamic_slice_sizes={8}
  %two = f32[8]{0} slice(%v), slice={[2:10]}
  ROOT %sum = f32[8]{0} add(%one, %two)
}

ENTRY %main (x: f32[10], n: s32[]) -> f32[8] {
  %x = f32[10]{0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %found = f32[8]{0} fusion(%x, %n), kind=kLoop, calls=%halves
}
"""


def test_slices_that_overlap_read_an_array_once():
  (event,) = _timeline.read_timeline(_TWICE)
  assert event.num_bytes == 40 + 32 + 4  # Read, written, and where.


def test_view_or_tuple_of_a_slice_is_written_in_place():
  # The root is a view of what was changed, or a pair of it and a small array.
  first = "%put (w: f32[1,1000], p: f32[1,10], j: s32[]) -> f32[1,1000] {"
  assert first in _SLICES
  root = "  ROOT %dus = "
  view = _SLICES.replace(
    "dynamic-update-slice(%w, %half, %j, %j)\n",
    "dynamic-update-slice(%w, %half, %j, %j)\n"
    "  ROOT %seen = f32[1000]{0} bitcast(%dus)\n",
  ).replace(root, "  %dus = ")
  pair = _SLICES.replace(
    "dynamic-update-slice(%w, %half, %j, %j)\n",
    "dynamic-update-slice(%w, %half, %j, %j)\n"
    "  ROOT %t = (f32[1,1000]{1,0}, f32[1,10]{1,0}) tuple(%dus, %half)\n",
  ).replace(root, "  %dus = ")
  for text, more in ((view, 0), (pair, 40)):
    moved = {e.name: e.num_bytes for e in _timeline.read_timeline(text)}
    assert moved["written"] == 40 + 40 + 4 + more


def test_what_takes_no_kernel_or_cannot_be_counted_is_left_out():
  text = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[2,4], w: f32[4,3], p: pred[]) -> f32[2,3] {
  %x = f32[2,4]{1,0} parameter(0)
  %w = f32[4,3]{1,0} parameter(1)
  %p = pred[] parameter(2)
  %copy-start = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[]) copy-start(%x)
  %copy-done = f32[2,4]{1,0} copy-done(%copy-start)
  %gone = f32[2,4]{1,0} conditional(%p, %x, %x), branch_computations={%a, %b}
  ROOT %conv = f32[2,3]{1,0} convolution(%copy-done, %w), window={}
}
"""
  (event,) = _timeline.read_timeline(text)
  assert (event.kind, event.name, event.flops) == ("compute", "conv", 0)
