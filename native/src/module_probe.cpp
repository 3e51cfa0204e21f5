// Binding of the probe (hotset.machine.probe) and of the sampler (hotset.engine.native_sampler).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "module.h"
#include "probe.h"
#include "sampler.h"
#include "table.h"

namespace nb = nanobind;

namespace hotset {

namespace {

const ProbeKernels& probe_kernels(const std::string& isa) {
  const KernelTable* table = kernel_table(isa.c_str());
  if (table == nullptr) throw std::runtime_error("no kernel set " + isa + " on this machine");
  return table->probe;
}

// One request's sampler: its settings, and the engine's scratch memory (one thread at a time runs an engine).
struct Chooser {
  SamplingParams params;
  SamplerWorkspace& workspace;
  Chooser(const SamplingParams& p, SamplerWorkspace& w) : params(p), workspace(w) {}
};

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_probe(nb::module_& m) {
  nb::class_<ProbeBuffers>(m, "ProbeBuffers")
      .def(nb::init<std::vector<std::vector<int>>, const std::vector<int>&, size_t>(),
           nb::call_guard<nb::gil_scoped_release>())
      .def("read", [](const ProbeBuffers& b, const std::string& isa, const std::vector<int>& cpus, size_t bytes,
                      size_t prefetch, double seconds, int min_samples) {
        nb::gil_scoped_release release;
        return b.read(probe_kernels(isa), cpus, bytes, prefetch, seconds, min_samples);
      })
      .def("read_chunks", [](const ProbeBuffers& b, const std::string& isa, const std::vector<int>& cpus, size_t bytes,
                             size_t prefetch, double seconds, int min_samples) {
        nb::gil_scoped_release release;
        return b.read_chunks(probe_kernels(isa), cpus, bytes, prefetch, seconds, min_samples);
      })
      .def("write", [](ProbeBuffers& b, const std::string& isa, const std::vector<int>& cpus, double seconds,
                       int min_samples) {
        nb::gil_scoped_release release;
        return b.write(probe_kernels(isa), cpus, seconds, min_samples);
      })
      .def("copy", [](ProbeBuffers& b, const std::string& isa, const std::vector<int>& cpus, double seconds,
                      int min_samples) {
        nb::gil_scoped_release release;
        return b.copy(probe_kernels(isa), cpus, seconds, min_samples);
      })
      .def("plan_chunks", &ProbeBuffers::plan_chunks)
      .def("link", &ProbeBuffers::link, nb::call_guard<nb::gil_scoped_release>())
      .def("walk", &ProbeBuffers::walk, nb::call_guard<nb::gil_scoped_release>())
      .def("chase", &ProbeBuffers::chase, nb::call_guard<nb::gil_scoped_release>())
      .def("address", [](const ProbeBuffers& b, size_t region) { return reinterpret_cast<uintptr_t>(b.data(region)); })
      .def("pages", [](const ProbeBuffers& b, size_t region) { return pages_by_node(b.data(region), b.bytes_per_region()); })
      .def_prop_ro("bytes_per_region", &ProbeBuffers::bytes_per_region);
  m.attr("ANY_NODE") = kAnyNode;
  m.def("probe_write_instruction", [](const std::string& isa) { return probe_kernels(isa).write_instruction; });
  nb::class_<ProbeSteps>(m, "ProbeSteps")
      .def_ro("run_s", &ProbeSteps::run_s).def_ro("barrier_s", &ProbeSteps::barrier_s)
      .def_ro("exchange_s", &ProbeSteps::exchange_s);
  m.def("probe_steps", [](const std::string& isa, const std::vector<int>& cpus, double seconds, int min_samples) {
    nb::gil_scoped_release release;
    return probe_steps(probe_kernels(isa), cpus, seconds, min_samples);
  });
  m.def("probe_computes", [](const std::string& isa) {
    std::vector<std::pair<std::string, std::string>> out;
    const ProbeKernels& kernels = probe_kernels(isa);
    for (int i = 0; i < kernels.num_computes; ++i) {
      if (can_run(kernels.computes[i])) out.emplace_back(kernels.computes[i].kind, kernels.computes[i].instruction);
    }
    return out;
  });
  m.def("probe_compute", [](const std::string& isa, const std::string& kind, const std::vector<int>& cpus,
                            double seconds, int min_samples) {
    nb::gil_scoped_release release;
    const ProbeKernels& kernels = probe_kernels(isa);
    for (int i = 0; i < kernels.num_computes; ++i) {
      if (kind == kernels.computes[i].kind) return probe_compute(kernels.computes[i], cpus, seconds, min_samples);
    }
    throw std::runtime_error("no arithmetic rate " + kind);
  });
}

void bind_sampler(nb::module_& m) {
  nb::class_<SamplingParams>(m, "SamplingParams")
      .def(nb::init<>())
      .def_rw("temperature", &SamplingParams::temperature).def_rw("top_k", &SamplingParams::top_k)
      .def_rw("top_p", &SamplingParams::top_p).def_rw("min_p", &SamplingParams::min_p)
      .def_rw("repetition_penalty", &SamplingParams::repetition_penalty)
      .def_rw("presence_penalty", &SamplingParams::presence_penalty)
      .def_rw("frequency_penalty", &SamplingParams::frequency_penalty)
      .def_rw("seed", &SamplingParams::seed).def_rw("num_prompt", &SamplingParams::num_prompt);
  nb::class_<SamplerWorkspace>(m, "SamplerWorkspace").def(nb::init<int64_t>());
  nb::class_<Chooser>(m, "Chooser")
      .def(nb::init<const SamplingParams&, SamplerWorkspace&>(), nb::keep_alive<1, 3>())
      .def("__call__", [](Chooser& c, Floats logits, Ints history, uint64_t position) {
        if (static_cast<int64_t>(logits.shape(0)) != c.workspace.vocab) throw std::runtime_error("logits of another vocabulary");
        return sample_token(logits.data(), c.workspace.vocab, c.params, history.data(),
                            static_cast<int64_t>(history.shape(0)), position, c.workspace);
      });
}

}  // namespace hotset
