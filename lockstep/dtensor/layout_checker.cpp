#include "lockstep/dtensor/layout_checker.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/rank_local.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/dtensor/check_result.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/dtensor_impl.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace detail {

std::atomic<int> checker_count = 0;

struct OpenCheckers {
  // Guarded by mutex: a rank may have several threads.
  std::mutex mutex;
  int count = 0;
  int64_t operators = 0;
  int64_t compared = 0;
};

}  // namespace detail

namespace {

/// What ranks compare of a tensor: numbers, so that one small all-gather carries them.
struct Fingerprint {
  int64_t text = 0;    // what made it, sizes, dtype, placements: the same on all ranks
  int64_t values = 0;  // of what the rank holds: the same along axes that replicate
  int64_t fits = 1;    // the rank holds as much as the layout says
};
constexpr int64_t kNumbers = 3;

int64_t hash_of(const void* bytes, std::size_t count) {
  const auto* begin = static_cast<const unsigned char*>(bytes);
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a, eight bytes at a time
  std::size_t i = 0;
  for (; i + sizeof(uint64_t) <= count; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, begin + i, sizeof(word));
    hash = (hash ^ word) * 1099511628211ULL;
    hash ^= hash >> 29;
  }
  for (; i < count; ++i) hash = (hash ^ begin[i]) * 1099511628211ULL;
  return static_cast<int64_t>(hash);
}

int64_t hash_of(const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  // By an operator: memory that belongs to somebody is there only while one runs.
  const auto values = local.detach().resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous).cpu();
  return hash_of(values.const_data_ptr(), values.nbytes());
}

/// A tensor that ranks compare.
struct Compared {
  std::string what;  // "operator 7: result 0 of aten::mul"
  const Layout& layout;
  const at::Tensor& local;
  bool has_values = true;  // memory that nobody has written yet differs

  std::string text() const {
    return lockstep::str(what, ": ", local.scalar_type(), "[", join(layout.sizes(), ", "), "] ",
                         to_string(layout.placements()));
  }
  bool fits() const { return local.sizes() == at::IntArrayRef(layout.local_sizes()); }
};

/// Every rank's numbers, in the order of the mesh: the axes gather one after the other, the innermost first.
at::Tensor gathered(const Fingerprint& mine, const DeviceMesh& mesh, at::Device device) {
  auto rows = at::tensor(std::vector<int64_t>{mine.text, mine.values, mine.fits}, at::kLong).to(device);
  for (auto axis = mesh.ndim() - 1; axis >= 0; --axis) {
    auto all = at::empty({mesh.size(axis) * rows.numel()}, rows.options());
    all_gather_into_tensor(all, rows, mesh.get_group(axis));
    rows = std::move(all);
  }
  return rows.cpu().view({-1, kNumbers});
}

std::vector<std::string> gathered(const std::string& mine, const DeviceMesh& mesh) {
  std::string all = mine + "\n";
  for (auto axis = mesh.ndim() - 1; axis >= 0; --axis) {
    const auto parts = all_gather_object(all, mesh.get_group(axis));
    all = join(parts, "");
  }
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < all.size();) {
    const auto end = all.find('\n', begin);
    lines.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// The ranks of the mesh for whose place `differs`.
std::vector<int> ranks_where(const DeviceMesh& mesh, const std::function<bool(int64_t place)>& differs) {
  std::vector<int> ranks;
  for (int64_t place = 0; place < mesh.size(); ++place) {
    if (differs(place)) ranks.push_back(mesh.ranks()[static_cast<std::size_t>(place)]);
  }
  return ranks;
}

std::string text_of(const std::vector<int>& ranks) {
  return str(ranks.size() == 1 ? "rank " : "ranks ", join(ranks, ", "));
}

/// The place with the same coordinate but the first one on `axis`.
int64_t first_along(const DeviceMesh& mesh, int64_t axis, int64_t place) {
  int64_t inner = 1;
  for (auto each = axis + 1; each < mesh.ndim(); ++each) inner *= mesh.size(each);
  return place - place / inner % mesh.size(axis) * inner;
}

/// Collective over the mesh. All its ranks see the same numbers, and so throw together.
void compare(const Compared& compared) {
  const auto& mesh = compared.layout.mesh();
  if (!mesh.is_member()) return;
  const auto text = compared.text();
  const bool fits = compared.fits();
  const auto all = gathered({.text = hash_of(text.data(), text.size()),
                             .values = compared.has_values ? hash_of(compared.local) : 0,
                             .fits = fits ? 1 : 0},
                            mesh, compared.local.device());
  const auto rows = all.accessor<int64_t, 2>();
  const auto who = str("[lockstep/dtensor] rank ", mesh.get_rank(), ", ", mesh, ": ");

  if (!ranks_where(mesh, [&](int64_t place) { return rows[place][0] != rows[0][0]; }).empty()) {
    const auto texts = gathered(text, mesh);
    std::string listed;
    for (std::size_t i = 0; i < texts.size(); ++i) listed += str("\n  rank ", mesh.ranks()[i], ": ", texts[i]);
    TORCH_CHECK(false, who, "ranks have made different tensors:", listed,
                "\nAll ranks of a mesh call the same operators on DTensors, in one order, with the same sizes.");
  }
  const auto unfit = ranks_where(mesh, [&](int64_t place) { return rows[place][2] == 0; });
  TORCH_CHECK(unfit.empty(), who, text, ": ", text_of(unfit), " ", unfit.size() == 1 ? "holds" : "hold",
              " a local tensor of other sizes than the layout says; this one holds ", compared.local.sizes(),
              " and the layout says [", join(compared.layout.local_sizes(), ", "), "].");
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (!std::holds_alternative<Replicate>(compared.layout.placements()[static_cast<std::size_t>(axis)])) continue;
    const auto other =
        ranks_where(mesh, [&](int64_t place) { return rows[place][1] != rows[first_along(mesh, axis, place)][1]; });
    TORCH_CHECK(other.empty(), who, text, ": ", text_of(other), " ", other.size() == 1 ? "holds" : "hold",
                " other values than the first rank along mesh dim ", axis,
                ", and by its placement all hold the same. What was compared before it agrees: look at what made it. "
                "Give all ranks the same values and seeds, or say what it is: Shard or Partial.");
  }
}

detail::OpenCheckers* open_here() {
  auto& open = rank_local<detail::OpenCheckers>();
  const std::lock_guard lock(open.mutex);
  return open.count != 0 ? &open : nullptr;
}

/// Where in the step: its number, and the part of backward it belongs to.
std::string place_of_next(detail::OpenCheckers& open) {
  const std::lock_guard lock(open.mutex);
  const auto node = torch::autograd::get_current_node();
  return str("operator ", open.operators++, node ? str(" (in backward of ", node->name(), ")") : "", ": ");
}

void compare_dtensor(detail::OpenCheckers& open, const std::string& what, const at::Tensor& tensor,
                     bool has_values = true) {
  const auto* impl = detail::dtensor_impl(tensor);
  if (impl == nullptr) return;
  {
    const std::lock_guard lock(open.mutex);
    ++open.compared;
  }
  compare({.what = what, .layout = *impl->layout(), .local = impl->local(), .has_values = has_values});
}

}  // namespace

namespace detail {

void compare_result(const std::string& what, const at::Tensor& result) {
  if (auto* open = open_here()) compare_dtensor(*open, place_of_next(*open) + what, result);
}

void compare_results(OperatorCall& call) {
  auto* open = open_here();
  if (open == nullptr) return;
  const auto place = place_of_next(*open);
  const bool has_values = !call.name().starts_with("aten::empty") && !call.name().starts_with("aten::new_empty");
  for (std::size_t i = 0; i < call.result_count(); ++i) {
    const auto& value = call.result(i);
    const auto what = str(place, "result ", i, " of ", call.name());
    if (value.isTensor()) compare_dtensor(*open, what, value.toTensor(), has_values);
    if (!value.isTensorList()) continue;
    for (const at::Tensor& each : value.toTensorList()) compare_dtensor(*open, what, each);
  }
}

}  // namespace detail

LayoutChecker::LayoutChecker() : open_(rank_local<detail::OpenCheckers>()) {
  const std::lock_guard lock(open_.mutex);
  if (open_.count++ == 0) open_.operators = 0;
  compared_before_ = open_.compared;
  detail::checker_count.fetch_add(1, std::memory_order_relaxed);
}

LayoutChecker::~LayoutChecker() {
  const std::lock_guard lock(open_.mutex);
  --open_.count;
  detail::checker_count.fetch_sub(1, std::memory_order_relaxed);
}

int64_t LayoutChecker::compared() const {
  const std::lock_guard lock(open_.mutex);
  return open_.compared - compared_before_;
}

void check_layouts(const torch::nn::Module& module) {
  struct Registered {
    std::string what;
    std::shared_ptr<const Layout> layout;
    at::Tensor local;
  };
  std::vector<Registered> all;
  const auto add = [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
    const auto* impl = detail::dtensor_impl(tensor);
    auto layout = impl != nullptr ? impl->layout() : layout_of(tensor);
    if (!layout) return;
    all.push_back({str(kind, " '", name, "'"), std::move(layout), impl != nullptr ? impl->local() : tensor});
  };
  for (const auto& each : module.named_parameters()) add("parameter", each.key(), each.value());
  for (const auto& each : module.named_buffers()) add("buffer", each.key(), each.value());
  if (all.empty()) return;
  // First how many: a rank that has fewer would leave the others waiting.
  const auto& mesh = all.front().layout->mesh();
  const Layout number(mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()), {});
  const auto nothing = at::zeros({}, all.front().local.options().requires_grad(false));
  compare({.what = str(all.size(), " tensors with a layout in ", module.name()), .layout = number, .local = nothing});
  for (const auto& each : all) compare({.what = each.what, .layout = *each.layout, .local = each.local});
}

}  // namespace lockstep
