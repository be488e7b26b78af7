#include "lockstep/checkpoint/reading.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/crc32c.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/names.h"
#include "lockstep/checkpoint/value_json.h"

namespace lockstep::detail {
namespace {

/// Longer lists help nobody.
constexpr std::size_t kNamesInMessage = 10;

std::string listed(const std::vector<std::string>& names) {
  const auto count = std::min(names.size(), kNamesInMessage);
  auto text = join(std::vector<std::string>(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(count)), ", ");
  if (names.size() > count) text += str(" and ", names.size() - count, " more");
  return text;
}

/// What stays in a core's cache between reading and the checksum.
constexpr int64_t kChunkBytes = 1 << 18;

/// Processes may not have many more.
constexpr std::size_t kOpenFiles = 64;

/// Bytes of a piece, and where they belong.
struct ByteRun {
  int64_t begin;
  int64_t end;
  char* into;
};

bool belongs_to(const std::string& name, const std::string& entry) {
  return entry.empty() || name == entry || name.starts_with(entry + ".");
}

}  // namespace

Reading::Reading(Catalog catalog, const dcp::LoadOptions& options, int rank, int world_size)
    : catalog_(std::move(catalog)), options_(options), rank_(rank), world_size_(world_size) {}

void Reading::begin_entry(const std::string& entry) {
  entry_ = entry;
  entries_.push_back(entry);
}

std::string Reading::full_name(const std::string& name) const {
  const auto full = detail::full_name(entry_, name);
  return options_.name_in_checkpoint ? options_.name_in_checkpoint(full) : full;
}

const StoredTensor* Reading::find(const std::string& full_name) const {
  const auto found = catalog_.tensors.find(full_name);
  return found == catalog_.tensors.end() ? nullptr : &found->second;
}

std::optional<dcp::Incoming::Form> Reading::form(const std::string& name) {
  const auto full = full_name(name);
  const auto* stored = find(full);
  if (stored == nullptr) return std::nullopt;
  return Form{.sizes = stored->sizes, .dtype = stored->scalar_type(full)};
}

std::optional<c10::IValue> Reading::find_value(const std::string& name) {
  const auto full = full_name(name);
  const auto found = catalog_.values.find(full);
  if (found == catalog_.values.end()) return std::nullopt;
  asked_.insert(full);
  return value_from(found->second, full);
}

std::vector<std::string> Reading::names(const std::string& prefix) {
  std::vector<std::string> names;
  const auto add = [&](const auto& by_name) {
    const auto start = entry_.empty() ? std::string() : entry_ + ".";
    for (const auto& [full, each] : by_name) {
      if (full.starts_with(start + prefix)) names.push_back(full.substr(start.size()));
    }
  };
  add(catalog_.tensors);
  add(catalog_.values);
  return names;
}

void Reading::object(const std::string& name, dcp::Stateful& object) {
  const auto before = std::exchange(entry_, detail::full_name(entry_, name));
  object.load(*this);
  entry_ = before;
}

void Reading::note_missing(const std::string& name) {
  missing_.push_back(full_name(name));
}

void Reading::pass_over(const std::string& name) {
  const auto full = full_name(name);
  asked_.insert(full);
  if (find(full) != nullptr) read_later_.insert(full);
}

std::string Reading::name_there(const std::string& name) const {
  return full_name(name);
}

void Reading::refuse(const std::string& why) {
  problems_.push_back(why);
}

void Reading::then(std::function<void()> action) {
  actions_.emplace_back(entry_, std::move(action));
}

void Reading::pieces(const std::string& name, const std::vector<int64_t>& sizes, std::vector<BoxedValues> into) {
  const auto full = full_name(name);
  const auto found = catalog_.tensors.find(full);
  if (found == catalog_.tensors.end()) return missing_.push_back(full);
  asked_.insert(full);
  const auto& stored = found->second;
  if (stored.sizes != sizes) {
    return refuse(
        str("'", full, "' has sizes [", join(stored.sizes, ", "), "] there and [", join(sizes, ", "), "] here"));
  }
  const auto dtype = stored.scalar_type(full);
  for (auto& each : into) {
    if (each.values.scalar_type() != dtype && !options_.casts) {
      return refuse(lockstep::str("'", full, "' is ", dtype, " there and ", each.values.scalar_type(),
                                  " here; LoadOptions::casts casts it"));
    }
    requests_.push_back({&found->first, &stored, std::move(each)});
  }
}

std::optional<std::string> Reading::owner_of(const std::string& name) const {
  // Of two entries, the longer name has it: "model.ema" is not part of "model".
  std::optional<std::string> owner;
  for (const auto& entry : catalog_.entries.empty() ? entries_ : catalog_.entries) {
    if (belongs_to(name, entry) && (!owner || entry.size() > owner->size())) owner = entry;
  }
  return owner;
}

std::vector<std::string> Reading::not_asked_for() const {
  // Entries may have other names there: whoever asked for a part of one loads it.
  std::set<std::string> loaded(entries_.begin(), entries_.end());
  for (const auto& name : asked_) {
    if (const auto owner = owner_of(name)) loaded.insert(*owner);
  }
  std::vector<std::string> names;
  const auto add = [&](const auto& by_name) {
    for (const auto& [name, each] : by_name) {
      const auto owner = owner_of(name);
      if (owner && loaded.contains(*owner) && !asked_.contains(name)) names.push_back(name);
    }
  };
  add(catalog_.tensors);
  add(catalog_.values);
  return names;
}

void Reading::check() const {
  auto problems = problems_;
  bool is_about_names = false;
  if (options_.strict) {
    if (!missing_.empty()) problems.push_back(str("it lacks ", listed(missing_)));
    const auto extra = not_asked_for();
    if (!extra.empty()) problems.push_back(str("nobody asks for ", listed(extra)));
    is_about_names = !missing_.empty() || !extra.empty();
  }
  TORCH_CHECK(problems.empty(), "[lockstep/checkpoint] it does not fit: ", join(problems, "; "),
              is_about_names ? ". LoadOptions::strict = false passes over what is missing or left." : "");
}

MappedFile& Reading::file_of(const StoredPiece& piece) {
  auto& file = files_[piece.file];
  const auto& about = catalog_.files[piece.file];
  if (!file) {
    file = std::make_unique<MappedFile>(catalog_.path_of(about), about.bytes);
    if (files_.size() > kOpenFiles) {
      auto opened = std::move(file);
      files_.clear();
      return *(files_[piece.file] = std::move(opened));
    }
  }
  return *file;
}

at::Tensor Reading::values_of(const StoredPiece& piece, const std::string& name, const StoredTensor& stored) {
  const auto dtype = stored.scalar_type(name);
  const auto* bytes = file_of(piece).begin() + piece.begin;
  // Read only: whoever reads copies.
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(bytes) % c10::elementSize(dtype) == 0;
  if (is_aligned) return at::from_blob(const_cast<char*>(bytes), piece.box.sizes, dtype);
  // The format lets tensors begin at any byte, libtorch's kernels do not.
  auto copy = at::empty(piece.box.sizes, dtype);
  std::memcpy(copy.mutable_data_ptr(), bytes, static_cast<std::size_t>(piece.bytes));
  return copy;
}

std::map<const StoredPiece*, Reading::Wanted> Reading::wanted_pieces() const {
  std::map<const StoredPiece*, Wanted> pieces;
  for (const auto& request : requests_) {
    for (const auto& piece : request.stored->pieces) {
      if (!intersection(piece.box, request.into.box)) continue;
      auto& wanted = pieces.try_emplace(&piece, Wanted{request.name, request.stored, {}}).first->second;
      wanted.into.push_back(&request.into);
    }
  }
  return pieces;
}

int64_t Reading::bytes_to_read() const {
  int64_t bytes = 0;
  for (const auto& [piece, wanted] : wanted_pieces()) bytes += piece->bytes;
  return bytes;
}

void Reading::compare(uint32_t checksum, const std::string& name, const StoredPiece& piece) const {
  TORCH_CHECK(!piece.checksum || checksum == *piece.checksum, "[lockstep/checkpoint] ",
              catalog_.path_of(catalog_.files[piece.file]), " is damaged: the bytes of '", name, "', ", piece.bytes,
              " at ", piece.begin, ", are not those that were written");
}

void Reading::check_checksum(const std::string& name, const StoredPiece& piece) {
  if (!piece.checksum) return;
  compare(crc32c(0, file_of(piece).begin() + piece.begin, static_cast<std::size_t>(piece.bytes)), name, piece);
}

void Reading::verify() {
  for (const auto& [piece, wanted] : wanted_pieces()) check_checksum(*wanted.name, *piece);
  for (const auto& name : read_later_) {
    for (const auto& piece : catalog_.tensors.at(name).pieces) check_checksum(name, piece);
  }
}

bool Reading::stream(const StoredPiece& piece, const Wanted& wanted) {
  const auto dtype = wanted.stored->scalar_type(*wanted.name);
  std::vector<ByteRun> runs;
  for (const auto* into : wanted.into) {
    const auto common = intersection(piece.box, into->box);
    const auto values = box_in(into->values, into->box, *common);
    const bool is_plain = values.is_cpu() && values.is_contiguous() && !values.is_conj() && !values.is_neg();
    if (values.scalar_type() != dtype || !is_plain) return false;
    const auto elements = run_in(*common, piece.box);
    if (!elements) return false;
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    runs.push_back({elements->begin * item, elements->end * item, static_cast<char*>(values.mutable_data_ptr())});
  }
  std::sort(runs.begin(), runs.end(), [](const auto& one, const auto& other) { return one.begin < other.begin; });
  int64_t end = 0;
  for (const auto& run : runs) {
    if (run.begin < end) return false;  // two want the same
    end = run.end;
  }
  const bool compares = is_verified_now() && piece.checksum.has_value();
  std::vector<char> passed_over;  // what is read for the checksum only
  uint32_t checksum = 0;
  const auto& file = file_of(piece);
  const auto pass = [&](int64_t begin, int64_t until, char* into) {
    for (; begin < until; begin += kChunkBytes) {
      const auto count = std::min(kChunkBytes, until - begin);
      if (into == nullptr) passed_over.resize(kChunkBytes);
      auto* to = into == nullptr ? passed_over.data() : into;
      file.read(piece.begin + begin, to, count);
      if (compares) checksum = crc32c(checksum, to, static_cast<std::size_t>(count));
      if (into != nullptr) into += count;
    }
  };
  int64_t begin = 0;
  for (const auto& run : runs) {
    if (compares) pass(begin, run.begin, nullptr);
    pass(run.begin, run.end, run.into);
    begin = run.end;
  }
  if (!compares) return true;
  pass(begin, piece.bytes, nullptr);
  compare(checksum, *wanted.name, piece);
  return true;
}

void Reading::read(const StoredPiece& piece, const Wanted& wanted) {
  if (stream(piece, wanted)) return;
  if (is_verified_now()) check_checksum(*wanted.name, piece);
  const auto values = values_of(piece, *wanted.name, *wanted.stored);
  for (const auto* into : wanted.into) {
    const auto common = intersection(piece.box, into->box);
    box_in(into->values, into->box, *common).copy_(box_in(values, piece.box, *common));
  }
}

void Reading::fill(ProgressTeller* progress) {
  const at::NoGradGuard no_grad;
  // What is read in place is a write like any other: FSDP and saved tensors look at versions.
  for (const auto& request : requests_) {
    if (!request.into.values.is_inference()) request.into.values.unsafeGetTensorImpl()->bump_version();
  }
  for (const auto& [piece, wanted] : wanted_pieces()) {
    read(*piece, wanted);
    if (progress != nullptr) progress->add(piece->bytes);
  }
}

void Reading::read_now(const std::string& name, const std::vector<BoxedValues>& into) {
  const at::NoGradGuard no_grad;
  const auto full = full_name(name);
  const auto* stored = find(full);
  TORCH_CHECK(stored != nullptr, "[lockstep/checkpoint] it lacks ", full);
  for (const auto& piece : stored->pieces) {
    Wanted wanted{&full, stored, {}};
    for (const auto& each : into) {
      if (intersection(piece.box, each.box)) wanted.into.push_back(&each);
    }
    if (wanted.into.empty()) continue;
    if (options_.verify == dcp::Verify::kFirst) check_checksum(full, piece);
    read(piece, wanted);
  }
}

void Reading::finish() {
  const at::NoGradGuard no_grad;
  for (const auto& [entry, action] : actions_) {
    entry_ = entry;
    action();
  }
}

dcp::Loaded Reading::loaded() const {
  return {.step = catalog_.step,
          .saved_world_size = catalog_.world_size,
          .missing = missing_,
          .not_asked_for = not_asked_for()};
}

}  // namespace lockstep::detail
