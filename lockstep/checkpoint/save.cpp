#include "lockstep/checkpoint/save.h"

#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "lockstep/base/rank_local.h"
#include "lockstep/checkpoint/save_job.h"
#include "lockstep/comm/world.h"

namespace lockstep::dcp {
namespace {

using lockstep::detail::SaveJob;
using lockstep::detail::StagingBuffer;
using lockstep::detail::Together;

/// Training goes first. Linux has priorities of threads, and no harm is done where that is refused.
void yield_to_training() {
  constexpr int kLowest = 19;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kLowest);
}

/// All ranks of `group`, once more: what saving threads say must not meet what training says.
GroupPtr second_group(const Together& together) {
  if (!together.group()) return nullptr;
  std::vector<int> ranks(static_cast<std::size_t>(together.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return new_group(together.group(), ranks);
}

}  // namespace

void save(const std::string& path, const State& state, const SaveOptions& options) {
  const Together together(options.process_group);
  SaveJob(path, state, options, together).run(together);
}

struct AsyncSaver::Job {
  explicit Job(const GroupPtr& group) : training(group), saving(second_group(training)) {}

  // Fixed after construction.
  const Together training;
  const Together saving;

  StagingBuffer buffer;
  std::unique_ptr<SaveJob> job;
  std::thread thread;
  std::exception_ptr problem;  // read after the thread has ended
  std::atomic<bool> is_running = false;
};

AsyncSaver::AsyncSaver(const GroupPtr& group) : job_(std::make_unique<Job>(group)) {}

AsyncSaver::~AsyncSaver() {
  try {
    wait();
  } catch (const std::exception& error) {
    TORCH_WARN("[lockstep/checkpoint] the last save failed, and nobody waited for it: ", error.what());
  }
}

void AsyncSaver::save(const std::string& path, const State& state, const SaveOptions& options) {
  wait();
  job_->job = std::make_unique<SaveJob>(path, state, options, job_->training);
  job_->job->stage(job_->buffer, job_->training);
  job_->is_running = true;
  job_->thread = std::thread([job = job_.get(), &scope = RankScope::current()] {
    const EnterRank enter(scope);
    yield_to_training();
    try {
      job->job->run(job->saving);
    } catch (...) {
      job->problem = std::current_exception();
    }
    job->is_running = false;
  });
}

void AsyncSaver::wait() {
  if (job_->thread.joinable()) job_->thread.join();
  job_->job.reset();
  if (job_->problem) std::rethrow_exception(std::exchange(job_->problem, nullptr));
}

bool AsyncSaver::is_saving() const {
  return job_->is_running;
}

}  // namespace lockstep::dcp
