// Parts of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace hotset {

void bind_probe(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);

}  // namespace hotset
