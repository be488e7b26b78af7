// What takes part in a checkpoint. Modules, optimizers, scalers, schedules, samplers, generators and plain values do
// already (checkpoint/state.h); anything else does by being a Stateful.
//
//   class Curriculum : public lockstep::dcp::Stateful {
//     void save(lockstep::dcp::Outgoing& out) override { out.value("stage", stage_); }
//     void load(lockstep::dcp::Incoming& in) override { stage_ = in.value("stage").toInt(); }
//     int64_t stage_ = 0;
//   };
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/shard/box.h"
#include "lockstep/state/named_values.h"

namespace lockstep::dcp {

class Outgoing;
class Incoming;

class Stateful {
 public:
  Stateful() = default;
  Stateful(const Stateful&) = default;
  Stateful& operator=(const Stateful&) = default;
  virtual ~Stateful() = default;

  /// Gives what there is to save; every rank gives what it has. Runs no collective. Tensors are read after all have
  /// given theirs, and not later than save() or async_save() returns.
  virtual void save(Outgoing& out) = 0;
  /// Asks for it. Tensors are filled after everything was found to fit, on all ranks: what must wait for that belongs
  /// into Incoming::then(). May be called on ranks that were not there when it was saved.
  virtual void load(Incoming& in) = 0;
};

/// What ranks give of a tensor that several of them have.
enum class Replicas {
  kAlike,  ///< any may write it
  kFirst,  ///< that of the first rank counts: others may have something else
};

/// Where an object puts what it has, by names of its own. Made by save().
class Outgoing {
 public:
  /// Numbers, text, tuples, lists, dicts by name. That of the first rank that gives it is saved, with a warning if
  /// others have given something else: what is different on every rank belongs into per_rank().
  void value(const std::string& name, c10::IValue value);
  /// A whole tensor.
  void tensor(const std::string& name, const at::Tensor& tensor, Replicas replicas = Replicas::kFirst);
  /// This rank's part of a tensor of `sizes`, maybe nothing. All ranks' parts together are all of it, and those of two
  /// ranks are the same boxes or have no element in common. Values are not copied.
  void pieces(const std::string& name, const std::vector<int64_t>& sizes, at::ScalarType dtype,
              std::vector<BoxedValues> pieces, Replicas replicas = Replicas::kAlike);
  void bytes(const std::string& name, std::string_view bytes);
  /// Options or state of something: tensors as tensors, and the rest as one value.
  void values(const std::string& name, const NamedValues& values);
  /// Everything that another object gives, under `name`.
  void object(const std::string& name, Stateful& object);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  struct Tensor {
    std::vector<int64_t> sizes = {};
    at::ScalarType dtype = at::kFloat;
    Replicas replicas = Replicas::kAlike;
    std::vector<BoxedValues> pieces = {};
  };
  // Internal: what was given, by full name.
  Outgoing(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  void begin_entry(const std::string& entry);
  const std::map<std::string, Tensor>& all_tensors() const { return tensors_; }
  const std::map<std::string, c10::IValue>& all_values() const { return values_; }

 private:
  std::string full_name(const std::string& name) const;

  const int rank_;
  const int world_size_;
  std::string entry_;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, c10::IValue> values_;
};

/// Where an object finds what was saved, by the names it gave. Made by load(). What is missing is noted, and told by
/// load() together with everything else that does not fit.
class Incoming {
 public:
  /// What a tensor is in the checkpoint.
  struct Form {
    std::vector<int64_t> sizes = {};
    at::ScalarType dtype = at::kFloat;
  };

  virtual ~Incoming() = default;
  /// None if it is not there, and that is not noted.
  virtual std::optional<Form> form(const std::string& name) = 0;
  virtual std::optional<c10::IValue> find_value(const std::string& name) = 0;
  /// Names of tensors and values that begin with `prefix`.
  virtual std::vector<std::string> names(const std::string& prefix = "") = 0;

  /// None, an IValue of nothing, if it is missing.
  c10::IValue value(const std::string& name);
  /// Fills these boxes of a tensor of `sizes`, which are this rank's part.
  virtual void pieces(const std::string& name, const std::vector<int64_t>& sizes, std::vector<BoxedValues> into) = 0;
  /// Fills a whole tensor, of any strides and on any device.
  void tensor(const std::string& name, const at::Tensor& into);
  /// A new tensor on the CPU, filled after load() of the object; undefined if it is missing.
  at::Tensor tensor(const std::string& name);
  /// As Outgoing::bytes() was given, at once; none if they are missing.
  std::optional<std::string> bytes(const std::string& name);
  /// As Outgoing::values() was given; tensors are filled later. Empty if they are missing.
  NamedValues values(const std::string& name);
  /// As Outgoing::object() was given.
  virtual void object(const std::string& name, Stateful& object) = 0;
  /// Reads elements of a tensor at once. Inside of then(), or for what decides what else is asked for. Throws if it
  /// cannot.
  virtual void read_now(const std::string& name, const std::vector<BoxedValues>& into) = 0;

  /// It is not an error that nobody asks for these.
  virtual void pass_over(const std::string& name) = 0;
  /// The full name that it has in the checkpoint: LoadOptions::name_in_checkpoint may give another.
  virtual std::string name_there(const std::string& name) const = 0;
  /// Something does not fit: load() throws, on all ranks, with this among the reasons, having changed nothing.
  virtual void refuse(const std::string& why) = 0;
  /// Missing names are an error.
  virtual bool is_strict() const = 0;

  /// After all tensors were filled, on all ranks; in the order in which it was said.
  virtual void then(std::function<void()> action) = 0;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Of the ranks that saved.
  virtual int saved_world_size() const = 0;

 protected:
  virtual void note_missing(const std::string& name) = 0;
};

}  // namespace lockstep::dcp
