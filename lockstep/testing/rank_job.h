// The parent's side of ranks as processes: the job to start and the verdict over its result. Internal to the kit.
#pragma once

#include <string>

#include "lockstep/launch/job.h"
#include "lockstep/testing/process_ranks.h"

namespace lockstep::testing::detail {

/// A job that starts this program once per rank and leads it to `call`.
JobOptions rank_job(const RunOptions& options, const ProcessCall& call, const std::string& store_path);

RunReport report_of(const JobResult& job, const RunOptions& options);

}  // namespace lockstep::testing::detail
