#include "buffers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "launch.h"

namespace minisgl {
namespace {

// Blocks of memory that are used again. Those of a recording are freed by the last of the recording and the tensors
// that lie in them.
class Pool {
 public:
  // most_free: bytes that are kept for later; what is let go of beyond them is freed.
  explicit Pool(size_t most_free = SIZE_MAX) : most_free_(most_free) {}
  ~Pool() {
    for (auto [bytes, block] : free_) c10::free_cpu(block);
  }

  // The smallest free block that is large enough and not twice too large, or a new one.
  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = free_.lower_bound(bytes);
    if (found == free_.end() || found->first > 2 * bytes) {
      void* block = c10::alloc_cpu(bytes);
      used_[block] = bytes;
      return block;
    }
    void* block = found->second;
    used_[block] = found->first;
    free_bytes_ -= found->first;
    free_.erase(found);
    return block;
  }

  void give_back(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(block);
    const size_t bytes = found->second;
    used_.erase(found);
    if (bytes > most_free_ - std::min(free_bytes_, most_free_)) return c10::free_cpu(block);
    free_.emplace(bytes, block);
    free_bytes_ += bytes;
  }

 private:
  const size_t most_free_;
  std::mutex mutex_;
  size_t free_bytes_ = 0;
  std::map<void*, size_t> used_;
  std::multimap<size_t, void*> free_;
};

// Where this thread's tensors lie: in its recording, or, if they are large, in a pool of the process. The system takes a
// large block back as soon as it is free, and clearing its pages anew takes longer than a product of a prompt that fills
// them.
std::shared_ptr<Pool> pool_for(size_t bytes) {
  constexpr size_t kLarge = 64 << 10, kMostFree = 256 << 20;
  if (std::shared_ptr<void>* place = recording_pool()) {
    if (!*place) *place = std::make_shared<Pool>();
    return std::static_pointer_cast<Pool>(*place);
  }
  static const auto* large = new std::shared_ptr<Pool>(std::make_shared<Pool>(kMostFree));  // outlives all tensors
  return bytes < kLarge ? nullptr : *large;
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  size_t bytes = c10::elementSize(dtype);
  for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
  const std::shared_ptr<Pool> pool = pool_for(bytes);
  if (!pool) return at::Tensor(at::detail::empty_cpu(sizes, dtype));
  void* block = pool->take(std::max<size_t>((bytes + 63) / 64 * 64, 64));
  return at::from_blob(
      block, sizes, [pool](void* held) { pool->give_back(held); }, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

void keep(const at::Tensor& tensor) { keep(std::make_shared<at::Tensor>(tensor)); }

}  // namespace minisgl
