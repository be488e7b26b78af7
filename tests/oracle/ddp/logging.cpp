#include "tests/oracle/ddp/logging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <vector>

#include "lockstep/base/str.h"

namespace lockstep::ddp_oracle {
namespace {

/// Does not say how ranks were started, or name another backend or device.
bool is_comparable(const std::string& key, const std::string& backend, c10::Device device) {
  if (key.starts_with("master_")) return false;
  if (!device.is_cpu() && key.find("device") != std::string::npos) return false;
  return backend == "gloo" || (key != "backend_name" && !key.starts_with("gloo_"));
}

/// "2 3, 1" as "1, 2 3".
std::string sorted_parts(const std::string& text) {
  static const std::regex comma(", ");
  std::vector<std::string> parts(std::sregex_token_iterator(text.begin(), text.end(), comma, -1), {});
  std::sort(parts.begin(), parts.end());
  return join(parts, ", ");
}

}  // namespace

ExpectedLog::ExpectedLog(const Node& log, std::string backend, c10::Device device)
    : backend_(std::move(backend)), device_(device) {
  change(log);
}

void ExpectedLog::change(const Node& log) {
  for (const auto& key : log.keys()) {
    if (is_comparable(key, backend_, device_)) values_.insert_or_assign(key, log[key]);
  }
}

void ExpectedLog::expect_in(const c10::DDPLoggingData& ours) const {
  if (values_.empty()) return;  // nothing of PyTorch's to compare with
  const bool has_two_dtypes = values_.at("dtypes").text().find(',') != std::string::npos;
  const bool has_static_graph = values_.contains("static_graph");
  for (const auto& [key, value] : values_) {
    // PyTorch does not count what it reduces at the end of a static graph's first backward.
    if (key == "num_buckets_reduced" && has_static_graph && values_.at("iteration").integer() == 1) continue;
    if (value.is_text()) {
      const auto found = ours.strs_map.find(key);
      ASSERT_NE(found, ours.strs_map.end()) << "there is no " << key;
      // PyTorch's last buckets of the dtypes come in the order of a hash table, ours do not (DDP-25).
      const bool is_unordered = has_two_dtypes && key.starts_with("rebuilt_");
      EXPECT_EQ(is_unordered ? sorted_parts(found->second) : found->second,
                is_unordered ? sorted_parts(value.text()) : value.text())
          << key;
    } else {
      const auto found = ours.ints_map.find(key);
      ASSERT_NE(found, ours.ints_map.end()) << "there is no " << key;
      EXPECT_EQ(found->second, value.integer()) << key;
    }
  }
}

}  // namespace lockstep::ddp_oracle
