#include "launch.h"

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace minisgl {
namespace {

struct Step {
  Kernel kernel;
  int64_t most_parts;
};

// How far a replay is with a step. On a cache line of its own.
struct alignas(64) Progress {
  std::atomic<int> claimed{0}, done{0};  // parts
};

struct Recording {
  std::vector<Step> steps;
  std::vector<std::shared_ptr<void>> kept;
  std::shared_ptr<void> pool;
  std::unique_ptr<Progress[]> progress;  // of each step
};

thread_local std::unique_ptr<Recording> current;

int parts_of(int64_t most_parts, int threads) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(most_parts, threads)));
}

// A team may be smaller than was asked for, so a thread takes every team-th part.
void run_parts(const Kernel& kernel, int parts, int thread, int team) {
  for (int index = thread; index < parts; index += team) kernel({index, parts});
}

// Who has waited long gives its core away: other processes want it too.
void wait_until(const std::atomic<int>& done, int parts) {
  constexpr int kSpins = 2000;  // about 100 µs
  for (int spins = 0; done.load(std::memory_order_acquire) < parts; ++spins) {
    if (spins < kSpins) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

// Each thread goes through all steps, takes what parts nobody has taken, and waits for those that are taken. So a
// thread that the system has put aside holds nobody up unless it is in the middle of a part: the others do its work.
void walk(const Recording& recording, int threads) {
  const std::vector<Step>& steps = recording.steps;
  for (size_t index = 0; index < steps.size(); ++index) {
    Progress& progress = recording.progress[index];
    const int parts = parts_of(steps[index].most_parts, threads);
    if (progress.claimed.load(std::memory_order_relaxed) < parts) {
      for (int part; (part = progress.claimed.fetch_add(1, std::memory_order_relaxed)) < parts;) {
        steps[index].kernel({part, parts});
        progress.done.fetch_add(1, std::memory_order_release);
      }
    }
    wait_until(progress.done, parts);
  }
}

void replay(const Recording& recording) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  for (size_t index = 0; index < recording.steps.size(); ++index) {
    recording.progress[index].claimed.store(0, std::memory_order_relaxed);
    recording.progress[index].done.store(0, std::memory_order_relaxed);
  }
#pragma omp parallel num_threads(threads)
  walk(recording, threads);
}

}  // namespace

void launch(Kernel kernel, int64_t most_parts) {
  const int parts = parts_of(most_parts, at::in_parallel_region() ? 1 : at::get_num_threads());
  if (parts == 1) {
    kernel({0, 1});
  } else {
#pragma omp parallel num_threads(parts)
    run_parts(kernel, parts, omp_get_thread_num(), omp_get_num_threads());
  }
  if (current) current->steps.push_back({std::move(kernel), most_parts});
}

std::shared_ptr<void>* recording_pool() { return current ? &current->pool : nullptr; }

void keep(std::shared_ptr<void> object) {
  if (current) current->kept.push_back(std::move(object));
}

}  // namespace minisgl

// For ctypes, which lets go of the GIL. A recording belongs to who began it, until it is freed.
extern "C" {

// 0, or -1 where this thread records already.
__attribute__((visibility("default"))) int minisgl_record_begin() {
  if (minisgl::current) return -1;
  minisgl::current = std::make_unique<minisgl::Recording>();
  return 0;
}

// nullptr where this thread does not record.
__attribute__((visibility("default"))) void* minisgl_record_end() {
  if (minisgl::current) {
    minisgl::current->progress = std::make_unique<minisgl::Progress[]>(minisgl::current->steps.size());
  }
  return minisgl::current.release();
}

__attribute__((visibility("default"))) int64_t minisgl_steps(const void* recording) {
  return static_cast<int64_t>(static_cast<const minisgl::Recording*>(recording)->steps.size());
}

__attribute__((visibility("default"))) void minisgl_replay(const void* recording) {
  minisgl::replay(*static_cast<const minisgl::Recording*>(recording));
}

__attribute__((visibility("default"))) void minisgl_free(void* recording) {
  delete static_cast<minisgl::Recording*>(recording);
}
}
