// For tests: checkpoints of tiny models whose weights come from a generator that
// tools/make_model_goldens.py has too, as published ones would hold them.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "arch/tensor_table.h"
#include "base/fp8.h"
#include "base/half.h"
#include "base/rng.h"
#include "io/hf_config.h"

namespace oscar {

struct TinyTensor {
  std::string dtype;  // as safetensors names it
  std::vector<int64_t> shape;
  std::string bytes;
};
using TinyTensors = std::map<std::string, TinyTensor>;

class TinyGenerator {
 public:
  explicit TinyGenerator(const ModelConfig& config) : config_(config) {}

  TinyTensors Tensors(const ModelSpec& spec) const {
    TinyTensors out;
    const TensorTable table(spec);
    for (const TensorDecl& decl : table.tensors()) {
      const bool is_minimax = config_.model_type == "minimax_m2";
      // As Qwen3.5-35B-A3B has them; others of its kind have BF16.
      const bool is_state_fp32 = config_.model_type == "qwen3_5_moe" &&
                                 (decl.role == Role::kStateDecay || decl.role == Role::kStateNorm);
      const bool is_fp32 = decl.role == Role::kRouterBias || is_state_fp32 ||
                           (is_minimax && decl.role == Role::kRouter);
      if (config_.model_type == "gpt_oss") {
        if (decl.expert < 0) out[decl.name] = Plain(decl.name, decl.shape, false);
        if (decl.expert == 0)
          AddAllExperts(decl, spec.layer(decl.layer).experts()->num_experts, &out);
        continue;
      }
      if (decl.kind == TensorKind::kMatrix && !config_.quantization_method.empty()) {
        AddFp8(decl, /*bf16_scales=*/!is_minimax, &out);
      } else {
        out[decl.name] = Plain(decl.name, decl.shape, is_fp32, decl.offset);
      }
    }
    if (config_.experts.prediction_layers > 0) {  // a layer that is not read
      out["model.layers." + std::to_string(spec.num_layers()) + ".eh_proj.weight"] =
          Plain("eh_proj", {8, 8}, false);
    }
    if (config_.is_nested) {  // as are these
      out["model.visual.blocks.0.attn.qkv.weight"] = Plain("visual", {8, 8}, false);
      out["mtp.fc.weight"] = Plain("mtp", {8, 8}, false);
    }
    return out;
  }

 private:
  static std::vector<double> Uniform(const std::string& name, size_t count) {
    uint64_t stream = 0xCBF29CE484222325u;
    for (const char c : name) stream = (stream ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
    const Philox rng(20261118, stream);
    std::vector<double> out(count);
    for (size_t i = 0; i < count; ++i) {
      out[i] = (static_cast<double>(rng.Bits(i) >> 16) - 32768.0) / 32768.0;
    }
    return out;
  }
  // Offset and amplitude.
  static std::pair<double, double> ShapeOf(const std::string& name, int64_t inputs) {
    const auto has = [&](const char* text) { return name.find(text) != std::string::npos; };
    if (name.ends_with("A_log")) return {0.0, 1.0};
    if (name.ends_with("dt_bias")) return {-2.0, 2.0};
    if (has("norm")) return {1.0, 0.25};
    if (has("e_score_correction_bias")) return {0.0, 0.2};
    if (name.ends_with(".bias") || name.ends_with("_bias")) return {0.0, 0.5};
    if (name.ends_with(".sinks")) return {0.5, 1.0};
    if (has("embed_tokens")) return {0.0, 0.25};
    double gain = 1.0;
    if (has("lm_head") || name.ends_with("gate.weight") || name.ends_with("router.weight")) {
      gain = 2.0;
    } else if (has("q_proj") || has("k_proj")) {
      gain = 1.5;
    } else if (has("down_proj") || has(".w2.")) {
      gain = 0.7;
    }
    return {0.0, gain * std::sqrt(3.0 / static_cast<double>(inputs))};
  }
  template <typename T>
  static void Append(T value, std::string* bytes) {
    bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  static TinyTensor Numbers(const std::string& name, const std::vector<int64_t>& shape,
                            double offset, double amplitude, bool is_fp32) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    TinyTensor out{is_fp32 ? "F32" : "BF16", shape, {}};
    for (const double u : Uniform(name, count)) {
      const auto value = static_cast<float>(offset + amplitude * u);
      if (is_fp32) {
        Append(value, &out.bytes);
      } else {
        Append(ToBf16(value).bits, &out.bytes);
      }
    }
    return out;
  }
  // `added`: what the model adds to the numbers that are stored.
  static TinyTensor Plain(const std::string& name, const std::vector<int64_t>& shape, bool is_fp32,
                          double added = 0.0) {
    const auto [offset, amplitude] = ShapeOf(name, shape.back());
    return Numbers(name, shape, offset - added, amplitude, is_fp32);
  }
  // The tensor of all experts of which `decl` is the first one's part, as gpt-oss has it.
  void AddAllExperts(const TensorDecl& decl, int64_t experts, TinyTensors* out) const {
    std::string name = decl.name;
    name.erase(name.find(".experts.0.") + std::strlen(".experts"), 2);
    const int64_t outputs = decl.shape[0];
    if (decl.shape.size() == 1) {
      (*out)[name] = Plain(name, {experts, outputs}, false);
      return;
    }
    const int64_t inputs = decl.shape[1];
    const auto [offset, amplitude] = ShapeOf(name, inputs);
    if (config_.quantization_method.empty()) {
      (*out)[name] = Numbers(name, {experts, inputs, outputs}, offset, amplitude, false);
      return;
    }
    const int64_t blocks = inputs / 32;
    TinyTensor codes{"U8", {experts, outputs, blocks, 16}, {}};
    const auto count = static_cast<size_t>(experts * outputs * inputs);
    const std::vector<double> random = Uniform(name + "_blocks", count);
    for (size_t i = 0; i < count; i += 2) {
      const auto code = [&](size_t at) { return static_cast<int>((random[at] + 1.0) * 8.0); };
      codes.bytes.push_back(static_cast<char>(code(i) | code(i + 1) << 4));
    }
    (*out)[name + "_blocks"] = std::move(codes);
    TinyTensor scales{"U8", {experts, outputs, blocks}, {}};
    const double middle = 127.0 + std::round(std::log2(amplitude / std::sqrt(3.0) / 2.93));
    for (const double u : Uniform(name + "_scales", count / 32)) {
      scales.bytes.push_back(static_cast<char>(middle + std::floor(u + 1.0) - 1.0));
    }
    (*out)[name + "_scales"] = std::move(scales);
  }
  void AddFp8(const TensorDecl& decl, bool bf16_scales, TinyTensors* out) const {
    TinyTensor codes{"F8_E4M3", decl.shape, {}};
    for (const double u : Uniform(decl.name, decl.num_elements())) {
      codes.bytes.push_back(static_cast<char>(ToF8E4M3(static_cast<float>(300.0 * u))));
    }
    (*out)[decl.name] = std::move(codes);
    const bool blocks = config_.quantization_method == "fp8";
    const std::string name = decl.name + (blocks ? "_scale_inv" : "_scale");
    const double amplitude = ShapeOf(decl.name, decl.shape[1]).second;
    const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const std::vector<int64_t> shape =
        blocks ? std::vector{up(decl.shape[0], config_.fp8_block_rows),
                             up(decl.shape[1], config_.fp8_block_columns)}
               : std::vector{decl.shape[0], int64_t{1}};
    (*out)[name] = Numbers(name, shape, amplitude / 300.0, amplitude / 300.0 * 0.5, !bf16_scales);
  }

  const ModelConfig& config_;
};

// A directory with a config and the weights that it asks for, removed at the end.
class TinyCheckpoint {
 public:
  // `change` may alter what is written.
  explicit TinyCheckpoint(const std::string& config_text,
                          const std::function<void(TinyTensors*)>& change = {}) {
    static int count = 0;
    directory_ = std::filesystem::path(testing::TempDir()) /
                 ("tiny_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(directory_);
    std::ofstream(directory_ / "config.json") << config_text;
    const auto config = ReadModelConfig(directory_);
    if (!config.has_value()) {
      ADD_FAILURE() << config.error().ToString();
      return;
    }
    const auto spec = MakeModelSpec(*config);
    if (!spec.has_value()) {
      ADD_FAILURE() << spec.error().ToString();
      return;
    }
    TinyTensors tensors = TinyGenerator(*config).Tensors(*spec);
    if (change) change(&tensors);
    nlohmann::json header = nlohmann::json::object();
    uint64_t at = 0;
    for (const auto& [name, tensor] : tensors) {
      header[name] = {{"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"data_offsets", {at, at + tensor.bytes.size()}}};
      at += tensor.bytes.size();
    }
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream file(directory_ / "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << text;
    for (const auto& [name, tensor] : tensors) file << tensor.bytes;
  }
  ~TinyCheckpoint() { std::filesystem::remove_all(directory_); }
  TinyCheckpoint(const TinyCheckpoint&) = delete;
  TinyCheckpoint& operator=(const TinyCheckpoint&) = delete;

  std::string path() const { return directory_.string(); }

 private:
  std::filesystem::path directory_;
};

}  // namespace oscar
