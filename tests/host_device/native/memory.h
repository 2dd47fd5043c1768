// Memory of the test device, and which memory of the host is page-locked.
//
// A device address is one that the host must not touch: whoever does is trapped. Kernels find the bytes at the
// same place of a second range. What is freed is handed out again at once, in its stream's order, and poisoned.
#pragma once

#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <cstring>
#include <set>
#include <unordered_map>
#include <vector>

#include "streams.h"

namespace host_device {

constexpr size_t kArena = size_t(1) << 36;  // of addresses, per device
constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xFF;  // NaN in every floating format, and an index that is out of every range

class Memory {
 public:
  static Memory& get() {
    static auto* memory = new Memory;
    return *memory;
  }

  // Whether the calling thread may allocate: torch's allocator for CUDA keeps what was freed for its stream alone, so
  // that a copy's stream, near a full device, would have all kept memory given back, which waits for the device.
  static bool& refuses() {
    static thread_local bool is_refusing = false;
    return is_refusing;
  }

  void* allocate(size_t nbytes, int device) {
    if (nbytes == 0) return nullptr;
    TORCH_CHECK(!refuses(), "a lane that copies allocates ", nbytes, " bytes on the device");
    std::lock_guard<std::mutex> lock(mutex_);
    Arena& arena = arenas_[device];
    take_back(device);
    size_t size = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    int64_t stream = Streams::current_id(device);
    size_t offset = 0;
    auto& free = arena.free[stream];
    auto found = free.lower_bound(size);
    if (found != free.end() && found->first <= 2 * size) {
      size = found->first;
      offset = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) free.erase(found);
    } else {
      if (arena.in_use + size > arena.limit || arena.top + size > kArena) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "the test device is out of memory: ", nbytes, " bytes wanted");
      }
      offset = arena.top;
      arena.top += size;
      poison(device, stream, offset, size);
    }
    arena.live[offset] = Block{size, nbytes, stream, {}};
    arena.in_use += size;
    arena.peak = std::max(arena.peak, arena.in_use);
    return arena.device + offset;
  }

  void free(void* address) {
    if (address == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex_);
    int device = device_of(address);
    Arena& arena = arenas_[device];
    auto found = arena.live.find(static_cast<const char*>(address) - arena.device);
    TORCH_INTERNAL_ASSERT(found != arena.live.end());
    Freed freed{found->first, found->second.size, found->second.stream, {}};
    for (int64_t id : found->second.recorded) freed.points.push_back(Streams::at(device, id).mark());
    arena.in_use -= freed.size;
    arena.live.erase(found);
    if (freed.points.empty()) {
      hand_back(device, freed);
    } else {
      arena.waiting.push_back(std::move(freed));
    }
  }

  void record(const void* address, const c10::Stream& stream) {
    if (address == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex_);
    Arena& arena = arenas_[device_of(address)];
    auto found = arena.live.find(static_cast<const char*>(address) - arena.device);
    TORCH_INTERNAL_ASSERT(found != arena.live.end());
    if (found->second.stream != stream.id()) found->second.recorded.insert(stream.id());
  }

  // Where kernels find what has this device address.
  char* of_kernels(const void* address) {
    if (address == nullptr) return nullptr;
    const Arena& arena = arenas_[device_of(address)];
    return arena.kernels + (static_cast<const char*>(address) - arena.device);
  }

  int device_of(const void* address) const {
    for (int device = 0; device < kNumDevices; device++) {
      auto offset = static_cast<const char*>(address) - arenas_[device].device;
      if (offset >= 0 && size_t(offset) < kArena) return device;
    }
    TORCH_CHECK(false, "a tensor of the test device is not in its memory");
  }

  size_t in_use(int device) { return arenas_[device].in_use; }
  size_t peak(int device) { return arenas_[device].peak; }
  size_t limit(int device) { return arenas_[device].limit; }
  void set_limit(int device, size_t nbytes) { arenas_[device].limit = nbytes; }
  void reset_peak(int device) { arenas_[device].peak = arenas_[device].in_use; }

 private:
  struct Block {
    size_t size, nbytes;
    int64_t stream;
    std::set<int64_t> recorded;  // other streams that use it
  };
  struct Freed {
    size_t offset, size;
    int64_t stream;
    std::vector<PointPtr> points;
  };
  struct Arena {
    char* device = nullptr;
    char* kernels = nullptr;
    size_t top = 0, in_use = 0, peak = 0, limit = size_t(16) << 30;
    std::map<size_t, Block> live;
    std::map<int64_t, std::map<size_t, std::vector<size_t>>> free;
    std::vector<Freed> waiting;
  };

  Memory() {
    for (Arena& arena : arenas_) {
      int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      arena.device = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, flags, -1, 0));
      arena.kernels = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, flags, -1, 0));
      TORCH_CHECK(arena.device != MAP_FAILED && arena.kernels != MAP_FAILED, "no addresses for the test device");
    }
  }

  void poison(int device, int64_t stream, size_t offset, size_t size) {
    char* bytes = arenas_[device].kernels + offset;
    Streams::at(device, stream).push([bytes, size] { std::memset(bytes, kPoison, size); });
  }

  void hand_back(int device, const Freed& freed) {
    poison(device, freed.stream, freed.offset, freed.size);
    arenas_[device].free[freed.stream][freed.size].push_back(freed.offset);
  }

  void take_back(int device) {  // what other streams have done with
    auto& waiting = arenas_[device].waiting;
    for (size_t i = 0; i < waiting.size();) {
      bool is_done = true;
      for (auto& point : waiting[i].points) is_done = is_done && point->is_passed();
      if (is_done) {
        hand_back(device, waiting[i]);
        waiting[i] = std::move(waiting.back());
        waiting.pop_back();
      } else {
        i++;
      }
    }
  }

  std::mutex mutex_;
  std::array<Arena, kNumDevices> arenas_;
};

struct DeviceAllocator final : c10::Allocator {
  static DeviceAllocator& get() {
    static auto* allocator = new DeviceAllocator;
    return *allocator;
  }
  static void release(void* address) { Memory::get().free(address); }
  c10::DataPtr allocate(size_t nbytes) override {
    int device = Streams::device();
    void* address = Memory::get().allocate(nbytes, device);
    return {address, address, &release, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    char *target = Memory::get().of_kernels(to), *source = Memory::get().of_kernels(from);
    Streams::current(Streams::device()).push([=] { std::memcpy(target, source, nbytes); });
  }
};

// Ranges of host memory that copies may use while the host goes on.
class Locked {
 public:
  static Locked& get() {
    static auto* locked = new Locked;
    return *locked;
  }
  bool add(uintptr_t address, size_t nbytes, bool by_torch = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_refusing_ && !by_torch) return false;
    ranges_[address] = nbytes;
    return true;
  }
  void remove(uintptr_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(ranges_.erase(address) == 1, "unlocked memory that is not locked");
  }
  bool holds(const void* data, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto address = reinterpret_cast<uintptr_t>(data);
    auto found = ranges_.upper_bound(address);
    if (found == ranges_.begin()) return false;
    --found;
    return address + nbytes <= found->first + found->second;
  }
  void refuse(bool is_refusing) { is_refusing_ = is_refusing; }
  size_t nbytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t sum = 0;
    for (auto& [address, size] : ranges_) sum += size;
    return sum;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
  std::atomic<bool> is_refusing_{false};
};

// torch's own pinned memory. What was dropped is used again once the copies of it are done, as with torch's allocator
// for CUDA, and poisoned.
class PinnedAllocator final : public c10::Allocator {
 public:
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator;
    return *allocator;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t size = 64;
    while (size < nbytes) size *= 2;
    for (auto& [address, block] : blocks_) {
      if (block.is_free && block.size == size && block.is_done()) {
        block.is_free = false;
        std::memset(address, kPoison, size);
        return {address, address, &release, c10::kCPU};
      }
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "no host memory");
    Locked::get().add(reinterpret_cast<uintptr_t>(data), size, /*by_torch=*/true);
    blocks_[static_cast<char*>(data)].size = size;
    return {data, data, &release, c10::kCPU};
  }
  void note_copy(const void* data, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (found == blocks_.begin()) return;
    --found;
    if (data < found->first + found->second.size) found->second.used_by[stream] = Streams::at(stream).mark();
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }

 private:
  struct Block {
    size_t size = 0;
    bool is_free = false;
    std::unordered_map<c10::Stream, PointPtr> used_by;
    bool is_done() const {
      for (auto& [stream, point] : used_by)
        if (!point->is_passed()) return false;
      return true;
    }
  };
  static void release(void* data) {
    auto& self = get();
    std::lock_guard<std::mutex> lock(self.mutex_);
    self.blocks_.at(static_cast<char*>(data)).is_free = true;
  }
  std::mutex mutex_;
  std::map<char*, Block> blocks_;
};

}  // namespace host_device
