// What an operation does with its arguments, and what its results look like, known without its data.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <sstream>
#include <unordered_map>

#include "tensors.h"

namespace host_device {

using Stack = torch::jit::Stack;

// Replaces every tensor in the arguments of a call.
template <typename Change>
void change_tensors(Stack& stack, size_t begin, Change change) {
  for (size_t i = begin; i < stack.size(); i++) {
    c10::IValue& value = stack[i];
    if (value.isTensor()) {
      value = change(value.toTensor(), i - begin);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor, i - begin));
      value = changed;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> changed;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor, i - begin)) : std::nullopt);
      }
      value = changed;
    }
  }
}

inline bool is_tensors(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::TensorType || type->str() == "Tensor[]";
}

// What a call is, found out once per operation.
struct Kind {
  bool is_view = false, writes_only = false, returns_tensors = true;
  std::vector<bool> is_written;        // arguments
  std::vector<int> written_by_return;  // which argument a return is, or -1
  int generator = -1;                  // which argument, or -1

  explicit Kind(const c10::OperatorHandle& op) {
    const auto& schema = op.schema();
    bool has_out = false;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const auto& argument = schema.arguments()[i];
      is_written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
      has_out = has_out || argument.is_out();
      if (argument.type()->str().find("Generator") != std::string::npos) generator = int(i);
    }
    writes_only = !has_out;
    for (const auto& result : schema.returns()) {
      if (!is_tensors(result.type())) returns_tensors = false;
      int written = -1;
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) is_view = true;
      if (result.alias_info() != nullptr && result.alias_info()->isWrite()) {
        for (size_t i = 0; i < is_written.size(); i++) {
          const auto* info = schema.arguments()[i].alias_info();
          if (is_written[i] && info->beforeSets() == result.alias_info()->beforeSets()) written = int(i);
        }
      }
      if (written < 0) writes_only = false;
      written_by_return.push_back(written);
    }
    TORCH_CHECK(generator >= 0 || !op.hasTag(at::Tag::nondeterministic_seeded),
                "the test device cannot seed ", schema.operator_name());
  }

  static const Kind& of(const c10::OperatorHandle& op) {
    static auto* mutex = new std::mutex;
    static auto* all = new std::map<c10::OperatorName, std::unique_ptr<Kind>, Less>;
    std::lock_guard<std::mutex> lock(*mutex);
    auto& kind = (*all)[op.operator_name()];
    if (kind == nullptr) kind = std::make_unique<Kind>(op);
    return *kind;
  }
  struct Less {
    bool operator()(const c10::OperatorName& one, const c10::OperatorName& other) const {
      return std::tie(one.name, one.overload_name) < std::tie(other.name, other.overload_name);
    }
  };
};

struct Shape {
  bool is_defined;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;

  explicit Shape(const at::Tensor& tensor) : is_defined(tensor.defined()) {
    if (is_defined) sizes = tensor.sizes().vec(), strides = tensor.strides().vec(), dtype = tensor.scalar_type();
  }
  static void write(std::ostream& to, const at::Tensor& tensor) {
    if (!tensor.defined()) return void(to << 'u');
    to << tensor.device().is_cpu() << tensor.unsafeGetTensorImpl()->is_wrapped_number() << tensor.scalar_type()
       << tensor.sizes() << tensor.strides();
  }
};

// What the results of a call look like. Most meta kernels are Python, and slow, so their answers are kept.
struct Shapes {
  struct Result {
    bool is_list;
    std::vector<Shape> shapes;
  };
  bool is_known = false;
  std::vector<Shape> written;  // arguments after the call
  std::vector<Result> results;

  template <typename Find>
  static std::shared_ptr<Shapes> of(const std::string& key, Find find) {
    static auto* mutex = new std::mutex;
    static auto* all = new std::unordered_map<std::string, std::shared_ptr<Shapes>>;
    if (key.empty()) return std::make_shared<Shapes>(find());
    {
      std::lock_guard<std::mutex> lock(*mutex);
      auto found = all->find(key);
      if (found != all->end()) return found->second;
    }
    auto made = std::make_shared<Shapes>(find());  // without the lock: Python may run, and other threads with it
    std::lock_guard<std::mutex> lock(*mutex);
    return all->emplace(key, made).first->second;
  }
};

}  // namespace host_device
