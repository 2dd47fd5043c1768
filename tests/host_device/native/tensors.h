// Tensors of the test device, those that kernels see of them, and copies.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/empty_strided.h>

#include "device.h"

namespace host_device {

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// A tensor of the CPU over the same bytes, for kernels. It keeps nothing alive: as on CUDA, memory may be freed and
// handed out again before a kernel that was launched has run, in the order of its own stream.
inline at::Tensor for_kernel(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  const auto& storage = tensor.storage();
  char* bytes = Memory::get().of_kernels(storage.data());
  auto data = c10::DataPtr(bytes, c10::kCPU);
  auto same = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  auto* impl = seen.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return seen;
}

inline at::Tensor make(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int device) {
  OnDevice on(device);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceAllocator::get(), keys, dtype);
}

// Waits for what this thread has launched into its current stream.
inline void drain(int device, const std::string& reason) {
  Counts::add(reason);
  Streams::current(device).synchronize();
}

inline int device_of(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : Streams::device();
}

inline at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                                      std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                                      std::optional<at::MemoryFormat> format) {
  OnDevice on(device_of(device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &DeviceAllocator::get(), keys,
                                   dtype.value_or(at::kFloat), format);
}

inline at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  return make(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), dtype.value_or(at::kFloat),
              device_of(device));
}

inline at::Tensor view_of(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                          caffe2::TypeMeta dtype) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

inline at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                             std::optional<c10::SymInt> offset) {
  return view_of(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                 offset ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset(), self.dtype());
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride; use .reshape");
  return view_of(self, sizes, *strides, self.storage_offset(), self.dtype());
}

inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}

inline at::Tensor alias(const at::Tensor& self) {
  return view_of(self, self.sizes(), self.strides(), self.storage_offset(), self.dtype());
}

inline void resize(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  size_t last = 1;
  for (size_t i = 0; i < sizes.size(); i++) last += sizes[i] ? (sizes[i] - 1) * strides[i] : 0;
  size_t needed = (c10::multiply_integers(sizes) ? last + self.storage_offset() : 0) * self.itemsize();
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int64_t i = int64_t(sizes.size()) - 2; i >= 0; i--) strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  resize(self, sizes, strides);
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                               c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                              offset.guard_int(__FILE__, __LINE__));
  return self;
}

inline at::Tensor& set_source(at::Tensor& self, at::Storage storage) {
  std::vector<c10::SymInt> size{int64_t(storage.nbytes() / self.itemsize())}, stride{1};
  return set_storage(self, std::move(storage), 0, size, stride);
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  Memory::get().record(self.storage().data(), stream);
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  drain(self.device().index(), "item");
  return at::_local_scalar_dense(for_kernel(self));
}

// Whether bytes can be moved as they are: what CUDA copies without a temporary.
inline bool is_plain(const at::Tensor& one, const at::Tensor& other) {
  return one.dtype() == other.dtype() && one.strides() == other.strides() && one.is_non_overlapping_and_dense() &&
         one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

inline char* host_bytes(const at::Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(tensor.storage().data())) + tensor.storage_offset() * tensor.itemsize();
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) return dst;
  if (is_ours(self) && is_ours(dst)) {
    int device = dst.device().index();
    auto source = for_kernel(self), target = for_kernel(dst);
    if (self.device() != dst.device()) {  // each device's stream waits for the other's, as torch does on CUDA
      auto& there = Streams::current(self.device().index());
      Streams::current(device).wait_for(there.mark());
      Streams::current(device).push([=] { target.copy_(source); });
      there.wait_for(Streams::current(device).mark());
    } else {
      Streams::current(device).push([=] { target.copy_(source); });
    }
    return dst;
  }
  const at::Tensor& host = is_ours(self) ? dst : self;
  int device = (is_ours(self) ? self : dst).device().index();
  if (is_ours(self) && self.dtype() != dst.dtype()) {  // converted on the device
    auto converted = make(self.sizes(), self.strides(), dst.scalar_type(), device);
    copy_from(self, converted, true);
    return copy_from(converted, dst, non_blocking);
  }
  if (is_ours(dst) && self.dtype() != dst.dtype()) {  // converted by the host, at once and in memory of its own
    return copy_from(self.to(dst.scalar_type()), dst, non_blocking);
  }
  bool is_locked = Locked::get().holds(host_bytes(host), host.numel() * host.itemsize());
  auto& stream = Streams::current(device);
  size_t nbytes = self.numel() * self.itemsize();
  if (non_blocking && is_locked && is_plain(self, dst)) {
    char* from = is_ours(self) ? Memory::get().of_kernels(self.storage().data()) : host_bytes(self);
    char* to = is_ours(dst) ? Memory::get().of_kernels(dst.storage().data()) : host_bytes(dst);
    if (is_ours(self)) from += self.storage_offset() * self.itemsize();
    if (is_ours(dst)) to += dst.storage_offset() * dst.itemsize();
    char* here = host_bytes(host);  // CUDA's driver may fault here, or keep what it has mapped: both are the caller's fault
    stream.push([=] {
      if (!Locked::get().holds(here, nbytes)) Counts::add("copy of memory unlocked under it");
      std::memcpy(to, from, nbytes);
    }, true);
    PinnedAllocator::get().note_copy(host_bytes(host), Guard().getStream({kType, static_cast<c10::DeviceIndex>(device)}));
    return dst;
  }
  if (non_blocking) Counts::add("copy of unlocked memory");
  stream.push([] {}, true);
  drain(device, "copy");
  for_kernel(dst).copy_(for_kernel(self));
  return dst;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (is_ours(dst)) {
    resize(dst, self.sizes(), self.strides());
  } else {
    dst.resize_(self.sizes());
  }
  return copy_from(self, dst, false);
}

}  // namespace host_device
