#include "lockstep/intercept/operator_counter.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/intercept/flops.h"

namespace lockstep {

OperatorCount& OperatorCount::operator+=(const OperatorCount& other) {
  calls += other.calls;
  bytes += other.bytes;
  flops += other.flops;
  return *this;
}

struct OperatorCounter::State {
  struct Entry {
    detail::CountFlops count_flops = nullptr;
    bool is_view = false;
    // Added to without the lock.
    std::atomic<std::int64_t> calls = 0;
    std::atomic<std::int64_t> bytes = 0;
    std::atomic<std::int64_t> flops = 0;

    OperatorCount count() const { return {.calls = calls, .bytes = bytes, .flops = flops}; }
  };
  struct Label {
    std::string name;
    // By the address of the dispatcher's entry: a name would have to be put together for every call.
    std::unordered_map<const c10::OperatorName*, Entry> entries;

    /// Without what was not called since reset().
    void add_to(std::map<std::string, OperatorCount>& counts) const {
      for (const auto& [name, entry] : entries) {
        if (const auto count = entry.count(); count.calls > 0) counts[name->name] += count;
      }
    }
  };

  // Guarded by mutex: autograd's threads count too. Entries stay where they are. Labels in the order they came.
  std::mutex mutex;
  std::vector<std::unique_ptr<Label>> labels;

  Label& label(const std::string& name) {
    const auto found = std::find_if(labels.begin(), labels.end(), [&](const auto& l) { return l->name == name; });
    if (found != labels.end()) return **found;
    labels.push_back(std::make_unique<Label>());
    labels.back()->name = name;
    return *labels.back();
  }
};

namespace {

/// Results that are other handles on the arguments.
bool is_view(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  return !results.empty() && std::all_of(results.begin(), results.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) : 0;
}

std::int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) return bytes_of(value.toTensor());
  std::int64_t bytes = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) bytes += bytes_of(tensor);
  }
  return bytes;
}

}  // namespace

class detail::CounterScope : public OperatorScope {
 public:
  CounterScope(std::shared_ptr<OperatorCounter::State> state, OperatorCounter::State::Label& label)
      : OperatorScope(Sees::kLeaves), state_(std::move(state)), label_(label) {}

  void on_operator(OperatorCall& call) override {
    auto& entry = entry_of(call);
    ++entry.calls;
    if (entry.count_flops != nullptr) entry.flops += entry.count_flops(call);
    if (entry.is_view) return call.proceed();
    std::int64_t bytes = 0;
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) { bytes += bytes_of(tensor); });
    call.proceed();
    const auto& returns = call.schema().returns();
    for (std::size_t i = 0; i < call.result_count(); ++i) {
      // What an operator wrote in place was counted as an argument.
      const bool is_argument = i < returns.size() && returns[i].alias_info() != nullptr;
      if (!is_argument) bytes += bytes_of(call.result(i));
    }
    entry.bytes += bytes;
  }

 private:
  OperatorCounter::State::Entry& entry_of(const OperatorCall& call) {
    const auto& name = call.op().operator_name();
    const std::lock_guard lock(state_->mutex);
    const auto [entry, is_new] = label_.entries.try_emplace(&name);
    if (is_new) {
      entry->second.count_flops = flop_count_of(name);
      entry->second.is_view = is_view(call.schema());
    }
    return entry->second;
  }

  const std::shared_ptr<OperatorCounter::State> state_;
  OperatorCounter::State::Label& label_;
};

namespace {

std::string with_unit(double value, double step, const std::array<const char*, 5>& units) {
  std::size_t unit = 0;
  while (value >= step && unit + 1 < units.size()) {
    value /= step;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text.data();
}

std::string line(const std::string& name, const OperatorCount& count) {
  std::array<char, 256> text{};
  const auto bytes = with_unit(static_cast<double>(count.bytes), 1024, {"B", "KiB", "MiB", "GiB", "TiB"});
  const auto flops = with_unit(static_cast<double>(count.flops), 1000, {"", "K", "M", "G", "T"});
  std::snprintf(text.data(), text.size(), "%-52s %10lld %14s %14s\n", name.c_str(), static_cast<long long>(count.calls),
                bytes.c_str(), flops.c_str());
  return text.data();
}

OperatorCount total_of(const std::map<std::string, OperatorCount>& counts) {
  OperatorCount total;
  for (const auto& [name, count] : counts) total += count;
  return total;
}

}  // namespace

OperatorCounter::OperatorCounter() : state_(std::make_shared<State>()) {}

OperatorCounter::~OperatorCounter() = default;

EnterScope OperatorCounter::count(const std::string& label) {
  const std::lock_guard lock(state_->mutex);
  return EnterScope(std::make_shared<detail::CounterScope>(state_, state_->label(label)));
}

std::map<std::string, OperatorCount> OperatorCounter::counts() const {
  const std::lock_guard lock(state_->mutex);
  std::map<std::string, OperatorCount> counts;
  for (const auto& label : state_->labels) label->add_to(counts);
  return counts;
}

std::map<std::string, OperatorCount> OperatorCounter::counts(const std::string& label) const {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::string> known;
  for (const auto& each : state_->labels) {
    if (each->name == label) {
      std::map<std::string, OperatorCount> counts;
      each->add_to(counts);
      return counts;
    }
    known.push_back(str("'", each->name, "'"));
  }
  TORCH_CHECK(false, "[lockstep/intercept] OperatorCounter: nothing was counted under '", label, "'. Its labels are ",
              known.empty() ? "none" : join(known, ", "), ".");
}

OperatorCount OperatorCounter::total() const {
  return total_of(counts());
}

OperatorCount OperatorCounter::total(const std::string& label) const {
  return total_of(counts(label));
}

std::string OperatorCounter::to_string() const {
  std::vector<std::string> labels;
  {
    const std::lock_guard lock(state_->mutex);
    for (const auto& label : state_->labels) labels.push_back(label->name);
  }
  std::array<char, 256> head{};
  std::snprintf(head.data(), head.size(), "%-52s %10s %14s %14s\n", "operator", "calls", "bytes", "flops");
  std::string text = head.data();
  for (const auto& label : labels) {
    const auto by_name = counts(label);
    if (by_name.empty()) continue;
    std::vector<std::pair<std::string, OperatorCount>> rows(by_name.begin(), by_name.end());
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
      return std::pair(a.second.flops, a.second.bytes) > std::pair(b.second.flops, b.second.bytes);
    });
    if (!label.empty()) text += line(label, total_of(by_name));
    for (const auto& [name, count] : rows) text += line(label.empty() ? name : str("  ", name), count);
  }
  return text + line("all", total());
}

void OperatorCounter::reset() {
  const std::lock_guard lock(state_->mutex);
  // Labels stay: scopes that are counting now refer to them.
  for (const auto& label : state_->labels) {
    for (auto& [name, entry] : label->entries) entry.calls = entry.bytes = entry.flops = 0;
  }
}

}  // namespace lockstep
