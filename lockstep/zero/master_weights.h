// Masters: where parameters have little precision, the local optimizer steps copies that have more, and parameters get
// the result rounded. A rank has masters of its shard only, so they are divided as state is, and are saved as part of
// it. Internal to zero; ShardedStep uses it. Local.
//
// What always holds between steps: a parameter is its master, rounded. Where it is not, somebody has changed the
// parameter (torch::load(), a broadcast), and the master takes its value: nobody trains from an old one.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/state/optimizer_state.h"

namespace lockstep::detail {

/// What a master is called in a parameter's state.
inline constexpr const char* kMasterName = "master_param";

/// Whether a parameter of this dtype has a master, if masters are of `master_dtype`.
bool has_master(at::ScalarType dtype, const std::optional<at::ScalarType>& master_dtype);

class MasterWeights {
 public:
  /// By position: of the local parameters, over their groups.
  using ByPosition = std::map<int64_t, at::Tensor>;

  /// Without a dtype nothing has a master.
  MasterWeights(std::optional<at::ScalarType> dtype, std::string who) : dtype_(dtype), who_(std::move(who)) {}

  bool are_wanted() const { return dtype_.has_value(); }

  /// What the local optimizer steps in place of these parameters. Those that had masters keep them.
  std::vector<std::vector<at::Tensor>> stepped_in_place_of(const std::vector<std::vector<at::Tensor>>& parameters);

  /// Masters take the values of parameters that are not what they were made. Before masters are used.
  void follow_parameters();
  /// Gives masters the gradients of their parameters, cast.
  void take_gradients();
  /// Rounds masters into parameters, and forgets their gradients.
  void write_back();

  /// Adds masters to the state of what is stepped, and takes them out of it; what has no other state is absent then.
  void add_to(OptimizerStateDict& state) const;
  ByPosition taken_from(OptimizerStateDict& state) const;
  /// Those that are not given are made from the parameters.
  void set(const ByPosition& masters);

  /// State that has a value for each element gets the dtype of what is stepped: a save may be of a run in another
  /// precision.
  void cast(OptimizerStateDict& state) const;

 private:
  struct Stepped {
    at::Tensor parameter;
    at::Tensor master = {};  // undefined: the parameter itself is stepped
  };

  at::Tensor made_master(const at::Tensor& parameter) const;

  const std::optional<at::ScalarType> dtype_;
  const std::string who_;
  std::vector<Stepped> all_;  // by position
};

}  // namespace lockstep::detail
