// What is looked at before libtorch reads a message: its reader trusts lengths, indices and the order of instructions.
// Internal to rpc.
#pragma once

#include <torch/csrc/distributed/rpc/message.h>

#include <span>

namespace lockstep::rpc::detail {

/// Throws Refused unless the request is of a kind that workers send each other, and the pickles in it can be read
/// without harm: whole, balanced, with no more nesting than kMostNesting, and no other names than those of values that
/// travel. Whether it makes sense is for its reader to say.
void check_request(const torch::distributed::rpc::Message& request);

/// The same for an answer.
void check_answer(const torch::distributed::rpc::Message& answer);

/// The same for one pickle.
void check_pickle(std::span<const char> pickle);

constexpr int kMostNesting = 100;

}  // namespace lockstep::rpc::detail
