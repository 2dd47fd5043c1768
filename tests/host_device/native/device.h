// What torch asks a kind of device for: its guard with streams and events, its generators, its hooks.
#pragma once

#include <ATen/Utils.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace host_device {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  struct Event {
    PointPtr point;
  };
  static PointPtr& point_of(void* event) { return static_cast<Event*>(event)->point; }

  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(Streams::device())}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) Streams::device() = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  static c10::Stream pack(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)}, id);
  }
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : Streams::device(); }
  c10::Stream getStream(c10::Device device) const override {
    int index = index_of(device);
    return pack(index, Streams::current_id(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return pack(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    int index = index_of(device);
    return pack(index, Streams::next_id(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    Streams::current_id(stream.device_index()) = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    point_of(*event) = Streams::at(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && point_of(event) != nullptr) Streams::at(stream).wait_for(point_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || point_of(event)->is_passed(); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Counts::add("event");
    point_of(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(start) && queryEvent(end), "the events are not done");
    return std::chrono::duration<double, std::milli>(point_of(end)->time() - point_of(start)->time()).count();
  }

  bool queryStream(const c10::Stream& stream) const override { return !Streams::at(stream).has_work(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Counts::add("synchronize");
    Streams::at(stream).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Counts::add("synchronize");
    Streams::synchronize(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Memory::get().record(data.get(), stream);
  }
};

// Counts its draws: each random operation takes one number when it is launched, and seeds its own kernel with it.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device)
      : GeneratorImpl({kType, static_cast<c10::DeviceIndex>(device)}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  uint64_t draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t bits = seed_ + 0x9E3779B97F4A7C15ull * ++offset_;  // splitmix64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
  }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "the state of a generator of the test device has 16 bytes");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  static at::Generator& of(int device) {
    static auto* all = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < kNumDevices; i++) made->push_back(at::make_generator<Generator>(i));
      return made;
    }();
    return all->at(device);
  }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator(device_.index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  static int index_of(c10::DeviceIndex device) { return device < 0 ? Streams::device() : device; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return Generator::of(index_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(index_of(device));
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kType, static_cast<c10::DeviceIndex>(Memory::get().device_of(data))};
  }
  bool isPinnedPtr(const void* data) const override { return Locked::get().holds(data, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(Streams::device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    OnDevice on(storage.device().index());
    auto data = DeviceAllocator::get().allocate(nbytes);
    if (auto kept = std::min(nbytes, storage.nbytes())) {
      DeviceAllocator::get().copy_data(data.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));  // frees the old bytes, behind the copy
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

}  // namespace host_device
