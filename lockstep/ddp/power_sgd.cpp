#include "lockstep/ddp/power_sgd.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "lockstep/comm/collectives.h"
#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/orthogonalize.h"
#include "lockstep/shard/buffer.h"

namespace lockstep {
namespace {

using detail::PowerSGDMemory;

/// A batch of matrices of one shape, with their factors: m is [batch, rows, columns], p [batch, rows, rank] and
/// q [batch, columns, rank].
struct Factored {
  at::Tensor m;
  at::Tensor p;
  at::Tensor q;
  std::vector<at::Tensor> parts;  // what m was stacked from, if it was
};

/// Matrices of one shape, and how they are compressed.
struct Shape {
  int64_t rows;
  int64_t columns;
  int64_t rank;
  std::vector<at::Tensor> matrices = {};
};

/// What the callbacks of one bucket need.
struct Job {
  std::shared_ptr<PowerSGDMemory> memory;
  at::Tensor buffer;
  std::vector<at::Tensor> uncompressed;
  std::vector<Factored> factored;
  int64_t world_size;
  double epsilon;
  bool keeps_error;
};

/// Makes `tensor` fit: as it is, if it has the length and dtype; otherwise anew, uninitialised, and returns false.
/// What was remembered for another layout of the buckets is dropped here. `group`: that sums it, if one does.
bool fit(at::Tensor& tensor, int64_t length, const at::Tensor& like, const GroupPtr& group = nullptr) {
  if (tensor.defined() && tensor.numel() == length && tensor.scalar_type() == like.scalar_type()) {
    if (tensor.device() != like.device()) tensor = tensor.to(like.device());  // it was loaded
    return true;
  }
  tensor = group ? detail::allocate_buffer(length, like.options(), group) : at::empty({length}, like.options());
  return false;
}

/// In memory order, dim 0 by the rest: no copy, whatever the strides, and the same on all ranks.
at::Tensor as_matrix(const at::Tensor& gradient) {
  const auto real = gradient.is_complex() ? at::view_as_real(gradient) : gradient;
  const auto rows = gradient.dim() == 0 ? 1 : gradient.size(0);
  const auto columns = real.numel() / rows;
  return real.as_strided({rows, columns}, {columns, 1});
}

/// Normal numbers, the same on all ranks. The global generator is not touched.
void fill_randomly(const at::Tensor& tensor, const at::Generator& generator) {
  // On the host: every device has its own sequence.
  tensor.copy_(at::randn(tensor.sizes(), generator, tensor.options().device(at::kCPU)));
}

/// Adds what compression took away in the last step, and remembers the sum: after compression the difference is the
/// new error.
void feed_back(at::Tensor& error, const at::Tensor& input) {
  if (fit(error, input.numel(), input)) input.add_(error);
  error.copy_(input);
}

/// Q as this step begins with it, orthonormal.
void start_qs(PowerSGDState& state, const std::vector<Factored>& factored, bool has_old_qs) {
  const auto epsilon = state.options().orthogonalization_epsilon;
  std::optional<at::Generator> generator;
  if (!has_old_qs) generator = at::detail::createCPUGenerator(state.next_seed());
  for (const auto& each : factored) {
    if (generator) fill_randomly(each.q, *generator);
    detail::orthogonalize(each.q, epsilon);
  }
}

at::Tensor sum_of_qs(Job& job) {
  for (const auto& each : job.factored) {
    detail::orthogonalize(each.p, job.epsilon);
    auto q = each.q;
    at::bmm_out(q, each.m.transpose(1, 2), each.p);
  }
  return job.memory->q;
}

void multiply_out(Job& job) {
  job.memory->q.div_(job.world_size);
  for (auto& each : job.factored) {
    at::bmm_out(each.m, each.p, each.q.transpose(1, 2));
    for (std::size_t i = 0; i < each.parts.size(); ++i) each.parts[i].copy_(each.m[static_cast<int64_t>(i)]);
  }
}

// ---- one matrix per parameter ----

FuturePtr launch_uncompressed(Job& job, const GroupPtr& group) {
  std::vector<at::Tensor> parts;
  int64_t length = 0;
  for (const auto& part : job.uncompressed) {
    parts.push_back(part.view({-1}));
    length += part.numel();
  }
  fit(job.memory->rest, length, job.buffer, group);
  at::cat_out(job.memory->rest, parts);
  return launch_all_reduce(job.memory->rest, group).future();
}

void take_uncompressed(Job& job) {
  if (job.uncompressed.empty()) return;
  auto& rest = job.memory->rest;
  rest.div_(job.world_size);
  int64_t offset = 0;
  for (const auto& part : job.uncompressed) {
    part.copy_(rest.narrow(0, offset, part.numel()).view(part.sizes()));
    offset += part.numel();
  }
}

at::Tensor finish(Job& job) {
  if (job.keeps_error) job.memory->error.sub_(job.buffer);
  return job.buffer;
}

/// Divides the gradients into those to compress, by shape, and the others, which go into job.uncompressed.
std::vector<Shape> divide(PowerSGDState& state, const GradBucket& bucket, Job& job) {
  const auto& options = state.options();
  std::vector<Shape> shapes;
  for (const auto& gradient : bucket.gradients()) {
    if (gradient.numel() == 0) continue;
    const auto matrix = as_matrix(gradient);
    const auto rows = matrix.size(0);
    const auto columns = matrix.size(1);
    const auto rank = std::min({rows, columns, options.matrix_approximation_rank});
    const auto compressed = (rows + columns) * rank;
    if (static_cast<double>(compressed) * options.min_compression_rate >= static_cast<double>(matrix.numel())) {
      job.uncompressed.push_back(matrix);
      state.add_to_stats(matrix.numel(), matrix.numel());
      continue;
    }
    state.add_to_stats(matrix.numel(), compressed);
    auto found = std::find_if(shapes.begin(), shapes.end(),
                              [&](const Shape& shape) { return shape.rows == rows && shape.columns == columns; });
    if (found == shapes.end())
      found = shapes.insert(shapes.end(), Shape{.rows = rows, .columns = columns, .rank = rank});
    found->matrices.push_back(matrix);
  }
  return shapes;
}

/// The batches that are multiplied together, with their parts of P and Q.
std::vector<Factored> factor(const std::vector<Shape>& shapes, bool is_batched, PowerSGDMemory& memory) {
  std::vector<Factored> factored;
  int64_t p_offset = 0;
  int64_t q_offset = 0;
  const auto add = [&](const Shape& shape, const at::Tensor& m, std::vector<at::Tensor> parts) {
    const auto p_length = m.size(0) * shape.rows * shape.rank;
    const auto q_length = m.size(0) * shape.columns * shape.rank;
    factored.push_back({.m = m,
                        .p = memory.p.narrow(0, p_offset, p_length).view({m.size(0), shape.rows, shape.rank}),
                        .q = memory.q.narrow(0, q_offset, q_length).view({m.size(0), shape.columns, shape.rank}),
                        .parts = std::move(parts)});
    p_offset += p_length;
    q_offset += q_length;
  };
  std::vector<at::Tensor> stacks;
  for (const auto& shape : shapes) {
    if (is_batched && shape.matrices.size() > 1) {
      stacks.push_back(at::stack(shape.matrices));
      add(shape, stacks.back(), shape.matrices);
    } else {
      for (const auto& matrix : shape.matrices) add(shape, matrix.unsqueeze(0), {});
    }
  }
  // Kept until the next step: other streams still read them.
  memory.stacks = std::move(stacks);
  return factored;
}

FuturePtr run_power_sgd(PowerSGDState& state, GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  const auto& options = state.options();
  const auto group = state.group_for(bucket);
  const auto& buffer = bucket.buffer();
  const bool is_sparse = buffer.is_sparse() || bucket.sparse_rows();
  if (!state.compresses() || is_sparse) {
    state.count(bucket);
    return detail::average_future(buffer, group);
  }
  const auto memory = state.memory_of(bucket);
  const auto job = std::make_shared<Job>(Job{.memory = memory,
                                             .buffer = buffer,
                                             .uncompressed = {},
                                             .factored = {},
                                             .world_size = group->getSize(),
                                             .epsilon = options.orthogonalization_epsilon,
                                             .keeps_error = options.use_error_feedback});
  if (options.use_error_feedback) feed_back(memory->error, buffer);
  const auto shapes = divide(state, bucket, *job);
  state.report_stats(bucket);
  state.count(bucket);

  std::vector<FuturePtr> first;
  if (!job->uncompressed.empty()) first.push_back(launch_uncompressed(*job, group));
  if (shapes.empty() && first.empty()) return completed_future(buffer);
  if (shapes.empty()) {
    return then(first.at(0), [job](const at::Tensor&) {
      const at::NoGradGuard no_grad;
      take_uncompressed(*job);
      return finish(*job);
    });
  }

  int64_t p_length = 0;
  int64_t q_length = 0;
  for (const auto& shape : shapes) {
    const auto count = static_cast<int64_t>(shape.matrices.size());
    p_length += count * shape.rows * shape.rank;
    q_length += count * shape.columns * shape.rank;
  }
  const auto second_group = state.second_round().group_for(group, buffer.device());
  fit(memory->p, p_length, buffer, group);
  const bool has_old_qs = fit(memory->q, q_length, buffer, second_group) && options.warm_start;
  job->factored = factor(shapes, options.batch_tensors_with_same_shape, *memory);
  start_qs(state, job->factored, has_old_qs);
  for (const auto& each : job->factored) {
    auto p = each.p;
    at::bmm_out(p, each.m, each.q);
  }
  // P needs no division: only its columns' directions count.
  first.push_back(launch_all_reduce(memory->p, group).future());
  return state.second_round().run(
      bucket, second_group, first,
      [job] {
        take_uncompressed(*job);
        return sum_of_qs(*job);
      },
      [job] {
        multiply_out(*job);
        return finish(*job);
      });
}

// ---- one matrix per bucket ----

FuturePtr run_batched_power_sgd(PowerSGDState& state, GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  const auto& options = state.options();
  const auto group = state.group_for(bucket);
  const auto& buffer = bucket.buffer();
  const bool is_sparse = buffer.is_sparse() || bucket.sparse_rows();
  if (!state.compresses() || is_sparse || buffer.numel() == 0) {
    state.count(bucket);
    return detail::average_future(buffer, group);
  }
  const auto length = buffer.numel();
  auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(length)));
  while (side * side < length) ++side;
  const auto rank = std::min(side, options.matrix_approximation_rank);
  state.add_to_stats(length, 2 * side * rank);
  state.report_stats(bucket);
  state.count(bucket);

  const auto memory = state.memory_of(bucket);
  fit(memory->square, side * side, buffer);
  memory->square.narrow(0, 0, length).copy_(buffer);
  memory->square.narrow(0, length, side * side - length).zero_();
  if (options.use_error_feedback) feed_back(memory->error, memory->square);

  const auto second_group = state.second_round().group_for(group, buffer.device());
  fit(memory->p, side * rank, buffer, group);
  const bool has_old_qs = fit(memory->q, side * rank, buffer, second_group) && options.warm_start;
  const auto job = std::make_shared<Job>(Job{.memory = memory,
                                             .buffer = buffer,
                                             .uncompressed = {},
                                             .factored = {{.m = memory->square.view({1, side, side}),
                                                           .p = memory->p.view({1, side, rank}),
                                                           .q = memory->q.view({1, side, rank}),
                                                           .parts = {}}},
                                             .world_size = group->getSize(),
                                             .epsilon = options.orthogonalization_epsilon,
                                             .keeps_error = options.use_error_feedback});
  start_qs(state, job->factored, has_old_qs);
  auto p = job->factored[0].p;
  at::bmm_out(p, job->factored[0].m, job->factored[0].q);
  return state.second_round().run(
      bucket, second_group, {launch_all_reduce(memory->p, group).future()}, [job] { return sum_of_qs(*job); },
      [job] {
        multiply_out(*job);
        const auto& square = job->memory->square;
        if (job->keeps_error) job->memory->error.sub_(square);
        return job->buffer.copy_(square.narrow(0, 0, job->buffer.numel()));
      });
}

}  // namespace

CommHook power_sgd_hook(const std::shared_ptr<PowerSGDState>& state) {
  TORCH_CHECK(state, "[lockstep/ddp] power_sgd_hook was given no state");
  return {.name = "powerSGD_hook", .run = [state](GradBucket& bucket) { return run_power_sgd(*state, bucket); }};
}

CommHook batched_power_sgd_hook(const std::shared_ptr<PowerSGDState>& state) {
  TORCH_CHECK(state, "[lockstep/ddp] batched_power_sgd_hook was given no state");
  return {.name = "batched_powerSGD_hook",
          .run = [state](GradBucket& bucket) { return run_batched_power_sgd(*state, bucket); }};
}

}  // namespace lockstep
