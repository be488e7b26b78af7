#include "lockstep/ddp/snapshot.h"

#include <c10/core/ScalarType.h>

#include <functional>
#include <map>
#include <sstream>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

constexpr char kHeader[] = "lockstep ddp snapshot 1";
constexpr char kPlanKey[] = "bucket_plan";

std::string text_of(bool value) {
  return value ? "true" : "false";
}
std::string text_of(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return std::move(out).str();
}
std::string text_of(at::ScalarType value) {
  return std::to_string(static_cast<int>(value));
}

bool bool_of(const std::string& text) {
  TORCH_CHECK(text == "true" || text == "false", "[lockstep/ddp] snapshot: '", text, "' is neither true nor false");
  return text == "true";
}
at::ScalarType dtype_of(const std::string& text) {
  return static_cast<at::ScalarType>(std::stoi(text));
}

/// A setting: how it is written (nothing if it is unset) and read.
struct Field {
  std::function<std::vector<std::string>(const DdpSnapshot&)> write;
  std::function<void(DdpSnapshot&, const std::string&)> read;
};

template <class Get>
Field flag(Get get) {
  return {[get](const DdpSnapshot& snapshot) {
            return std::vector{text_of(static_cast<bool>(get(const_cast<DdpSnapshot&>(snapshot))))};
          },
          [get](DdpSnapshot& snapshot, const std::string& text) { get(snapshot) = bool_of(text); }};
}

template <class Get, class Parse>
Field optional_value(Get get, Parse parse) {
  return {[get](const DdpSnapshot& snapshot) {
            const auto& value = get(const_cast<DdpSnapshot&>(snapshot));
            return value ? std::vector{text_of(*value)} : std::vector<std::string>{};
          },
          [get, parse](DdpSnapshot& snapshot, const std::string& text) { get(snapshot) = parse(text); }};
}

MixedPrecision& precision_of(DdpSnapshot& snapshot) {
  if (!snapshot.options.mixed_precision) snapshot.options.mixed_precision.emplace();
  return *snapshot.options.mixed_precision;
}

template <class Member>
Field precision(Member member) {
  return {
      [member](const DdpSnapshot& snapshot) {
        const auto& config = snapshot.options.mixed_precision;
        return config && (*config).*member ? std::vector{text_of(*((*config).*member))} : std::vector<std::string>{};
      },
      [member](DdpSnapshot& snapshot, const std::string& text) { precision_of(snapshot).*member = dtype_of(text); }};
}

const std::map<std::string, Field>& fields() {
  static const auto number = [](const std::string& text) { return std::stod(text); };
  static const std::map<std::string, Field> all = {
      {"require_backward_grad_sync", flag([](DdpSnapshot& s) -> bool& { return s.require_backward_grad_sync; })},
      {"require_forward_param_sync", flag([](DdpSnapshot& s) -> bool& { return s.require_forward_param_sync; })},
      {"find_unused_parameters", flag([](DdpSnapshot& s) -> bool& { return s.options.find_unused_parameters; })},
      {"gradient_as_bucket_view", flag([](DdpSnapshot& s) -> bool& { return s.options.gradient_as_bucket_view; })},
      {"static_graph", flag([](DdpSnapshot& s) -> bool& { return s.options.static_graph; })},
      {"skip_all_reduce_unused_params",
       flag([](DdpSnapshot& s) -> bool& { return s.options.skip_all_reduce_unused_params; })},
      {"batched_grad_copy", flag([](DdpSnapshot& s) -> bool& { return s.options.batched_grad_copy; })},
      {"init_sync", flag([](DdpSnapshot& s) -> bool& { return s.options.init_sync; })},
      {"per_parameter", flag([](DdpSnapshot& s) -> bool& { return s.options.per_parameter; })},
      {"broadcast_buffers",
       optional_value([](DdpSnapshot& s) -> std::optional<bool>& { return s.options.broadcast_buffers; }, bool_of)},
      {"forward_sync_buffers",
       optional_value([](DdpSnapshot& s) -> std::optional<bool>& { return s.options.forward_sync_buffers; }, bool_of)},
      {"bucket_cap_mb",
       optional_value([](DdpSnapshot& s) -> std::optional<double>& { return s.options.bucket_cap_mb; }, number)},
      {"bucket_cap_mb_list",
       {[](const DdpSnapshot& s) {
          std::vector<std::string> texts;
          for (const double cap : s.options.bucket_cap_mb_list) texts.push_back(text_of(cap));
          return texts;
        },
        [](DdpSnapshot& s, const std::string& text) { s.options.bucket_cap_mb_list.push_back(std::stod(text)); }}},
      {"dim",
       {[](const DdpSnapshot& s) { return std::vector{std::to_string(s.options.dim)}; },
        [](DdpSnapshot& s, const std::string& text) { s.options.dim = std::stoll(text); }}},
      {"device_ids",
       {[](const DdpSnapshot& s) {
          std::vector<std::string> texts;
          if (s.options.device_ids) {
            for (const auto index : *s.options.device_ids) texts.push_back(std::to_string(static_cast<int>(index)));
          }
          return texts;
        },
        [](DdpSnapshot& s, const std::string& text) {
          if (!s.options.device_ids) s.options.device_ids.emplace();
          s.options.device_ids->push_back(static_cast<c10::DeviceIndex>(std::stoi(text)));
        }}},
      {"output_device",
       {[](const DdpSnapshot& s) {
          const auto& device = s.options.output_device;
          return device ? std::vector{std::to_string(static_cast<int>(*device))} : std::vector<std::string>{};
        },
        [](DdpSnapshot& s, const std::string& text) {
          s.options.output_device = static_cast<c10::DeviceIndex>(std::stoi(text));
        }}},
      {"ignored",
       {[](const DdpSnapshot& s) {
          const auto& names = s.options.params_and_buffers_to_ignore;
          return std::vector<std::string>(names.begin(), names.end());
        },
        [](DdpSnapshot& s, const std::string& text) { s.options.params_and_buffers_to_ignore.insert(text); }}},
      {"param_dtype", precision(&MixedPrecision::param_dtype)},
      {"reduce_dtype", precision(&MixedPrecision::reduce_dtype)},
      {"buffer_dtype", precision(&MixedPrecision::buffer_dtype)},
  };
  return all;
}

}  // namespace

std::string DdpSnapshot::to_string() const {
  std::string text = str(kHeader, "\n");
  for (const auto& [key, field] : fields()) {
    for (const auto& value : field.write(*this)) text += str(key, " ", value, "\n");
  }
  return str(text, kPlanKey, "\n", options.bucket_plan);
}

DdpSnapshot DdpSnapshot::from_string(const std::string& text) {
  DdpSnapshot snapshot;
  std::istringstream lines(text);
  std::string line;
  TORCH_CHECK(std::getline(lines, line) && line == kHeader, "[lockstep/ddp] this is no saved wrapper: it begins '",
              line.substr(0, 40), "' instead of '", kHeader, "'");
  while (std::getline(lines, line)) {
    if (line == kPlanKey) {
      std::ostringstream rest;
      rest << lines.rdbuf();
      snapshot.options.bucket_plan = std::move(rest).str();
      return snapshot;
    }
    const auto space = line.find(' ');
    const auto found = fields().find(line.substr(0, space));
    TORCH_CHECK(space != std::string::npos && found != fields().end(),
                "[lockstep/ddp] snapshot: cannot read the line '", line, "'");
    found->second.read(snapshot, line.substr(space + 1));
  }
  return snapshot;
}

}  // namespace lockstep
