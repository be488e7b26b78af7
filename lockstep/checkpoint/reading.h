// What a load knows of a checkpoint, and what was asked of it so far. Internal to checkpoint.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/catalog.h"
#include "lockstep/checkpoint/load.h"
#include "lockstep/checkpoint/mapped_file.h"
#include "lockstep/checkpoint/together.h"

namespace lockstep::detail {

class Reading : public dcp::Incoming {
 public:
  Reading(Catalog catalog, const dcp::LoadOptions& options, int rank, int world_size);

  /// Names are those of this entry from now on.
  void begin_entry(const std::string& entry);
  /// After everything was asked for: throws if it does not fit.
  void check() const;
  /// Throws, naming file and tensor, if bytes that will be read are not those that were written.
  void verify();
  void fill(ProgressTeller* progress);
  void finish();

  /// Of pieces that will be read.
  int64_t bytes_to_read() const;
  dcp::Loaded loaded() const;

  std::optional<Form> form(const std::string& name) override;
  std::optional<c10::IValue> find_value(const std::string& name) override;
  std::vector<std::string> names(const std::string& prefix) override;
  void pieces(const std::string& name, const std::vector<int64_t>& sizes, std::vector<BoxedValues> into) override;
  void object(const std::string& name, dcp::Stateful& object) override;
  void read_now(const std::string& name, const std::vector<BoxedValues>& into) override;
  void pass_over(const std::string& name) override;
  void refuse(const std::string& why) override;
  std::string name_there(const std::string& name) const override;
  bool is_strict() const override { return options_.strict; }
  void then(std::function<void()> action) override;
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  int saved_world_size() const override { return catalog_.world_size; }

 protected:
  void note_missing(const std::string& name) override;

 private:
  struct Request {
    const std::string* name;
    const StoredTensor* stored;
    BoxedValues into;
  };
  /// A piece that is read, and for whom.
  struct Wanted {
    const std::string* name;
    const StoredTensor* stored;
    std::vector<const BoxedValues*> into;
  };

  std::string full_name(const std::string& name) const;
  const StoredTensor* find(const std::string& full_name) const;
  MappedFile& file_of(const StoredPiece& piece);
  /// All values of a piece, as they lie in the file.
  at::Tensor values_of(const StoredPiece& piece, const std::string& name, const StoredTensor& stored);
  /// Those that it has of what is wanted.
  void read(const StoredPiece& piece, const Wanted& wanted);
  /// The same in one pass, if both sides are runs of bytes; false if they are not.
  bool stream(const StoredPiece& piece, const Wanted& wanted);
  bool is_verified_now() const { return options_.verify == dcp::Verify::kWhileReading; }
  void check_checksum(const std::string& name, const StoredPiece& piece);
  void compare(uint32_t checksum, const std::string& name, const StoredPiece& piece) const;
  std::map<const StoredPiece*, Wanted> wanted_pieces() const;
  std::optional<std::string> owner_of(const std::string& name) const;
  std::vector<std::string> not_asked_for() const;

  // Fixed after construction.
  const Catalog catalog_;
  const dcp::LoadOptions options_;
  const int rank_;
  const int world_size_;

  std::map<std::size_t, std::unique_ptr<MappedFile>> files_;
  std::string entry_;
  std::vector<std::string> entries_;
  std::vector<Request> requests_;
  std::vector<std::pair<std::string, std::function<void()>>> actions_;  // with the entries they are of
  std::set<std::string> asked_;                                         // full names, as are the others
  std::set<std::string> read_later_;
  std::vector<std::string> missing_;
  std::vector<std::string> problems_;
};

}  // namespace lockstep::detail
