// Python names of the probe. module.cpp includes this and calls bind_probe(m).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "probe.h"
#include "table.h"

namespace hotset {

inline const ProbeKernels& probe_kernels_of(const std::string& isa) {
  const KernelTable* table = kernel_table(isa.c_str());
  if (table == nullptr) throw std::runtime_error("this machine cannot run the kernels for " + isa);
  return table->probe;
}

inline void bind_probe(nanobind::module_& m) {
  namespace nb = nanobind;
  nb::class_<ProbeBuffers>(m, "ProbeBuffers")
      .def(nb::init<std::vector<std::vector<int>>, size_t, size_t>(), nb::arg("cpus_by_node"),
           nb::arg("bytes_per_node"), nb::arg("huge_page_bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes_per_node", &ProbeBuffers::bytes_per_node)
      .def(
          "read",
          [](const ProbeBuffers& self, const std::string& isa, const std::vector<int>& cpus, size_t bytes,
             size_t prefetch_bytes, double seconds, int min_samples) {
            nb::gil_scoped_release release;
            return self.read(probe_kernels_of(isa), cpus, bytes, prefetch_bytes, seconds, min_samples);
          },
          nb::arg("isa"), nb::arg("cpus"), nb::arg("bytes"), nb::arg("prefetch_bytes"),
          nb::arg("seconds"), nb::arg("min_samples"));
  // (kind, instruction) of every arithmetic peak that this processor has.
  m.def(
      "probe_computes",
      [](const std::string& isa) {
        const ProbeKernels& kernels = probe_kernels_of(isa);
        std::vector<std::pair<std::string, std::string>> result;
        for (int i = 0; i < kernels.num_computes; ++i) {
          const ProbeCompute& compute = kernels.computes[i];
          if (can_run(compute)) result.emplace_back(compute.kind, compute.instruction);
        }
        return result;
      },
      nb::arg("isa"));
  m.def(
      "probe_compute",
      [](const std::string& isa, const std::string& kind, const std::vector<int>& cpus, double seconds,
         int min_samples) {
        const ProbeKernels& kernels = probe_kernels_of(isa);
        for (int i = 0; i < kernels.num_computes; ++i) {
          const ProbeCompute& compute = kernels.computes[i];
          if (kind == compute.kind && can_run(compute)) {
            nb::gil_scoped_release release;
            return probe_compute(compute, cpus, seconds, min_samples);
          }
        }
        throw std::runtime_error("no peak of kind " + kind + " with the kernels for " + isa);
      },
      nb::arg("isa"), nb::arg("kind"), nb::arg("cpus"), nb::arg("seconds"), nb::arg("min_samples"));
}

}  // namespace hotset
