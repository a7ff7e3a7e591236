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
  bool alone;  // this step and the one before it have one part each: the same thread does both, nobody waits between
};

struct Recording {
  std::vector<Step> steps;
  std::vector<std::shared_ptr<void>> kept;
  std::shared_ptr<void> pool;
};

thread_local std::unique_ptr<Recording> current;

int parts_of(int64_t most_parts, int threads) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(most_parts, threads)));
}

// A team may be smaller than was asked for, so a thread takes every team-th part.
void run_parts(const Kernel& kernel, int parts, int thread, int team) {
  for (int index = thread; index < parts; index += team) kernel({index, parts});
}

// All threads of a team wait for one another. Who has waited long gives its core away: other processes want it too.
class Barrier {
 public:
  void wait(int team) {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
      waiting_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 2000;  // about 100 µs
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

void replay(const Recording& recording) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    for (const Step& step : recording.steps) {
      if (team > 1 && !step.alone) barrier.wait(team);
      run_parts(step.kernel, parts_of(step.most_parts, threads), thread, team);
    }
  }
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
  if (current) {
    const bool alone = current->steps.empty() || (most_parts <= 1 && current->steps.back().most_parts <= 1);
    current->steps.push_back({std::move(kernel), most_parts, alone});
  }
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
__attribute__((visibility("default"))) void* minisgl_record_end() { return minisgl::current.release(); }

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
