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

// Blocks of one recording. Freed by the last of the recording and the tensors that lie in it.
class Pool {
 public:
  ~Pool() {
    for (void* block : all_) c10::free_cpu(block);
  }

  // The smallest free block that is large enough and not twice too large, or a new one.
  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.lower_bound(bytes);
    if (found != free_.end() && found->first <= 2 * bytes) {
      void* block = found->second;
      used_[block] = found->first;
      free_.erase(found);
      return block;
    }
    void* block = c10::alloc_cpu(bytes);
    all_.push_back(block);
    used_[block] = bytes;
    return block;
  }

  void give_back(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(block);
    free_.emplace(found->second, block);
    used_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::vector<void*> all_;
  std::map<void*, size_t> used_;
  std::multimap<size_t, void*> free_;
};

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::shared_ptr<void>* place = recording_pool();
  if (place == nullptr) return at::Tensor(at::detail::empty_cpu(sizes, dtype));
  if (!*place) *place = std::make_shared<Pool>();
  auto pool = std::static_pointer_cast<Pool>(*place);
  size_t bytes = c10::elementSize(dtype);
  for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
  void* block = pool->take(std::max<size_t>((bytes + 63) / 64 * 64, 64));
  return at::from_blob(
      block, sizes, [pool](void* held) { pool->give_back(held); }, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

void keep(const at::Tensor& tensor) { keep(std::make_shared<at::Tensor>(tensor)); }

}  // namespace minisgl
