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

}  // namespace host_device

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &host_device::choose_attention)
}
