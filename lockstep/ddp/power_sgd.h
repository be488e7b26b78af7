// PowerSGD (https://arxiv.org/abs/1905.13727): a gradient, as a matrix M, travels as two thin ones, P and Q, with
// M about P * Q'. Every bucket takes two rounds: P = M * Q is summed and made orthonormal, Q = M' * P is averaged.
// Gradients that are sparse are averaged as they are.
#pragma once

#include <memory>

#include "lockstep/ddp/power_sgd_state.h"

namespace lockstep {

/// Python's powerSGD_hook: every parameter is a matrix (dim 0 by the rest), and is compressed if that makes it smaller
/// by more than the state's min_compression_rate; the others are averaged in one piece. Local to make; in the first
/// compressed step it may make a group, which is collective over the state's.
CommHook power_sgd_hook(const std::shared_ptr<PowerSGDState>& state);

/// Python's batched_powerSGD_hook: the whole bucket is one square matrix, padded with zeros. Faster, much less exact.
CommHook batched_power_sgd_hook(const std::shared_ptr<PowerSGDState>& state);

}  // namespace lockstep
