#include "lockstep/optim/one_thread.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace lockstep::optim::detail {
namespace {

/// Of the calling thread, where at::set_num_threads() is of the process. The library is libtorch's to choose.
void set_threads(int count) {
  using SetThreads = void (*)(int);
  static const auto set = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set != nullptr) set(count);
}

}  // namespace

OneThread::OneThread(bool is_wanted) : threads_before_(is_wanted ? at::get_num_threads() : 1) {
  if (threads_before_ > 1) set_threads(1);
}

OneThread::~OneThread() {
  if (threads_before_ > 1) set_threads(threads_before_);
}

}  // namespace lockstep::optim::detail
