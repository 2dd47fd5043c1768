// Fused attention of the test device: one operation for torch, whose backward makes the weights again, as flash does.
//
// Torch's math is what runs by default. Dropout is drawn from a seed that the forward returns.
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include "kernels.h"

namespace host_device {

inline std::atomic<bool>& fuses_attention() {
  static std::atomic<bool> is_on{false};
  return is_on;
}

inline int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(fuses_attention() ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

class Attention {
 public:
  Attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
            double dropout, bool is_causal, int64_t seed, std::optional<double> scale)
      : query_(query.to(at::kFloat)), key_(of_every_head(key)), value_(of_every_head(value)), dropout_(dropout),
        scale_(scale.value_or(1 / std::sqrt(double(query.size(-1))))) {
    scores_ = at::matmul(query_, key_.transpose(-2, -1)).mul_(scale_);
    if (bias.defined()) scores_.add_(bias.to(at::kFloat));
    if (is_causal) {
      auto later = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).triu_(1);
      scores_.masked_fill_(later, -std::numeric_limits<double>::infinity());
    }
    if (dropout_ > 0) {
      auto generator = at::make_generator<Generator>(query.device().index());
      generator.set_current_seed(seed);
      kept_ = at::empty_like(scores_).bernoulli_(1 - dropout_, generator).div_(1 - dropout_);
    }
  }

  at::Tensor logsumexp() const { return at::logsumexp(scores_, -1); }

  at::Tensor forward(const at::Tensor& logsumexp) const { return at::matmul(dropped(weights(logsumexp)), value_); }

  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& out,
                                                                      const at::Tensor& logsumexp,
                                                                      const at::Tensor& key) const {
    auto chances = weights(logsumexp);
    auto of_value = at::matmul(dropped(chances).transpose(-2, -1), grad);
    auto of_weights = dropped(at::matmul(grad, value_.transpose(-2, -1)));
    auto of_scores = chances.mul(of_weights.sub(grad.mul(out).sum(-1, true)));
    auto of_query = at::matmul(of_scores, key_).mul_(scale_);
    auto of_key = at::matmul(of_scores.transpose(-2, -1), query_).mul_(scale_);
    return {of_query, of_its_heads(of_key, key), of_its_heads(of_value, key), of_scores};
  }

 private:
  at::Tensor of_every_head(const at::Tensor& tensor) const {  // grouped heads
    auto wide = tensor.to(at::kFloat);
    int64_t group = query_.dim() < 3 ? 1 : query_.size(-3) / tensor.size(-3);
    return group == 1 ? wide : wide.repeat_interleave(group, -3);
  }
  static at::Tensor of_its_heads(const at::Tensor& grad, const at::Tensor& key) {
    if (grad.dim() < 3 || grad.size(-3) == key.size(-3)) return grad;
    return grad.unflatten(-3, {key.size(-3), -1}).sum(-3);
  }
  at::Tensor weights(const at::Tensor& logsumexp) const {  // a row in which all is masked has none
    auto sums = logsumexp.unsqueeze(-1);
    return scores_.sub(sums).exp_().masked_fill_(sums.isneginf(), 0);
  }
  at::Tensor dropped(const at::Tensor& weights) const { return kept_.defined() ? weights.mul(kept_) : weights; }

  at::Tensor query_, key_, value_, scores_, kept_;
  double dropout_, scale_;
};

using Attended = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                            at::Tensor, at::Tensor>;

inline Attended attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::optional<at::Tensor>& bias, double dropout, bool is_causal, bool,
                          std::optional<double> scale) {
  Counts::add("fused attention");
  auto& generator = Generator::of(query.device().index());
  auto seed = dropout > 0 ? static_cast<int64_t>(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw()) : 0;
  Attention run(query, key, value, bias.value_or(at::Tensor()), dropout, is_causal, seed, scale);
  auto sums = run.logsumexp();
  return {run.forward(sums).to(query.scalar_type()), sums, {}, {}, query.size(-2), key.size(-2),
          at::scalar_tensor(seed, at::kLong), at::scalar_tensor(0, at::kLong), {}};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4> wanted, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const at::Tensor& seed, const at::Tensor&, std::optional<double> scale) {
  Counts::add("fused attention backward");
  Attention run(query, key, value, bias, dropout, is_causal, seed.item<int64_t>(), scale);
  auto [of_query, of_key, of_value, of_bias] =
      run.backward(grad.to(at::kFloat), out.to(at::kFloat), logsumexp, key);
  return {of_query.to(query.scalar_type()), of_key.to(key.scalar_type()), of_value.to(value.scalar_type()),
          wanted[3] ? of_bias.sum_to_size(bias.sizes()).to(bias.scalar_type()) : at::Tensor()};
}

// Variable-length flash attention, aten::_flash_attention_forward and _backward: documents of one flat row, whose
// offsets are read when the kernel runs, as on CUDA. Boxed, since their last arguments differ among versions of torch.

struct Varlen {
  static Varlen of(const Stack& stack, size_t begin, size_t starts, size_t options) {
    const auto tensor = [&](size_t i) { return stack.at(begin + i).toTensor(); };
    const auto &left = stack.at(begin + options + 1), &right = stack.at(begin + options + 2);
    TORCH_CHECK(tensor(starts).scalar_type() == at::kInt, "offsets of documents have to be int32");
    return {tensor(starts), stack.at(begin + options).toOptional<double>(), left.isNone() ? -1 : left.toInt(),
            !right.isNone() && right.toInt() == 0};
  }
  // Hides what is behind a window in a document of this length; nothing if it has none.
  static at::Tensor behind(int64_t left, int64_t length) {
    if (left < 0 || left + 1 >= length) return {};
    auto hidden = at::ones({length, length}, at::kBool).tril_(-left - 1);
    return at::zeros({length, length}, at::kFloat).masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  }
  static void check(const at::Tensor& query) {
    auto dtype = query.scalar_type();
    TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "FlashAttention only support fp16 and bf16 data type");
  }
  template <typename F>
  static void each(const at::Tensor& starts, F run) {
    const auto* at = starts.const_data_ptr<int32_t>();
    for (int64_t i = 0; i + 1 < starts.numel(); i++)
      if (at[i] < at[i + 1]) run(at[i], at[i + 1] - at[i]);
  }
  at::Tensor starts;
  std::optional<double> scale;
  int64_t left;
  bool sees_no_later;
};

inline void varlen_attention(const c10::OperatorHandle& op, Stack* stack) {
  Counts::add("varlen attention");
  size_t begin = stack->size() - op.schema().arguments().size();
  auto query = (*stack)[begin].toTensor(), key = (*stack)[begin + 1].toTensor(), value = (*stack)[begin + 2].toTensor();
  Varlen::check(query);
  auto varlen = Varlen::of(*stack, begin, 3, 10);
  auto out = at::empty_like(query);
  auto sums = at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  bool is_causal = (*stack)[begin + 8].toBool() || varlen.sees_no_later;
  auto run = [q = for_kernel(query), k = for_kernel(key), v = for_kernel(value), starts = for_kernel(varlen.starts),
              o = for_kernel(out), s = for_kernel(sums), is_causal, scale = varlen.scale, left = varlen.left] {
    Varlen::each(starts, [&](int64_t at, int64_t length) {
      auto part = [&](const at::Tensor& tensor) { return tensor.narrow(0, at, length).transpose(0, 1); };
      Attention one(part(q), part(k), part(v), Varlen::behind(left, length), 0, is_causal, 0, scale);
      auto found = one.logsumexp();
      part(o).copy_(one.forward(found));
      s.narrow(1, at, length).copy_(found);
    });
  };
  Streams::current(query.device().index()).push(std::move(run));
  auto state = at::zeros({2}, query.options().dtype(at::kUInt64));
  auto unused = at::empty({0}, query.options());
  stack->resize(begin);
  for (const auto& each : {out, sums, state, unused, unused}) stack->emplace_back(each);
}

inline void varlen_attention_backward(const c10::OperatorHandle& op, Stack* stack) {
  Counts::add("varlen attention backward");
  size_t begin = stack->size() - op.schema().arguments().size();
  std::vector<at::Tensor> given, made;  // grad, query, key, value, out, sums
  for (size_t i = 0; i < 6; i++) given.push_back(for_kernel((*stack)[begin + i].toTensor()));
  auto varlen = Varlen::of(*stack, begin, 6, 14);
  for (size_t i = 1; i < 4; i++) made.push_back(at::empty_like((*stack)[begin + i].toTensor()));
  bool is_causal = (*stack)[begin + 11].toBool() || varlen.sees_no_later;
  auto run = [given, targets = std::vector<at::Tensor>{for_kernel(made[0]), for_kernel(made[1]), for_kernel(made[2])},
              starts = for_kernel(varlen.starts), is_causal, scale = varlen.scale, left = varlen.left] {
    Varlen::each(starts, [&](int64_t at, int64_t length) {
      auto part = [&](const at::Tensor& tensor) { return tensor.narrow(0, at, length).transpose(0, 1); };
      Attention one(part(given[1]), part(given[2]), part(given[3]), Varlen::behind(left, length), 0, is_causal, 0,
                    scale);
      auto [of_query, of_key, of_value, _] = one.backward(part(given[0]).to(at::kFloat), part(given[4]).to(at::kFloat),
                                                          given[5].narrow(1, at, length), part(given[2]));
      part(targets[0]).copy_(of_query);
      part(targets[1]).copy_(of_key);
      part(targets[2]).copy_(of_value);
    });
  };
  Streams::current(made[0].device().index()).push(std::move(run));
  stack->resize(begin);
  for (const auto& each : made) stack->emplace_back(each);
}

}  // namespace host_device

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &host_device::choose_attention)
}
