#include "checkpoint_cli/commands.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <ostream>
#include <string_view>

#include "checkpoint_cli/differences.h"
#include "checkpoint_cli/listing.h"
#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/merge.h"
#include "lockstep/checkpoint/verify.h"

namespace lockstep::checkpoint_cli {
namespace {

constexpr int kSame = 0;
constexpr int kDifferent = 1;
constexpr int kTrouble = 2;

/// Whoever reads it knows which program they have called.
std::string_view without_prefix(std::string_view message) {
  constexpr std::string_view kPrefix = "[lockstep/checkpoint] ";
  if (message.starts_with(kPrefix)) message.remove_prefix(kPrefix.size());
  return message;
}

int inspect(const Command& command, std::ostream& out) {
  const auto catalog = detail::open_catalog(command.path);
  if (command.is_json) {
    constexpr int kIndent = 2;
    out << listing_json(catalog, command.path)
               .dump(kIndent, ' ', /*ensure_ascii=*/false, nlohmann::ordered_json::error_handler_t::replace)
        << "\n";
  } else {
    out << listing(catalog, command.path);
  }
  return kSame;
}

int verify(const Command& command, std::ostream& out) {
  TORCH_CHECK(detail::is_folder(command.path) || detail::is_file(command.path), "there is no checkpoint at ",
              command.path);
  const auto problems = dcp::verify(command.path);
  for (const auto& problem : problems) out << without_prefix(problem) << "\n";
  if (problems.empty()) out << command.path << " is whole\n";
  return problems.empty() ? kSame : kDifferent;
}

int merge(const Command& command, std::ostream& out) {
  dcp::merge(command.path, command.other, {.entry = command.entry, .max_file_bytes = command.max_file_bytes});
  const auto merged = detail::open_catalog(command.other);
  out << command.other << ": " << merged.tensors.size() << " tensors in " << merged.files.size() << " files, "
      << readable_bytes(merged.bytes()) << "\n";
  return kSame;
}

int diff(const Command& command, std::ostream& out) {
  const auto differences = compare(command.path, command.other, command.tolerance);
  out << described(differences, command.path, command.other);
  return differences.is_none() ? kSame : kDifferent;
}

}  // namespace

int run(const Command& command, std::ostream& out, std::ostream& err) {
  try {
    switch (command.action) {
      case Action::kInspect:
        return inspect(command, out);
      case Action::kVerify:
        return verify(command, out);
      case Action::kMerge:
        return merge(command, out);
      case Action::kDiff:
        return diff(command, out);
    }
  } catch (const c10::Error& error) {
    err << "lockstep-checkpoint: " << without_prefix(error.what_without_backtrace()) << "\n";
  } catch (const std::exception& error) {
    err << "lockstep-checkpoint: " << error.what() << "\n";
  }
  return kTrouble;
}

}  // namespace lockstep::checkpoint_cli
