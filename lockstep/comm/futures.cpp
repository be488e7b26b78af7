#include "lockstep/comm/futures.h"

namespace lockstep::detail {

FuturePtr all_of(const std::vector<FuturePtr>& futures) {
  // Not c10::collectAll(): its future knows no devices, so nobody who waits for it would wait for their streams.
  auto all = futures.at(0);
  for (std::size_t i = 1; i < futures.size(); ++i) {
    all = all->thenAsync(
        [next = futures[i]](c10::ivalue::Future& before) {
          before.value();  // throws what it holds
          return next;
        },
        futures[i]->elementType());
  }
  return all;
}

void wait_on_stream(const std::vector<FuturePtr>& futures) {
  for (const auto& future : futures) future->wait();
}

}  // namespace lockstep::detail
