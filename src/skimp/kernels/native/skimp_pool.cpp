// A CPU allocator for tensors that keeps freed blocks for the next tensor of their size, within a limit.
//
// glibc offers two bad bargains: hand large blocks back at once, and every activation is fresh pages that the kernel
// maps and zeroes; or keep them on the heap, where blocks of many sizes leave holes that nothing fits into. The tensors
// of a training step have a few dozen sizes that come back in every block and every step, so here a freed block waits
// for the next tensor of (almost) its size, and the oldest waiting blocks are unmapped whenever live and waiting bytes
// together would exceed the limit that the plan set. The resident memory of tensors is then at most
// max(limit, live), whatever the order of frees.
//
// It is an ordinary c10::Allocator (c10/core/Allocator.h) set by c10::SetCPUAllocator; it tells torch's profiler of every
// tensor as the default one does. Tensors made before it was set keep their own deleter.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

// Below this, malloc: such tensors are many and their pages few.
constexpr size_t kSmallest = size_t(64) << 10;
constexpr size_t kPage = 4096;
// From here on a block starts at a huge page and asks for them: fewer faults and fewer misses of the address cache. Only
// whole huge pages inside the block are used by the kernel, so nothing beyond the block becomes resident.
constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kHugeFrom = 2 * kHuge;

struct Block {
  void* start;
  size_t bytes;
};

class Pool {
 public:
  void* take(size_t asked) {
    const size_t bytes = (asked + kPage - 1) / kPage * kPage;
    std::lock_guard<std::mutex> hold(mutex_);
    // The smallest waiting block that fits and wastes no more than an eighth, nor more than the limit has room for.
    auto found = waiting_by_size_.lower_bound(bytes);
    if (found != waiting_by_size_.end() && found->first <= bytes + bytes / 8 &&
        (found->first == bytes || live_bytes_ + found->first <= limit_)) {
      auto place = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) waiting_by_size_.erase(found);
      const Block block = *place;
      waiting_.erase(place);
      waiting_bytes_ -= block.bytes;
      live_bytes_ += block.bytes;
      live_[block.start] = block.bytes;
      ++reused_;
      return block.start;
    }
    shrink(bytes);
    void* start = map(bytes);
    if (start == nullptr) {  // the system has no more: give it everything that waits, and ask once more
      unmap_waiting(0);
      start = map(bytes);
      if (start == nullptr) return nullptr;
    }
    live_bytes_ += bytes;
    live_[start] = bytes;
    ++mapped_;
    if (live_bytes_ + waiting_bytes_ > highest_) highest_ = live_bytes_ + waiting_bytes_;
    return start;
  }

  // True when the block was this pool's.
  bool give(void* start) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = live_.find(start);
    if (found == live_.end()) return false;
    const Block block{start, found->second};
    live_.erase(found);
    live_bytes_ -= block.bytes;
    waiting_bytes_ += block.bytes;
    waiting_.push_back(block);
    waiting_by_size_[block.bytes].push_back(std::prev(waiting_.end()));
    shrink(0);
    return true;
  }

  void limit(size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    limit_ = bytes;
    shrink(0);
  }

  void statistics(long long* out) {
    std::lock_guard<std::mutex> hold(mutex_);
    const size_t values[] = {live_bytes_, waiting_bytes_, highest_, mapped_, reused_, limit_};
    for (size_t i = 0; i < 6; ++i) out[i] = static_cast<long long>(values[i]);
  }

  void reset_highest() {
    std::lock_guard<std::mutex> hold(mutex_);
    highest_ = live_bytes_ + waiting_bytes_;
  }

 private:
  // Unmap the longest waiting blocks until `more` bytes have room under the limit.
  void shrink(size_t more) {
    const size_t taken = live_bytes_ + more;
    unmap_waiting(taken < limit_ ? limit_ - taken : 0);
  }

  void unmap_waiting(size_t allowed) {
    while (waiting_bytes_ > allowed) {
      const auto oldest = waiting_.begin();
      auto& same = waiting_by_size_[oldest->bytes];
      for (auto place = same.begin(); place != same.end(); ++place) {
        if (*place == oldest) {
          same.erase(place);
          break;
        }
      }
      if (same.empty()) waiting_by_size_.erase(oldest->bytes);
      munmap(oldest->start, oldest->bytes);
      waiting_bytes_ -= oldest->bytes;
      waiting_.erase(oldest);
    }
  }

  static void* map(size_t bytes) {
    const bool huge = bytes >= kHugeFrom;
    const size_t span = huge ? bytes + kHuge : bytes;
    void* raw = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    if (!huge) return raw;
    char* begin = static_cast<char*>(raw);
    char* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHuge - 1) / kHuge * kHuge);
    if (start > begin) munmap(begin, start - begin);
    char* end = begin + span;
    if (end > start + bytes) munmap(start + bytes, end - (start + bytes));
    madvise(start, bytes, MADV_HUGEPAGE);  // a kernel without huge pages refuses, and small ones serve
    return start;
  }

  std::mutex mutex_;
  std::list<Block> waiting_;  // longest waiting first
  std::map<size_t, std::list<std::list<Block>::iterator>> waiting_by_size_;
  std::unordered_map<void*, size_t> live_;
  size_t live_bytes_ = 0, waiting_bytes_ = 0, highest_ = 0, mapped_ = 0, reused_ = 0;
  size_t limit_ = 0;
};

// Never destroyed: tensors of static lifetime are freed after static destructors have run.
Pool& pool() {
  static Pool* one = new Pool();
  return *one;
}

void release(void* start) {
  if (start == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(start);
  if (!pool().give(start)) free(start);
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    void* start = nullptr;
    if (bytes >= kSmallest) {
      start = pool().take(bytes);
    } else if (posix_memalign(&start, 64, bytes) != 0) {
      start = nullptr;
    }
    if (start == nullptr) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                  " bytes (skimp's pool)");
    }
    c10::profiledCPUMemoryReporter().New(start, bytes);
    return {start, start, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

const char* skimp_pool_stamp() { return SKIMP_STAMP; }

// Make this pool torch's CPU allocator from now on.
void skimp_pool_install() {
  static PoolAllocator* one = new PoolAllocator();
  c10::SetCPUAllocator(one, 1);
}

// Torch's own allocator again; blocks of the pool come back to it when they are freed.
void skimp_pool_remove() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 1); }

void skimp_pool_limit(long long bytes) { pool().limit(static_cast<size_t>(bytes)); }

// live, waiting, highest of both, blocks mapped, blocks reused, limit.
void skimp_pool_statistics(long long* out) { pool().statistics(out); }

void skimp_pool_reset_highest() { pool().reset_highest(); }
}
