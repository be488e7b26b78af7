// What lockstep-run says and returns at the end of a job. Pure.
#pragma once

#include <string>

#include "lockstep/launch/job.h"

namespace lockstep::cli {

inline constexpr int kTimeoutCode = 124;

/// 0, the first failed rank's code (128 + signal), 124 for a timeout, 128 + signal for an interrupt.
int exit_code(const JobResult& result);

/// Which rank failed first and how, its last lines, and what became of the others; empty if all went well.
std::string summary(const JobResult& result);

}  // namespace lockstep::cli
