// The test device: a torch.device of host memory, with streams that are threads. Registered as PrivateUse1.
#include <ATen/autocast_mode.h>
#include <torch/csrc/utils/pybind.h>

#include "attention.h"

namespace host_device {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, &DeviceAllocator::get())

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("alias", alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("_flash_attention_forward", torch::CppFunction::makeFromBoxedFunction<&varlen_attention>());
  m.impl("_flash_attention_backward", torch::CppFunction::makeFromBoxedFunction<&varlen_attention_backward>());
  m.impl("histc", histc);
  m.impl("linalg_vector_norm", torch::CppFunction::makeFromBoxedFunction<&reduction<4>>());
  m.impl("sum", torch::CppFunction::makeFromBoxedFunction<&reduction<1>>());
  m.impl("sum.dim_IntList", torch::CppFunction::makeFromBoxedFunction<&reduction<3>>());
  m.impl("native_dropout", native_dropout);
  m.impl("_grouped_mm", grouped_mm);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution<0>>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution<1>>());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

}  // namespace host_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace host_device;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::globalContext().lazyInitDevice(kType);  // before, torch takes no memory for page-locked
  m.def("device_count", [] { return kNumDevices; });
  m.def("current_device", [] { return Streams::device(); });
  m.def("set_device", [](int device) { Guard().setDevice({kType, static_cast<c10::DeviceIndex>(device)}); });
  m.def("synchronize", [](int device) {
    py::gil_scoped_release release;
    Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(device));
  });
  // Runs a function of Python's in the current stream, as a kernel would.
  m.def("launch", [](py::object function) {
    auto* held = new py::object(std::move(function));
    Streams::current(Streams::device()).push([held] {
      py::gil_scoped_acquire gil;
      std::unique_ptr<py::object> dropped(held);
      (*held)();
    });
  });
  m.def("generator", [](int device) { return Generator::of(device); });
  m.def("lock", [](uintptr_t address, size_t nbytes) { return Locked::get().add(address, nbytes); });
  m.def("unlock", [](uintptr_t address) { Locked::get().remove(address); });
  m.def("refuse_locks", [](bool is_refusing) { Locked::get().refuse(is_refusing); });
  m.def("locked_bytes", [] { return Locked::get().nbytes(); });
  m.def("in_use", [](int device) { return Memory::get().in_use(device); });
  m.def("peak", [](int device) { return Memory::get().peak(device); });
  m.def("reset_peak", [](int device) { Memory::get().reset_peak(device); });
  m.def("limit", [](int device) { return Memory::get().limit(device); });
  m.def("set_limit", [](int device, size_t nbytes) { Memory::get().set_limit(device, nbytes); });
  m.def("refuse_allocations", [](bool is_refusing) { Memory::refuses() = is_refusing; });
  m.def("settle", [] {
    py::gil_scoped_release release;
    Streams::settle();
  });
  m.def("fuse_attention", [](bool is_on) { fuses_attention() = is_on; });
  m.def("take_counts", [] { return Counts::take(); });
  // Calls a function of Python's with the name of each count, where it happens; None: no longer.
  m.def("listen", [](py::object function) {
    if (function.is_none()) return Counts::tell(nullptr);
    auto* held = new py::object(std::move(function));  // kept: a thread may still be calling it
    Counts::tell(std::make_shared<Counts::Listener>([held](const std::string& name) {
      py::gil_scoped_acquire gil;
      (*held)(name);
    }));
  });
  m.def("holds", [](uintptr_t address) {
    try {
      return Memory::get().device_of(reinterpret_cast<void*>(address));
    } catch (const c10::Error&) {
      return -1;
    }
  });
  m.def("delay", [](uint64_t seed, double probability, double longest_s, double copy_s) {
    auto& delays = Delays::get();
    std::lock_guard<std::mutex> lock(delays.mutex);
    delays.seed = seed, delays.probability = probability, delays.longest_s = longest_s, delays.copy_s = copy_s;
    delays.version++;
  });
}
