#include "lockstep/checkpoint/save_job.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "lockstep/base/observer.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/file_writer.h"

namespace lockstep::detail {
namespace {

/// Copies begin where any dtype may.
constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Network file systems may show other hosts' folders a little later.
bool comes_into_sight(const std::string& folder) {
  constexpr auto kPatience = std::chrono::seconds(10);
  constexpr auto kBetween = std::chrono::milliseconds(50);
  for (const auto until = std::chrono::steady_clock::now() + kPatience; !is_folder(folder);) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(kBetween);
  }
  return true;
}

/// Announced, so that tests can let it fail and traces show it.
void step(const char* state, const std::string& unit, int64_t bytes, const std::function<void()>& action) {
  run_step({.kind = "save", .unit = unit, .state = state, .bytes = static_cast<std::size_t>(bytes)}, action);
}

}  // namespace

std::vector<at::Tensor> StagingBuffer::copies_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  int64_t bytes = 0;
  bool has_cuda = false;
  for (const auto& tensor : tensors) {
    bytes += aligned(static_cast<int64_t>(tensor.nbytes()));
    has_cuda = has_cuda || tensor.is_cuda();
  }
  if (!block_.defined() || block_.numel() < bytes) {
    block_ = at::Tensor();
    block_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(has_cuda));
  }
  std::vector<at::Tensor> copies;
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    const auto size = static_cast<int64_t>(tensor.nbytes());
    auto copy = block_.narrow(0, begin, size).view(tensor.scalar_type()).view(tensor.sizes());
    // Blocking, each: a device's copies to pinned memory are as fast, and nothing is left to wait for.
    copies.push_back(copy.copy_(tensor));
    begin += aligned(size);
  }
  return copies;
}

SaveJob::SaveJob(std::string path, const dcp::State& state, dcp::SaveOptions options, const Together& together)
    : path_(std::move(path)),
      what_(str("'", path_, "' was not saved")),
      options_(std::move(options)),
      rank_(together.rank()) {
  TORCH_CHECK(options_.max_file_bytes > 0, "[lockstep/checkpoint] files cannot have ", options_.max_file_bytes,
              " bytes");
  dcp::Outgoing out(together.rank(), together.size());
  const auto said = together.all_say(what_, [&] {
    for (const auto& [name, object] : state.entries()) {
      out.begin_entry(name);
      object->save(out);
    }
    return packed(offer_of(out));
  });
  together.all_do(what_, [&] {
    std::vector<Offer> offers;
    for (const auto& each : said) offers.push_back(unpacked_offer(each));
    plan_ = plan_save(offers, options_.max_file_bytes);
  });
  if (rank_ == 0 && !plan_.differing_values.empty()) {
    TORCH_WARN("[lockstep/checkpoint] ranks have other values of ", join(plan_.differing_values, ", "),
               ". The first rank's are saved. For every rank's own use per_rank().");
  }
  plan_.catalog.step = options_.step;
  for (const auto& [name, object] : state.entries()) plan_.catalog.entries.push_back(name);
  for (const auto& file : plan_.files) {
    if (file.rank != rank_) continue;
    for (const auto& piece : file.pieces) {
      const auto& box = plan_.catalog.tensors.at(piece.tensor).pieces[piece.place].box;
      const auto& given = out.all_tensors().at(piece.tensor).pieces;
      values_.push_back(
          std::find_if(given.begin(), given.end(), [&](const auto& each) { return each.box == box; })->values);
    }
  }
  const auto made = together.first_says(what_, [&] {
    folder_.emplace(path_, Replaces::kCheckpoint);
    return folder_->path();
  });
  if (!folder_) folder_.emplace(path_, made);
  together.all_do(what_, [&] {
    TORCH_CHECK(comes_into_sight(made), "[lockstep/checkpoint] it does not see the folder ", made,
                ", which rank 0 has made. All ranks must see the same one.");
  });
}

void SaveJob::stage(StagingBuffer& buffer, const Together& together) {
  together.all_do(what_, [&] { values_ = buffer.copies_of(values_); });
}

std::string SaveJob::write_files() {
  nlohmann::ordered_json checksums = nlohmann::ordered_json::array();
  int64_t total = 0;
  for (const auto& tensor : values_) total += static_cast<int64_t>(tensor.nbytes());
  std::optional<ProgressTeller> progress;
  if (rank_ == 0) progress.emplace("saving " + path_, total, options_.progress);
  std::size_t next = 0;
  for (std::size_t i = 0; i < plan_.files.size(); ++i) {
    const auto& file = plan_.files[i];
    if (file.rank != rank_) continue;
    const auto bytes = plan_.catalog.files[i].bytes;
    step("write", file.name, bytes, [&] {
      FileWriter writer(folder_->file(file.name));
      writer.write(file.header);
      for (std::size_t piece = 0; piece < file.pieces.size(); ++piece) {
        checksums.push_back(writer.write(values_[next++], [&](int64_t count) {
          if (progress) progress->add(count);
        }));
      }
      step("flush", file.name, bytes, [&] { writer.finish(); });
    });
  }
  if (progress) progress->finish();
  return checksums.dump();
}

void SaveJob::take_checksums(const std::vector<std::string>& said) {
  std::vector<nlohmann::json> by_rank;
  for (const auto& each : said) by_rank.push_back(nlohmann::json::parse(each));
  std::vector<std::size_t> next(said.size());
  for (const auto& file : plan_.files) {
    const auto rank = static_cast<std::size_t>(file.rank);
    for (const auto& piece : file.pieces) {
      plan_.catalog.tensors.at(piece.tensor).pieces[piece.place].checksum =
          by_rank[rank].at(next[rank]++).get<uint32_t>();
    }
  }
}

void SaveJob::commit() {
  step("write", kIndexName, 0, [&] { write_text(folder_->file(kIndexName), index_text(plan_.catalog)); });
  step("rename", path_, 0, [&] { folder_->put_in_place(); });
}

void SaveJob::run(const Together& together) {
  const at::NoGradGuard no_grad;
  const auto said = together.all_say(what_, [&] { return write_files(); });
  together.first_says(what_, [&] {
    take_checksums(said);
    commit();
    if (options_.on_saved) options_.on_saved();
    return std::string();
  });
}

}  // namespace lockstep::detail
