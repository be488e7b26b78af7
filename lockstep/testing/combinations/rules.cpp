// What the library refuses, and what is no program at all. A combination that no rule is about must train.
#include "lockstep/testing/combinations/rules.h"

namespace lockstep::testing::combinations {
namespace {

constexpr auto kSenseless = Rule::Kind::kSenseless;

/// All but those that are bound to one DistributedDataParallel.
constexpr const char* kFreeWays = "way=plain|replicated|parameters|bucket views|elements";
constexpr const char* kDividedWays = "way=parameters|bucket views|elements|gradients";
constexpr const char* kUndelayed =
    "wrapper=default|find_unused_parameters|static_graph|gradient_as_bucket_view|per_parameter|mixed_precision|"
    "allreduce_hook|bf16_compress_hook|compiled|ddp+tp";
/// Not one backward for one forward.
constexpr const char* kOtherForwards =
    "loop=several forwards|forward for the log|no_sync after synced|module throws|loss throws|backward throws";
constexpr const char* kUnpenalized =
    "loop=simple|accumulate|accumulate synced|several forwards|forward for the log|evaluation between|weighted|"
    "gradient penalty|module throws|loss throws|backward throws|skipped step|no_sync after synced";
constexpr const char* kSharded = "wrapper=fully_shard|fully_shard kept|fully_shard compiled|fsdp+tp";
constexpr const char* kDivided = "wrapper=tp|ddp+tp|fsdp+tp";
constexpr const char* kMismatch = "All ranks must make the same calls in the same order";

}  // namespace

std::vector<Rule> program_rules() {
  return {
      // Unused parameters must be asked for. The error comes with the next forward, as Python's does.
      {.when = {"model=branches by step|branches by rank",
                "wrapper=default|gradient_as_bucket_view|mixed_precision|allreduce_hook|bf16_compress_hook|delayed|"
                "compiled|ddp+tp"},
       .text = "[lockstep/",
       .is_late = true},
      {.when = {"model=branches by step", "wrapper=static_graph"}, .text = "static_graph", .is_late = true},
      {.when = {"model=opaque output", "wrapper=find_unused_parameters"}, .text = "return from forward() everything"},

      // Frozen parameters are unused ones; those that are trainable now are in no bucket.
      {.when =
           {kFreeWays, "event=freeze",
            "wrapper=default|static_graph|gradient_as_bucket_view|mixed_precision|allreduce_hook|bf16_compress_hook|"
            "compiled|ddp+tp"},
       .text = "[lockstep/ddp]"},
      {.when = {"event=unfreeze", "world=2|3", kUndelayed}, .text = "after it was wrapped"},

      // Sharded gradients (docs/zero.md, "Stages").
      {.when = {"way=gradients", "wrapper=gradient_as_bucket_view|mixed_precision|allreduce_hook|bf16_compress_hook"},
       .text = "which cannot be together with"},
      {.when = {"way=gradients", "wrapper=per_parameter|delayed"}, .text = "ZeroStage::kGradients"},
      {.when = {"way=gradients", "model=sparse|complex"}, .text = "which cannot be together with"},
      {.when = {"way=gradients", "event=unfreeze and wrap again"}, .text = "ZeroStage::kGradients"},
      {.when = {"way=gradients", "event=unfreeze", "world=1"}, .text = "ZeroStage::kGradients"},
      {.when = {"way=gradients", "event=freeze"}, .text = "[lockstep/", .is_late = true},
      {.when = {"way=gradients", "event=add group"}, .text = "is not in the optimizer"},

      // Steps inside of backward (docs/zero.md, "What else holds").
      {.when = {"way=overlap|interleaved", "wrapper=allreduce_hook|bf16_compress_hook|mixed_precision"},
       .text = "comm hook"},
      {.when = {"way=overlap|interleaved", "wrapper=per_parameter"}, .text = "needs buckets"},
      {.when = {"way=overlap|interleaved", "wrapper=delayed"}, .text = "delay_all_reduce_named_params"},
      {.when = {"way=overlap|interleaved", "model=sparse"}, .text = "sparse gradient"},
      {.when = {"way=overlap|interleaved", "loop=backward throws", "inputs=even"}, .text = "[lockstep/ddp]"},
      // Beside a rank that mirrors, either the refusal or the mismatch is heard of first.
      {.when = {"way=overlap|interleaved", "loop=backward throws", "inputs=uneven"}, .text = "[lockstep/"},
      {.when = {"way=overlap|interleaved", "event=add group"}, .text = "is none of the optimizer's parameters"},
      {.when = {"way=overlap|interleaved", "event=resume"}, .text = "is not possible yet"},
      {.when = {"way=overlap|interleaved", "event=freeze"}, .text = "[lockstep/", .is_late = true},
      {.when = {"way=overlap|interleaved", "event=unfreeze", "world=1"}, .text = "overlap_with_ddp"},
      {.when = {"way=overlap|interleaved", "event=unfreeze and wrap again|wrap again"}, .text = "another DDP"},
      {.when = {"way=overlap|interleaved", "loop=accumulate synced|weight penalty|skipped step"},
       .text = "every averaged backward is a step",
       .kind = kSenseless},
      {.when = {"way=overlap|interleaved", "loop=forward for the log", "model=batch norm"},
       .text = "that forward sees the parameters of the next step, and its statistics are others",
       .kind = kSenseless},
      {.when = {"way=overlap|interleaved", "model=two models"},
       .text = "the generator's backward averages the discriminator's gradients, and would step it",
       .kind = kSenseless},

      // Division of single parameters.
      // Together with a penalty's gradient it is dense.
      {.when = {"way=elements", "model=sparse", kUnpenalized}, .text = "is sparse"},
      {.when = {"way=parameters|bucket views|elements|gradients|overlap|interleaved", "model=shared storage"},
       .text = "share"},

      // Scopes in which ranks run out of inputs: there is one averaged backward for each averaged forward, and then one
      // step (docs/join.md). What else live ranks do is noticed when others mirror something else.
      {.when = {"inputs=uneven", "wrapper=per_parameter|delayed"}, .text = "cannot be in a Join scope with"},
      {.when = {"inputs=uneven", "model=two models"}, .text = "[lockstep/join]"},
      {.when = {"inputs=uneven", "world=2|3", "way=plain|replicated", kOtherForwards}, .text = "[lockstep/"},
      {.when = {"inputs=uneven", "world=2|3", "way=overlap|interleaved",
                "loop=several forwards|forward for the log|no_sync after synced|module throws|loss throws"},
       .text = kMismatch},
      // By then ranks have stepped their shards.
      {.when = {"inputs=uneven", "world=2|3", kDividedWays, kOtherForwards}, .text = kMismatch, .is_late = true},
      {.when = {"inputs=uneven", "world=2|3", kDividedWays, "loop=accumulate synced|evaluation between|skipped step"},
       .text = kMismatch,
       .is_late = true},
      {.when = {"inputs=uneven", "world=2|3", "way=plain|replicated", "loop=accumulate synced"},
       .text = "an average is divided once more by ranks that give zeros, as in Python, of which a warning tells",
       .kind = kSenseless},
      {.when = {"inputs=uneven", "world=2|3", "way=replicated", "loop=skipped step"},
       .text = "ranks have not stepped alike",
       .is_late = true},
      {.when = {"inputs=uneven", "world=2|3", "wrapper=static_graph", "model=branches by rank"},
       .text = "a branch that only ranks without inputs take is not in every step",
       .kind = kSenseless},

      // Units of fully_shard() (docs/fsdp.md).
      {.when = {kSharded, "way=replicated|parameters|bucket views|elements"}, .text = "is a shard already"},
      {.when = {kSharded, "way=gradients|overlap|interleaved"},
       .text = "these live in DDP's buckets",
       .kind = kSenseless},
      {.when = {kSharded, "event=wrap again|unfreeze and wrap again"}, .text = "is sharded already"},
      {.when = {kSharded, "inputs=uneven", "world=1", "loop=accumulate synced"},
       .text = "has a gradient of an earlier backward"},
      {.when = {kSharded, "inputs=uneven", "loop=accumulate"}, .text = "without gradient sync inside of a Join scope"},
      {.when = {kSharded, "inputs=uneven", "loop=evaluation between"}, .text = "Evaluate outside of it"},
      // Its second forward is mirrored as a step of its own, behind which the shards have changed.
      {.when = {kSharded, "inputs=uneven", "world=2|3", "loop=gradient penalty"},
       .text = "was changed between forward and backward"},
      {.when = {kSharded, "inputs=uneven", "world=2|3", "model=branches by step"}, .text = kMismatch},
      {.when = {"wrapper=fsdp+tp", "inputs=uneven", "event=add group", "zeroed by=optimizer"},
       .text = "ranks of one data group refuse it, and those of the other do not always hear of that",
       .kind = kSenseless},
      {.when = {kSharded, "inputs=uneven", "event=add group", "zeroed by=optimizer"},
       .text = "has a gradient of an earlier backward"},
      {.when = {kSharded, "inputs=uneven", "world=2|3", kOtherForwards},
       .text = "some are mirrored here, and refused for wrappers",
       .kind = kSenseless},
      {.when = {kSharded, "inputs=uneven", "world=2|3", "loop=skipped step"},
       .text = "ranks have not stepped alike",
       .is_late = true},
      {.when = {kSharded, "model=sparse"}, .text = "is sparse, which cannot be sharded"},
      {.when = {kSharded, "model=shared storage"}, .text = "share memory"},
      // Ranks gather different units at a time.
      {.when = {kSharded, "model=branches by rank", "world=2|3"}, .text = kMismatch},

      // Divided layers (docs/tensor-parallel.md).
      {.when = {kDivided, "model=complex"}, .text = "it has no layers that a style knows", .kind = kSenseless},
      {.when = {"wrapper=tp|ddp+tp", "model=shared storage"}, .text = "share memory"},
      {.when = {"wrapper=tp", "way=replicated|parameters|bucket views|elements"}, .text = "is a shard already"},
      {.when = {"wrapper=ddp+tp", "way=replicated|parameters|bucket views|elements|gradients|overlap|interleaved"},
       .text = "is a shard already"},
      {.when = {"wrapper=tp", "world=2|3"}, .text = "its ranks have one batch", .kind = kSenseless},
      {.when = {"wrapper=tp", "inputs=uneven"}, .text = "there is nothing to join", .kind = kSenseless},
      {.when = {"wrapper=tp", "way=gradients|overlap|interleaved"},
       .text = "these live in DDP's buckets",
       .kind = kSenseless},
      {.when = {"wrapper=tp", "event=wrap again|unfreeze and wrap again"}, .text = "is divided among ranks already"},

      // Compiled modules (docs/graph.md).
      {.when = {"wrapper=compiled|fully_shard compiled", "model=opaque output"}, .text = "the forward keeps a result"},
      {.when = {"wrapper=compiled|fully_shard compiled", "loop=gradient penalty"}, .text = "is differentiated once"},
      {.when = {"wrapper=compiled|fully_shard compiled", "loop=backward throws"},
       .text = "registers a hook on what it computes"},

      // Ways to reduce.
      {.when = {"wrapper=per_parameter", "loop=weighted"}, .text = "a weighted backward needs buckets"},
      {.when = {"wrapper=per_parameter", "model=sparse"}, .text = "is not dense"},
  };
}

}  // namespace lockstep::testing::combinations
