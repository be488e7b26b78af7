// Notices before every forward that a module has other layers or parameters than it had, or that other ones require
// gradients: by addresses and counts, without building a name. Internal to ddp.
#pragma once

#include <cstddef>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

/// Whoever compares must keep the parameters it knows alive, or a new one could lie where an old one was.
class ModuleWatch {
 public:
  /// Keeps what the module is made of now.
  void note(torch::nn::Module& module);
  bool has_changed(torch::nn::Module& module) const;

 private:
  /// A module with its number of parameters and children, or a parameter and whether it requires a gradient.
  struct Part {
    const void* address;
    std::size_t parameters;
    std::size_t children_or_grad;
    bool operator==(const Part&) const = default;
  };
  template <class Visit>
  static bool for_each_part(torch::nn::Module& module, const Visit& visit);

  std::vector<Part> parts_;
};

}  // namespace lockstep::detail
