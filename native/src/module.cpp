// The Python binding: thin, no decisions. Indices and sizes are checked by the callers in hotset.engine.native.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "executor.h"
#include "module.h"

namespace nb = nanobind;
using namespace hotset;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<std::string> isas() {
  const char* names[8];
  int count = available_isas(names, 8);
  return {names, names + count};
}

void bind_specs(nb::module_& m) {
  nb::class_<OpSpec>(m, "OpSpec")
      .def(nb::init<>())
      .def_rw("kind", &OpSpec::kind).def_rw("x", &OpSpec::x).def_rw("y", &OpSpec::y).def_rw("out", &OpSpec::out)
      .def_rw("z", &OpSpec::z).def_rw("out2", &OpSpec::out2)
      .def_rw("weight", &OpSpec::weight).def_rw("weight2", &OpSpec::weight2)
      .def_rw("barrier_few", &OpSpec::barrier_few).def_rw("barrier_many", &OpSpec::barrier_many)
      .def_rw("is_lent", &OpSpec::is_lent)
      .def_rw("add", &OpSpec::add).def_rw("value", &OpSpec::value).def_rw("value2", &OpSpec::value2)
      .def_rw("limit", &OpSpec::limit).def_rw("num_heads", &OpSpec::num_heads)
      .def_rw("num_kv_heads", &OpSpec::num_kv_heads).def_rw("head_dim", &OpSpec::head_dim)
      .def_rw("rotary_dim", &OpSpec::rotary_dim).def_rw("adjacent", &OpSpec::adjacent)
      .def_rw("first", &OpSpec::first).def_rw("inverse", &OpSpec::inverse).def_rw("groups", &OpSpec::groups)
      .def_rw("copies", &OpSpec::copies).def_rw("frequency", &OpSpec::frequency)
      .def_rw("iterations", &OpSpec::iterations).def_rw("cache_kind", &OpSpec::cache_kind)
      .def_rw("cache_offset", &OpSpec::cache_offset).def_rw("row_kind", &OpSpec::row_kind)
      .def_rw("row_bytes", &OpSpec::row_bytes).def_rw("scale_bytes", &OpSpec::scale_bytes)
      .def_rw("plain", &OpSpec::plain).def_rw("ratio", &OpSpec::ratio).def_rw("overlap", &OpSpec::overlap)
      .def_rw("hadamard", &OpSpec::hadamard).def_rw("top_k", &OpSpec::top_k)
      .def_rw("num_experts", &OpSpec::num_experts).def_rw("by_pair", &OpSpec::by_pair)
      .def_rw("unit_tokens", &OpSpec::unit_tokens).def_rw("window", &OpSpec::window)
      .def_rw("ring_offset", &OpSpec::ring_offset).def_rw("ring_rows", &OpSpec::ring_rows)
      .def_rw("ring_kind", &OpSpec::ring_kind).def_rw("ring_row_bytes", &OpSpec::ring_row_bytes)
      .def_rw("ring_scale_bytes", &OpSpec::ring_scale_bytes);
  nb::class_<BufferSpec>(m, "BufferSpec")
      .def(nb::init<>())
      .def_rw("width", &BufferSpec::width).def_rw("slot", &BufferSpec::slot)
      .def_rw("is_outputs", &BufferSpec::is_outputs).def_rw("is_packed", &BufferSpec::is_packed)
      .def_rw("act", &BufferSpec::act).def_rw("is_private", &BufferSpec::is_private)
      .def_rw("rows_per_token", &BufferSpec::rows_per_token).def_rw("groups", &BufferSpec::groups)
      .def_rw("header_bytes", &BufferSpec::header_bytes);
  nb::class_<WeightSpec>(m, "WeightSpec")
      .def(nb::init<>())
      .def_rw("format", &WeightSpec::format).def_rw("out_width", &WeightSpec::out_width)
      .def_rw("in_width", &WeightSpec::in_width).def_rw("pair", &WeightSpec::pair)
      .def_rw("count", &WeightSpec::count).def_rw("is_table", &WeightSpec::is_table);
  nb::class_<ExecutorSpec>(m, "ExecutorSpec")
      .def(nb::init<>())
      .def_rw("ops", &ExecutorSpec::ops).def_rw("buffers", &ExecutorSpec::buffers)
      .def_rw("slot_bytes", &ExecutorSpec::slot_bytes).def_rw("private_slot_bytes", &ExecutorSpec::private_slot_bytes)
      .def_rw("weights", &ExecutorSpec::weights).def_rw("frequencies", &ExecutorSpec::frequencies)
      .def_rw("max_tokens", &ExecutorSpec::max_tokens).def_rw("max_outputs", &ExecutorSpec::max_outputs)
      .def_rw("few_tokens", &ExecutorSpec::few_tokens).def_rw("num_blocks", &ExecutorSpec::num_blocks)
      .def_rw("block_bytes", &ExecutorSpec::block_bytes).def_rw("partial_floats", &ExecutorSpec::partial_floats)
      .def_rw("attend_rows", &ExecutorSpec::attend_rows).def_rw("attend_head_dim", &ExecutorSpec::attend_head_dim)
      .def_rw("work_bytes", &ExecutorSpec::work_bytes).def_rw("candidate_bytes", &ExecutorSpec::candidate_bytes)
      .def_rw("num_frontiers", &ExecutorSpec::num_frontiers).def_rw("frontier_bytes", &ExecutorSpec::frontier_bytes)
      .def_rw("logits", &ExecutorSpec::logits);
}

// segments: int32 [5 s]: first, count, position, start of its block ids in `blocks`, frontier.
void step(Executor& e, Ints tokens, Ints segments, Ints blocks, Ints outputs) {
  nb::gil_scoped_release release;
  thread_local std::vector<Segment> list;
  list.clear();
  for (size_t i = 0; i + 5 <= segments.shape(0); i += 5) {
    const int32_t* s = segments.data() + i;
    list.push_back({s[0], s[1], s[2], blocks.data() + s[3], s[4]});
  }
  e.step(tokens.data(), static_cast<int64_t>(tokens.shape(0)), list, outputs.data(), static_cast<int64_t>(outputs.shape(0)));
}

void bind_places(nb::module_& m) {
  nb::enum_<NumaPolicy>(m, "NumaPolicy")
      .value("TOUCH", NumaPolicy::kTouch).value("BIND", NumaPolicy::kBind).value("PREFER", NumaPolicy::kPrefer);
  nb::class_<Seats>(m, "Seats")
      .def(nb::init<>())
      .def_rw("cpus", &Seats::cpus).def_rw("nodes", &Seats::nodes).def_rw("policy", &Seats::policy);
  nb::class_<Place>(m, "Place")
      .def_ro("name", &Place::name).def_ro("num_bytes", &Place::bytes).def_ro("node", &Place::node)
      .def_prop_ro("address", [](const Place& place) { return reinterpret_cast<uintptr_t>(place.address); });
  m.def("pages_by_node", [](const Place& place) { return pages_by_node(place.address, place.bytes); },
        nb::call_guard<nb::gil_scoped_release>());
}

void bind_executor(nb::module_& m) {
  nb::class_<Executor>(m, "Executor")
      .def("__init__", [](Executor* e, const Seats& seats, const std::string& isa, const ExecutorSpec& spec) {
        new (e) Executor(seats, isa, spec);
      })
      .def("load", [](Executor& e, int index, int64_t part, int fd, int64_t offset, int scale_fd, int64_t scale_offset) {
        nb::gil_scoped_release release;
        e.load(index, part, {fd, offset, scale_fd, scale_offset});
      })
      .def("set_vector", [](Executor& e, int index, Floats values) {
        e.set_vector(index, values.data(), static_cast<int64_t>(values.shape(0)));
      })
      .def("set_table", [](Executor& e, int index, Ints values) {
        e.set_table(index, values.data(), static_cast<int64_t>(values.shape(0)));
      })
      .def("block", [](Executor& e, int64_t index) {
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
            e.block(index), {static_cast<size_t>(e.spec().block_bytes)}, nb::find(&e));
      })
      .def("frontier", [](Executor& e, int64_t slot) {
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
            e.frontier(slot), {static_cast<size_t>(e.spec().frontier_bytes)}, nb::find(&e));
      })
      .def("touch", &Executor::touch, nb::call_guard<nb::gil_scoped_release>())
      .def("step", &step)
      .def("logits", [](Executor& e, int64_t rows, int64_t vocab) {
        return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(
            e.logits(), {static_cast<size_t>(rows), static_cast<size_t>(vocab)}, nb::find(&e), {e.logits_stride(), 1});
      })
      .def("places", &Executor::places)
      .def("profile", &Executor::profile)
      .def("op_ns", &Executor::op_ns)
      .def("wait_ns", &Executor::wait_ns);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("isas", &isas);
  m.attr("KIND_COUNTS") = nb::make_tuple(static_cast<int>(kNumOpKinds), kNumActKinds, kNumCacheKinds, kNumRowKinds,
                                       kNumIndexKinds);
  m.attr("FORMATS") = [] {
    nb::list names;
    for (int f = 0; f < kNumFormats; ++f) names.append(format_info(f).name);
    return nb::tuple(names);
  }();
  bind_specs(m);
  bind_places(m);
  bind_executor(m);
  bind_probe(m);
  bind_sampler(m);
}
