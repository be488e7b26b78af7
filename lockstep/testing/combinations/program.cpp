#include "lockstep/testing/combinations/program.h"

#include <algorithm>
#include <random>
#include <sstream>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/testing/combinations/rules.h"

namespace lockstep::testing::combinations {
namespace {

template <class Rows>
Axis axis(const std::string& name, const Rows& rows) {
  Axis result{name, {}};
  for (const auto& row : rows) result.values.push_back(row.name);
  return result;
}

std::string indented(const std::string& text, int spaces) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);)
    result += std::string(static_cast<std::size_t>(spaces), ' ') + line + "\n";
  return result;
}

/// As C++, to be read.
std::string text_of(const Program& program) {
  const auto& [kind, way, wrapper, loop, event, has_uneven_inputs, zeroes_module, data_ranks] = program;
  std::string text = str("auto net = std::make_shared<", kind.type, ">();  // rank of ", data_ranks * wrapper.tp_size,
                         "; see models.cpp\n");
  if (kind.name == "two models") text += "// and a Generator the same way, with the loop of libtorch's DCGAN\n";
  const std::string group = wrapper.tp_size > 1 ? "mesh.get_group(\"dp\")" : "group";
  const std::string mesh = wrapper.tp_size > 1 ? ".mesh = mesh[\"dp\"]" : "";
  if (wrapper.tp_size > 1) {
    text += str("auto mesh = init_device_mesh(\"cpu\", {", data_ranks, ", ", wrapper.tp_size,
                "}, {.mesh_dim_names = {\"dp\", \"tp\"}});\n",
                "parallelize_module(net, mesh[\"tp\"], plan_of(*net));  // see models.cpp\n");
  }
  text += wrapper.is_bare      ? "auto& ddp = *net;\n"
          : wrapper.is_sharded ? str("for (auto& child : net->children()) fully_shard(*child, {", mesh, wrapper.options,
                                     "});  // but not those with tied parameters\nauto root = fully_shard(net, {", mesh,
                                     wrapper.options, "}); auto& ddp = *net;\n")
                               : str("DistributedDataParallel ddp(net, ", group, ", {", wrapper.options, "});\n",
                                     indented(wrapper.text, 0));
  text += str("const auto sgd = SGDOptions(0.1)", kind.is_sparse ? "" : ".momentum(0.9).weight_decay(0.01)", ";\n");
  text += way.text + "\nfor (int epoch = 0; epoch < 2; ++epoch) {\n";
  const auto joinables = way.name == "plain" || way.overlap ? "{&ddp}" : "{&ddp, &optimizer}";
  const auto settings = way.name == "plain" ? ", {.on_mirrored_step = step_and_zero_grad}" : "";
  if (has_uneven_inputs) text += str("  Join(", joinables, settings, ").run([&] {  // rank 0 has one batch\n");
  text += "  for (auto& [a, b] : batches_of(rank, epoch)) {\n";
  text += indented((zeroes_module ? "net->zero_grad();\n" : "optimizer.zero_grad();\n") + loop.text, 4);
  if (!way.overlap) text += "    optimizer.step();\n";
  text += str("  }\n", has_uneven_inputs ? "  });\n" : "");
  if (!event.text.empty()) text += str("  if (epoch == 0) { ", event.text, " }\n");
  return text + "}\n";
}

/// Programs that no rule is about, drawn from all that have the values `fixed` names.
std::vector<Combination> drawn_programs(uint64_t seed, const std::string& fixed) {
  constexpr std::size_t kCount = 1000;
  const auto& axes = programs().axes();
  const auto given = programs().parse(fixed);
  std::mt19937_64 engine(seed);
  std::vector<Combination> list;
  while (list.size() < kCount) {
    auto one = given;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      if (fixed.find(axes[i].name + "=") == std::string::npos) one[i] = engine() % axes[i].values.size();
    }
    if (programs().rules_of(one).empty()) list.push_back(std::move(one));
  }
  return list;
}

}  // namespace

const Combinations& programs() {
  static const Combinations all({axis("model", model_kinds()),
                                 axis("way", ways()),
                                 axis("wrapper", wrappers()),
                                 axis("loop", loops()),
                                 axis("event", events()),
                                 {"inputs", {"even", "uneven"}},
                                 {"zeroed by", {"optimizer", "module"}},
                                 {"world", {"2", "1", "3"}}},
                                program_rules());
  return all;
}

int world_size_of(const Combination& combination) {
  const auto program = program_of(combination);
  return program.data_ranks * program.wrapper.tp_size;
}

Program program_of(const Combination& combination) {
  return {.kind = model_kinds()[combination[0]],
          .way = ways()[combination[1]],
          .wrapper = wrappers()[combination[2]],
          .loop = loops()[combination[3]],
          .event = events()[combination[4]],
          .has_uneven_inputs = combination[5] == 1,
          .zeroes_module = combination[6] == 1,
          .data_ranks = std::stoi(programs().value(combination, "world"))};
}

std::string description_of(const Combination& combination) {
  return str("LOCKSTEP_COMBINATIONS=\"", programs().describe(combination), "\"\n", text_of(program_of(combination)));
}

std::vector<Combination> asked_for() {
  const auto text = env("LOCKSTEP_COMBINATIONS").value_or("pairs");
  const auto colon = text.find(':');
  if (text.substr(0, colon) == "random") {
    const auto comma = std::min(text.find(", "), text.size());
    const auto seed = parse_integer("LOCKSTEP_COMBINATIONS", text.substr(colon + 1, comma - colon - 1));
    return drawn_programs(static_cast<uint64_t>(seed), comma == text.size() ? "" : text.substr(comma + 2));
  }
  if (text.find('=') != std::string::npos) return {programs().parse(text)};
  const auto seed = colon == std::string::npos ? 1 : parse_integer("LOCKSTEP_COMBINATIONS", text.substr(colon + 1));
  const int strength = text.substr(0, colon) == "triples" ? 3 : 2;
  return programs().covering(strength, static_cast<uint64_t>(seed));
}

}  // namespace lockstep::testing::combinations
