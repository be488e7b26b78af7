// Bucket assignments, against those of PyTorch.
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/ddp/bucket_plan.h"
#include "tests/oracle/ddp/reference.h"

namespace lockstep::ddp_oracle {
namespace {

std::vector<std::size_t> sizes_of(const Node& list) {
  std::vector<std::size_t> result;
  for (const auto item : list.integers()) result.push_back(static_cast<std::size_t>(item));
  return result;
}

struct Table {
  std::vector<at::Tensor> tensors = {};
  std::vector<std::size_t> caps = {};
  std::vector<bool> sparse = {};
  std::vector<std::size_t> order = {};
  std::vector<PlannedBucket> buckets = {};
};

Table table_of(const Node& node) {
  Table table{.caps = sizes_of(node["caps"]), .order = sizes_of(node["order"])};
  for (std::size_t i = 0; i < node["tensors"].size(); ++i) table.tensors.push_back(node["tensors"][i].tensor());
  for (std::size_t i = 0; i < node["sparse"].size(); ++i) table.sparse.push_back(node["sparse"][i].flag());
  const auto limits = sizes_of(node["limits"]);
  for (std::size_t i = 0; i < limits.size(); ++i) {
    table.buckets.push_back({.parameters = sizes_of(node["buckets"][i]), .cap_bytes = limits[i]});
  }
  return table;
}

std::string text_of(const std::vector<PlannedBucket>& buckets) {
  std::vector<std::string> parts;
  for (const auto& bucket : buckets) parts.push_back(str("[", join(bucket.parameters, " "), "]<", bucket.cap_bytes));
  return join(parts, " ");
}

/// Python has no cap for sparse ones either, and writes 0.
void use_our_word_for_no_cap(Table& table) {
  for (auto& bucket : table.buckets) {
    if (!table.sparse.empty() && table.sparse[bucket.parameters[0]]) bucket.cap_bytes = kNoCap;
  }
}

/// Where a parameter was given: PyTorch takes tensors in the order they come, and the indices as their names.
at::Tensor tensor_of(const Table& table, std::size_t index) {
  const auto place = std::find(table.order.begin(), table.order.end(), index) - table.order.begin();
  return table.tensors[table.order.empty() ? index : static_cast<std::size_t>(place)];
}

std::size_t bytes_of(const Table& table, const PlannedBucket& bucket) {
  std::size_t bytes = 0;
  for (const auto index : bucket.parameters) bytes += tensor_of(table, index).nbytes();
  return bytes;
}

/// PyTorch appends what is left over at the end in the order of a hash table, ours in a fixed one.
void sort_leftovers(const Table& table, std::vector<PlannedBucket>& buckets) {
  auto first = buckets.end();
  while (first != buckets.begin() && std::prev(first)->cap_bytes != kNoCap &&
         bytes_of(table, *std::prev(first)) < std::prev(first)->cap_bytes) {
    --first;
  }
  std::sort(first, buckets.end(), [](const auto& one, const auto& other) { return one.parameters < other.parameters; });
}

// DDP-24, DDP-25
TEST(BucketOracle, AssignsLikePython) {
  if (!has_python()) GTEST_SKIP() << kNoPython;
  make_reference(2);
  const auto tables = reference(2)["bucket_tables"].unpacked();
  ASSERT_GT(tables.size(), 0U);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    auto table = table_of(tables[i]);
    use_our_word_for_no_cap(table);
    auto ours = compute_bucket_assignment_by_size(table.tensors, table.caps, table.sparse, table.order);
    if (!table.order.empty()) {
      sort_leftovers(table, table.buckets);
      sort_leftovers(table, ours);
    }
    EXPECT_EQ(text_of(ours), text_of(table.buckets)) << "table " << i;
  }
}

}  // namespace
}  // namespace lockstep::ddp_oracle
