// Some of the programs of tests/threads/combinations with ranks as processes.
#include "lockstep/testing/combinations/program.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::testing::combinations {
namespace {

constexpr const char* kSample[] = {
    "model=plain, way=elements, event=resume",
    "model=tied, way=parameters, loop=accumulate, world=3",
    "model=batch norm, way=bucket views, inputs=uneven",
    "model=branches by rank, way=gradients, wrapper=find_unused_parameters",
    "model=sparse, way=plain, event=load",
    "model=complex, way=replicated, loop=backward throws",
    "model=two models, way=plain, wrapper=gradient_as_bucket_view, zeroed by=module",
    "model=struct output, way=overlap, wrapper=static_graph",
    "model=tuple output, way=gradients, loop=weighted, world=3",
    "model=plain, way=gradients, wrapper=allreduce_hook",
};

class Processes : public ::testing::TestWithParam<int> {};

TEST_P(Processes, TrainAsOneProcessOrAreRefused) {
  const auto combination = programs().parse(kSample[GetParam()]);
  report_to_gtest(run_processes_from_gtest(
      {.world_size = world_size_of(combination), .collective_timeout = std::chrono::seconds(30)},
      [&](const World& world) { run_program(world, combination); }));
}

INSTANTIATE_TEST_SUITE_P(Combinations, Processes, ::testing::Range(0, static_cast<int>(std::size(kSample))));

}  // namespace
}  // namespace lockstep::testing::combinations
