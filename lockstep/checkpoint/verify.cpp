#include "lockstep/checkpoint/verify.h"

#include <c10/util/Exception.h>

#include "lockstep/base/crc32c.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/catalog.h"
#include "lockstep/checkpoint/mapped_file.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::dcp {
namespace {

using lockstep::detail::Catalog;

/// The pieces of a file, in the order of their bytes, with their tensors' names.
using PiecesOfFile = std::map<int64_t, std::pair<const std::string*, const lockstep::detail::StoredPiece*>>;

std::vector<PiecesOfFile> by_file(const Catalog& catalog) {
  std::vector<PiecesOfFile> files(catalog.files.size());
  for (const auto& [name, tensor] : catalog.tensors) {
    for (const auto& piece : tensor.pieces) {
      if (piece.bytes > 0) files[piece.file].emplace(piece.begin, std::pair(&name, &piece));
    }
  }
  return files;
}

/// A file's own header says of its pieces what the index says.
void check_header(const lockstep::detail::SafetensorsHeader& header, const PiecesOfFile& pieces,
                  const std::string& file) {
  std::size_t found = 0;
  for (const auto& entry : header.entries) {
    if (entry.begin == entry.end) continue;
    const auto piece = pieces.find(entry.begin);
    TORCH_CHECK(piece != pieces.end() && *piece->second.first == entry.name &&
                    piece->second.second->bytes == entry.end - entry.begin,
                "[lockstep/checkpoint] ", file, " is damaged: the index knows of no tensor '", entry.name, "' of ",
                entry.end - entry.begin, " bytes at ", entry.begin);
    ++found;
  }
  TORCH_CHECK(found == pieces.size(), "[lockstep/checkpoint] ", file, " is damaged: its header names ", found,
              " tensors, the index ", pieces.size());
}

}  // namespace

std::vector<std::string> verify(const std::string& path, const ProgressFunction& progress) {
  std::vector<std::string> problems;
  const auto attempt = [&](const auto& check) {
    try {
      check();
    } catch (const c10::Error& error) {
      problems.emplace_back(error.what_without_backtrace());
    }
  };
  std::optional<Catalog> catalog;
  attempt([&] { catalog = lockstep::detail::open_catalog(path); });
  if (!catalog) return problems;
  lockstep::detail::ProgressTeller teller("verifying " + path, catalog->bytes(), progress);
  const auto files = by_file(*catalog);
  for (std::size_t i = 0; i < files.size(); ++i) {
    const auto file = catalog->path_of(catalog->files[i]);
    attempt([&] {
      check_header(lockstep::detail::read_safetensors_header(file), files[i], file);
      lockstep::detail::MappedFile mapped(file, catalog->files[i].bytes);
      for (const auto& [begin, named] : files[i]) {
        const auto& [name, piece] = named;
        teller.add(piece->bytes);
        if (!piece->checksum) continue;
        const auto actual = crc32c(0, mapped.begin() + begin, static_cast<std::size_t>(piece->bytes));
        if (actual != *piece->checksum) {
          problems.push_back(str("[lockstep/checkpoint] ", file, " is damaged: the bytes of '", *name, "', ",
                                 piece->bytes, " at ", begin, ", are not those that were written"));
        }
      }
    });
  }
  teller.finish();
  return problems;
}

}  // namespace lockstep::dcp
