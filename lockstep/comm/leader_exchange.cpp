#include "lockstep/comm/leader_exchange.h"

#include <ATen/ops/empty.h>

#include "lockstep/comm/packing.h"

namespace lockstep::detail {
namespace {

// Up to here a second trip over the network costs more than reducing everything on every leader.
constexpr std::size_t kMostBytesGathered = std::size_t{32} << 10;

/// Reduces the rows of `table` onto `output`, which may be its first one.
void reduce_rows(const at::Tensor& table, const at::Tensor& output, const shm::Reduction& reduction) {
  if (output.numel() == 0) return;
  std::vector<const std::byte*> inputs;
  const auto row_bytes = output.nbytes();
  for (std::size_t row = 0; row < static_cast<std::size_t>(table.size(0)); ++row) {
    inputs.push_back(static_cast<const std::byte*>(table.const_data_ptr()) + row * row_bytes);
  }
  std::byte* const outputs[] = {static_cast<std::byte*>(output.mutable_data_ptr())};
  shm::reduce(reduction, inputs, {}, outputs, static_cast<std::size_t>(output.numel()));
}

}  // namespace

void LeaderExchange::run_call(Call call, const Deadline& deadline) {
  call.is_async = false;
  call.timeout = deadline.left();
  dispatch(*transport_, call)->wait();
}

at::Tensor LeaderExchange::exchange(const at::Tensor& run, const std::vector<int64_t>& elements,
                                    const Deadline& deadline) {
  const auto mine = elements.at(static_cast<std::size_t>(host()));
  auto received = at::empty({hosts(), mine}, run.options());
  if (run.numel() == 0) return received;
  const auto element_bytes = static_cast<int64_t>(run.element_size());
  Call call{.kind = CallKind::kAllToAllSingle, .inputs = {bytes_of(run)}, .outputs = {bytes_of(received)}};
  for (const auto count : elements) call.input_splits.push_back(count * element_bytes);
  call.output_splits.assign(static_cast<std::size_t>(hosts()), mine * element_bytes);
  run_call(std::move(call), deadline);
  return received;
}

at::Tensor LeaderExchange::reduce_scatter(const at::Tensor& run, const std::vector<int64_t>& elements,
                                          const shm::Reduction& reduction, const Deadline& deadline) {
  const auto received = exchange(run, elements, deadline);
  auto mine = received[0];
  reduce_rows(received, mine, reduction);
  return mine;
}

void LeaderExchange::all_reduce(const at::Tensor& run, const shm::Reduction& reduction, const Deadline& deadline) {
  if (run.nbytes() <= kMostBytesGathered) {
    const auto gathered = at::empty({hosts(), run.numel()}, run.options());
    all_gather(gathered, run, deadline);
    return reduce_rows(gathered, run, reduction);
  }
  const auto share = (run.numel() + hosts() - 1) / hosts();
  std::vector<int64_t> elements;
  for (int64_t each = 0; each < hosts(); ++each) {
    elements.push_back(std::clamp<int64_t>(run.numel() - each * share, 0, share));
  }
  const auto mine = reduce_scatter(run, elements, reduction, deadline);
  if (run.numel() == share * hosts()) return all_gather(run, mine, deadline);
  // Shares at the end are short: gathered with room to spare, the elements still follow each other.
  const auto padded = at::empty({share}, run.options());
  padded.narrow(0, 0, mine.numel()).copy_(mine);
  const auto gathered = at::empty({share * hosts()}, run.options());
  all_gather(gathered, padded, deadline);
  run.copy_(gathered.narrow(0, 0, run.numel()));
}

void LeaderExchange::reduce(const at::Tensor& run, int root, const shm::Reduction& reduction,
                            const Deadline& deadline) {
  std::vector<int64_t> elements(static_cast<std::size_t>(hosts()), 0);
  elements.at(static_cast<std::size_t>(root)) = run.numel();
  const auto received = exchange(run, elements, deadline);
  if (host() == root) reduce_rows(received, run, reduction);
}

void LeaderExchange::all_gather(const at::Tensor& output, const at::Tensor& input, const Deadline& deadline) {
  if (input.numel() == 0) return;
  run_call({.kind = CallKind::kAllGatherSingle, .inputs = {bytes_of(input)}, .outputs = {bytes_of(output)}}, deadline);
}

void LeaderExchange::broadcast(const at::Tensor& run, int root, const Deadline& deadline) {
  if (run.numel() == 0) return;
  run_call({.kind = CallKind::kBroadcast, .inputs = {bytes_of(run)}, .root = root}, deadline);
}

void LeaderExchange::barrier(const Deadline& deadline) {
  run_call({.kind = CallKind::kBarrier}, deadline);
}

}  // namespace lockstep::detail
