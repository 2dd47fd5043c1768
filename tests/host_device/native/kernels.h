// Every operation that is not a view or a copy: the CPU's kernel, launched into the current stream.
//
// The meta kernel says what the results look like, so launching need not wait for data. Operations without one, and
// those that return numbers, wait for the stream and run at once.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shapes.h"

namespace host_device {

inline void enter_worker() {  // kernels run below autograd and autocast
  static thread_local at::AutoDispatchBelowADInplaceOrView below_autograd;
  static thread_local c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
}

class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), kind_(Kind::of(op)), stack_(stack), begin_(stack->size() - op.schema().arguments().size()) {
    find_device();
  }

  void run() {
    OnDevice on(device_);
    Streams::current(device_).raise();
    given_.assign(stack_->begin() + begin_, stack_->end());
    if (kind_.is_view) return finish(run_now());
    seed();
    note_mask();
    if (kind_.writes_only) {
      launch({});
    } else if (!kind_.returns_tensors || !run_meta()) {
      drain(device_, "drain of " + op_.schema().name());
      finish(run_now());
    }
  }

 private:
  void find_device() {
    device_ = -1;
    std::optional<at::Device> named;
    auto arguments = torch::jit::last(*stack_, stack_->size() - begin_);
    Stack seen(arguments.begin(), arguments.end());
    change_tensors(seen, 0, [this](const at::Tensor& tensor, size_t) {
      if (is_ours(tensor)) {
        TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(),
                    "Expected all tensors to be on the same device, but found some on two, in ", op_.schema().name());
        device_ = tensor.device().index();
      } else if (tensor.defined()) {
        TORCH_CHECK(tensor.dim() == 0 || op_.schema().name().find("index") != std::string::npos,
                    "Expected all tensors to be on the same device, but found a CPU tensor of ", tensor.sizes(), " in ",
                    op_.schema().name());
      }
      return tensor;
    });
    for (const auto& value : seen)
      if (value.isDevice() && value.toDevice().type() == kType) named = value.toDevice();
    if (device_ < 0) device_ = device_of(named);
  }

  // Writing to where a mask says looks up those places first, on CUDA by `nonzero`, which the host waits for. One number
  // to write takes `masked_fill` instead (aten/native/TensorAdvancedIndexing.cpp).
  void note_mask() {
    const auto& name = op_.schema().name();
    if (name != "aten::index_put_" && name != "aten::_index_put_impl_") return;
    bool has_mask = false;
    change_tensors(given_, 0, [&](const at::Tensor& tensor, size_t i) {
      if (i == 1 && is_ours(tensor)) has_mask = has_mask || tensor.scalar_type() == at::kBool;
      return tensor;
    });
    bool is_fill = given_[2].toTensor().numel() == 1 && !given_[3].toBool();
    if (has_mask && !is_fill) Counts::add("nonzero of a mask");
  }

  // Random operations draw when they are launched, as on CUDA: then the order of streams changes no number.
  void seed() {
    if (kind_.generator < 0) return;
    auto& value = given_[kind_.generator];
    auto generator = value.isNone() ? Generator::of(device_) : value.toGenerator();
    TORCH_CHECK(generator.device() == c10::Device(kType, device_), "Expected a generator of device ", device_,
                " but found one of ", generator.device());
    auto drawn = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw();
    value = at::make_generator<at::CPUGeneratorImpl>(drawn);
  }

  Stack for_kernels() {
    Stack stack(given_.begin(), given_.end());
    change_tensors(stack, 0, [](const at::Tensor& tensor, size_t) {
      if (is_ours(tensor) || !tensor.defined()) return for_kernel(tensor);
      auto copy = tensor.clone();  // a number of the host's is read when the kernel is launched
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    });
    for (auto& value : stack)
      if (value.isDevice()) value = c10::Device(c10::kCPU);
    return stack;
  }

  Stack run_now() {
    seen_ = for_kernels();
    Stack stack = seen_;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }

  // Puts results of a kernel that has run in place of the arguments: views of these, or new tensors of the device.
  void finish(Stack results) {
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // as the kernel saw it, and ours
    std::vector<at::Tensor> ours;
    Stack given(given_.begin(), given_.end()), seen = seen_;
    change_tensors(given, 0, [&](const at::Tensor& tensor, size_t) { return ours.push_back(tensor), tensor; });
    size_t next = 0;
    change_tensors(seen, 0, [&](const at::Tensor& tensor, size_t) {
      const auto& mine = ours[next++];
      if (is_ours(mine)) pairs.emplace_back(tensor, mine);
      return tensor;
    });
    for (auto& [saw, mine] : pairs) {  // out= that was resized
      if (saw.storage().data() != Memory::get().of_kernels(mine.storage().data())) {
        resize(mine, saw.sizes(), saw.strides());
        for_kernel(mine).copy_(saw);
      } else if (saw.sizes() != mine.sizes()) {
        resize(mine, saw.sizes(), saw.strides());
      }
    }
    change_tensors(results, 0, [&](const at::Tensor& result, size_t) -> at::Tensor {
      if (!result.defined()) return result;
      for (auto& [saw, mine] : pairs) {
        if (result.is_same(saw)) return mine;
        if (result.storage().data() != nullptr && result.storage().data() == saw.storage().data()) {
          return view_of(mine, result.sizes(), result.strides(), result.storage_offset(), result.dtype());
        }
      }
      auto dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
      auto made = make(dense.sizes(), dense.strides(), dense.scalar_type(), device_);
      for_kernel_now(made, dense);
      return made;
    });
    put(std::move(results));
  }

  // New memory may be poisoned in its stream's order, so bytes are put there in that order too.
  void for_kernel_now(const at::Tensor& made, const at::Tensor& bytes) {
    if (made.numel() == 0) return;
    auto target = for_kernel(made);
    Streams::current(device_).push([target, bytes] { target.copy_(bytes); });
  }

  void put(Stack results) {
    stack_->resize(begin_);
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  // False where the operation has no meta kernel, or one that needs the data.
  bool run_meta() {
    auto shapes = Shapes::of(meta_key(), [this] { return find_shapes(); });
    if (!shapes->is_known) return false;
    size_t next = 0;
    Stack given(given_.begin(), given_.end());
    change_tensors(given, 0, [&](const at::Tensor& tensor, size_t i) {
      if (is_ours(tensor) && kind_.is_written[i]) {
        const auto& shape = shapes->written.at(next++);
        if (tensor.sizes() != shape.sizes) resize(tensor, shape.sizes, shape.strides);
      }
      return tensor;
    });
    std::vector<at::Tensor> targets;
    auto make_one = [&](const Shape& shape) -> at::Tensor {
      if (!shape.is_defined) return {};
      targets.push_back(make(shape.sizes, shape.strides, shape.dtype, device_));
      return targets.back();
    };
    for (size_t i = 0; i < shapes->results.size(); i++) {
      const auto& result = shapes->results[i];
      if (kind_.written_by_return[i] >= 0) {
        made_.emplace_back();
      } else if (result.is_list) {
        c10::List<at::Tensor> list;
        for (const auto& shape : result.shapes) list.push_back(make_one(shape));
        made_.emplace_back(list);
      } else {
        made_.emplace_back(make_one(result.shapes.at(0)));
      }
    }
    launch(targets);
    return true;
  }

  // All that shapes of results depend on, or nothing where an argument is of an unusual kind.
  std::string meta_key() {
    std::ostringstream key;
    key << op_.operator_name() << std::hexfloat;
    for (const auto& value : given_) {
      key << '|';
      if (value.isTensor()) {
        Shape::write(key, value.toTensor());
      } else if (value.isTensorList() || value.isOptionalTensorList()) {
        Stack one{value};
        change_tensors(one, 0, [&](const at::Tensor& tensor, size_t) { return Shape::write(key, tensor), tensor; });
      } else if (value.isNone() || value.isGenerator()) {
        key << 'n';
      } else if (value.isInt() || value.isBool() || value.isDouble() || value.isIntList() || value.isBoolList() ||
                 value.isDoubleList() || value.isString() || value.isDevice()) {
        key << value;
      } else {
        return "";
      }
    }
    return key.str();
  }

  Shapes find_shapes() {
    Stack stack(given_.begin(), given_.end());
    std::vector<at::Tensor> written;
    change_tensors(stack, 0, [&](const at::Tensor& tensor, size_t i) -> at::Tensor {
      if (!is_ours(tensor)) return tensor;
      at::Tensor meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
      if (kind_.is_written[i]) written.push_back(meta);
      return meta;
    });
    for (auto& value : stack)
      if (value.isDevice()) value = c10::Device(c10::kMeta);
    if (kind_.generator >= 0) stack[kind_.generator] = c10::IValue();
    Shapes shapes;
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return shapes;
    }
    shapes.is_known = true;
    for (const auto& meta : written) shapes.written.emplace_back(meta);
    for (const auto& value : stack) {
      Shapes::Result result{value.isTensorList(), {}};
      Stack one{value};
      change_tensors(one, 0, [&](const at::Tensor& meta, size_t) { return result.shapes.emplace_back(meta), meta; });
      shapes.results.push_back(std::move(result));
    }
    return shapes;
  }

  void launch(const std::vector<at::Tensor>& made) {
    std::vector<at::Tensor> targets;
    for (const auto& tensor : made) targets.push_back(for_kernel(tensor));
    auto run = [op = op_, stack = for_kernels(), targets, &kind = kind_, has_grad = at::GradMode::is_enabled(),
                threads = at::get_num_threads()]() mutable {
      at::AutoGradMode mode(has_grad);
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
      Stack kept = stack;  // torch 2.11 gives several out= arguments back after it has dropped its stack's hold on them
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      size_t next = 0;
      change_tensors(stack, 0, [&](const at::Tensor& result, size_t i) {
        if (result.defined() && kind.written_by_return[i] < 0) {
          const auto& target = targets.at(next++);
          TORCH_CHECK(target.sizes() == result.sizes() && target.dtype() == result.dtype(), op.schema().name(),
                      " gave ", result.sizes(), " and its meta kernel ", target.sizes());
          if (result.numel()) target.copy_(result);
        }
        return result;
      });
    };
    Streams::current(device_).push(std::move(run));
    Stack results;
    for (size_t i = 0; i < kind_.written_by_return.size(); i++) {
      int written = kind_.written_by_return[i];
      results.push_back(written >= 0 ? (*stack_)[begin_ + written] : made_.at(i));
    }
    put(std::move(results));
  }

  const c10::OperatorHandle op_;
  const Kind& kind_;
  Stack* stack_;
  size_t begin_;
  int device_;
  Stack given_, seen_, made_;
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) { Launch(op, stack).run(); }

// What has no kernel on the CPU, or not for what an accelerator takes.

inline at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  bool is_integral = at::isIntegralType(self.scalar_type(), true);
  Stack stack{is_integral ? self.to(at::kFloat) : self, bins, min, max};
  fallback(op, &stack);
  auto counts = stack[0].toTensor();
  return is_integral ? counts.to(self.scalar_type()) : counts;
}

inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& self, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {self.clone(), at::empty_like(self, at::kBool).fill_(true)};
  auto mask = at::empty_like(self, at::kBool).bernoulli_(1 - p);
  return {self.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// CUDA has a kernel of bf16 whose offsets stay on the device; products of other dtypes read them on the host there too
// (aten/native/cuda/GroupedBlas.cpp).
inline at::Tensor grouped_mm(const at::Tensor& self, const at::Tensor& other, const std::optional<at::Tensor>& offsets,
                             const std::optional<at::Tensor>& bias, std::optional<at::ScalarType> dtype) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_grouped_mm", "");
  Stack stack{self, other, offsets, bias, dtype};
  if (self.scalar_type() == at::kBFloat16) {
    fallback(op, &stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CompositeExplicitAutograd), &stack);
  }
  return stack[0].toTensor();
}

// A reduction in another dtype: CUDA's kernels convert on the way from 16 bits to 32, and otherwise make a copy of all of
// the tensor first (make_reduction and its like in ATen/native/ReduceOpsUtils.h and SharedReduceOps.h). The CPU's do not.
template <int kDtype>
void reduction(const c10::OperatorHandle& op, Stack* stack) {
  auto first = stack->end() - op.schema().arguments().size();
  auto self = first->toTensor();
  if (const auto& dtype = *(first + kDtype); !dtype.isNone()) {
    bool is_fused = self.itemsize() == 2 && dtype.toScalarType() == at::kFloat;
    if (!is_fused) *first = self.to(dtype.toScalarType());
  }
  fallback(op, stack);
}

template <int kIsBackward>
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static auto forward = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  static auto backward = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  if (kIsBackward) {  // the same arguments, but for the sizes of the bias
    auto weight = (*stack)[stack->size() - 8].toTensor();
    bool is_transposed = (*stack)[stack->size() - 4].toBool();
    int64_t groups = (*stack)[stack->size() - 2].toInt();
    std::vector<int64_t> sizes{is_transposed ? weight.size(1) * groups : weight.size(0)};
    stack->insert(stack->end() - 7, c10::IValue(sizes));
  }
  fallback(kIsBackward ? backward : forward, stack);
}

}  // namespace host_device
