// Tests of every kernel set that this machine can run. Prints one line per test and "N passed, N failed".
//
//   kernel_tests [--isa NAME] [--checksums FILE]
//
// --checksums writes the results' checksums of the first set. Any two sets but AVX-512 write the same file; its
// own lacks the lines for BF16 products.
#include <cstdlib>

#include <sched.h>

#include "attend_tests.h"
#include "hyper_tests.h"
#include "index_tests.h"
#include "pack_tests.h"
#include "product_tests.h"
#include "rows_tests.h"
#include "rowwise_tests.h"
#include "team.h"

namespace hotset {
namespace {

// Threads of a team meet at every barrier, and a job ends only when all have finished.
void test_team(Tests& tests) {
  Test test("team of threads", true);
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 3; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  Team team(cpus);
  constexpr int kRounds = 200;
  std::vector<int> seen(team.size() * 64);
  std::atomic<int> num_early{0};
  for (int job = 0; job < 5; ++job) {
    std::fill(seen.begin(), seen.end(), 0);
    team.run([&](int thread) {
      for (int round = 1; round <= kRounds; ++round) {
        seen[thread * 64] = round;
        team.barrier();
        for (int other = 0; other < team.size(); ++other) num_early += seen[other * 64] != round;
        team.barrier();
      }
    });
    for (int thread = 0; thread < team.size(); ++thread)
      test.expect(seen[thread * 64] == kRounds, "thread %d did not finish", thread);
  }
  test.expect(num_early == 0, "%d times a thread had passed a barrier early", num_early.load());
  tests.push_back(test);
}

Tests run_set(const KernelTable& kernels) {
  Tests tests;
  test_unpack(tests, kernels);
  test_pack(tests, kernels);
  test_packing(tests, kernels);
  test_rms_norm(tests, kernels);
  test_silu(tests, kernels);
  test_rope(tests, kernels);
  test_attention(tests, kernels);
  test_encode_rows(tests, kernels);
  test_attend_tiles(tests, kernels);
  test_pool(tests, kernels);
  test_head_norm(tests, kernels);
  test_index(tests, kernels);
  test_hyper(tests, kernels);
  test_probe(tests, kernels);
  test_products(tests, kernels);
  test_limit(tests, kernels);
  test_scaled_before(tests, kernels);
  test_far_scales(tests, kernels);
  return tests;
}

struct Count {
  int passed = 0, failed = 0;
  void print(const char* isa, const Test& test) {
    (test.passed() ? passed : failed) += 1;
    std::printf("%s %s %s%s%s\n", test.passed() ? "ok  " : "FAIL", isa, test.name().c_str(),
                test.detail().empty() ? "" : ": ", test.detail().c_str());
    std::fflush(stdout);
  }
};

// AVX-512 alone has an instruction for BF16 dot products, with its own rounding.
bool is_comparable(const std::string& isa, const Test& test) { return test.is_portable() || isa != "avx512"; }

bool write_checksums(const char* path, const std::string& isa, const Tests& tests) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return false;
  for (const Test& test : tests) {
    if (is_comparable(isa, test))
      std::fprintf(file, "%016llx %s\n", static_cast<unsigned long long>(test.checksum()), test.name().c_str());
  }
  return std::fclose(file) == 0;
}

int run(const char* only, const char* checksums) {
  const char* names[8];
  const int num_sets = available_isas(names, 8);
  Count count;
  Tests core;
  test_team(core);
  count.print("core", core[0]);
  Tests first;
  std::string first_name;
  for (int i = 0; i < num_sets; ++i) {
    if (only != nullptr && std::strcmp(only, names[i]) != 0) continue;
    const Tests tests = run_set(*kernel_table(names[i]));
    for (const Test& test : tests) count.print(names[i], test);
    if (first.empty()) {
      first = tests;
      first_name = names[i];
      continue;
    }
    for (size_t t = 0; t < tests.size(); ++t) {
      if (!is_comparable(first_name, tests[t]) || !is_comparable(names[i], tests[t])) continue;
      Test same("same bits as " + first_name + ": " + tests[t].name(), true);
      same.expect(tests[t].checksum() == first[t].checksum(), "checksum %016llx against %016llx",
                  static_cast<unsigned long long>(tests[t].checksum()),
                  static_cast<unsigned long long>(first[t].checksum()));
      count.print(names[i], same);
    }
  }
  if (first.empty()) {
    std::fprintf(stderr, "no kernel set%s%s runs on this machine\n", only ? " " : "", only ? only : "");
    return 1;
  }
  if (checksums != nullptr && !write_checksums(checksums, first_name, first)) {
    std::fprintf(stderr, "cannot write %s\n", checksums);
    return 1;
  }
  std::printf("%d passed, %d failed\n", count.passed, count.failed);
  return count.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace hotset

int main(int argc, char** argv) {
  const char *isa = nullptr, *checksums = nullptr;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 < argc && std::strcmp(argv[i], "--isa") == 0) {
      isa = argv[i + 1];
    } else if (i + 1 < argc && std::strcmp(argv[i], "--checksums") == 0) {
      checksums = argv[i + 1];
    } else {
      std::fprintf(stderr, "usage: kernel_tests [--isa NAME] [--checksums FILE]\n");
      return 2;
    }
  }
  return hotset::run(isa, checksums);
}
