#include "lockstep/shm/collective.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/peer_watch.h"
#include "lockstep/shm/reduce.h"

namespace lockstep::shm {
namespace {

// From this many ranks on, and this many bytes, it is cheaper to reduce a share each and copy the others' than to
// reduce everything on every rank.
constexpr int kLeastRanksForShares = 3;
constexpr std::size_t kLeastBytesForShares = std::size_t{32} << 10;

/// Calls body(at, bytes, offset) for the contiguous pieces of `stream` between two offsets.
template <class Body>
void for_each_piece(Stream stream, std::size_t begin, std::size_t end, Body&& body) {
  std::size_t start = 0;
  for (const auto& span : stream) {
    const auto stop = start + span.bytes;
    const auto from = std::max(begin, start);
    const auto to = std::min(end, stop);
    if (from < to) body(span.at + (from - start), to - from, from);
    start = stop;
    if (start >= end) return;
  }
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to != from) std::memcpy(to, from, bytes);
}

}  // namespace

/// One call on its way. Lives on the stack of run().
class Collectives::Exchange {
 public:
  Exchange(Collectives& all, const Request& request, const Patience& patience)
      : team_(*all.team_),
        request_(request),
        shape_(request.kind),
        ranks_(team_.size()),
        me_(team_.rank()),
        sequence_(all.sequence_),
        first_(all.next_step_),
        mine_(team_.lane(me_)),
        patience_(patience),
        watch_(team_, request, sequence_),
        inputs_(all.inputs_),
        outputs_(all.outputs_),
        factors_(all.factors_),
        reduction_{.dtype = request.dtype, .op = request.op, .divisor = static_cast<std::size_t>(ranks_)},
        gives_(!shape_.only_root_gives || me_ == request.root),
        gets_(!shape_.only_root_gets || me_ == request.root) {
    chunk_ = shape_.gives_per_receiver ? kChunkBytes / static_cast<std::size_t>(ranks_) / 64 * 64 : kChunkBytes;
  }

  /// Returns the step after the last one used.
  std::uint32_t run();

 private:
  std::byte* payload(int rank, std::uint32_t step) const {
    return team_.slot(rank, step) + team_.layout().header_bytes;
  }
  void wait(Signal Lane::*signal, int rank, std::uint32_t target) {
    watch_.waits_for(rank);
    wait_for(team_.lane(rank).*signal, target, patience_, watch_);
  }
  void wait_for_all(Signal Lane::*signal, std::uint32_t target) {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != me_) wait(signal, rank, target);
    }
  }
  bool is_giver(int rank) const { return !shape_.only_root_gives || rank == request_.root; }

  /// Waits until nobody reads the slot's last content.
  void claim_slot(std::uint32_t step) { wait_for_all(&Lane::finished, step - kSlots + 1); }
  void write_chunk(std::uint32_t step, std::size_t chunk);
  void publish(std::uint32_t first, std::size_t chunk) {
    const auto step = first + static_cast<std::uint32_t>(chunk);
    claim_slot(step);
    write_chunk(step, chunk);
    post(mine_.ready, step + 1);
  }
  /// Reads chunk `chunk` of all givers at `step`, from slots.
  void read_chunk(std::uint32_t step, std::size_t chunk);
  void reduce_chunk(std::uint32_t step, std::size_t begin, std::size_t shift);

  void run_staged(std::uint32_t first, std::size_t chunks, bool is_first_written);
  void run_shares(std::uint32_t first, std::size_t chunks, bool is_first_written);
  void copy_own_part();
  void run_exposed();
  void reduce_exposed_share();
  void read_exposed();
  const std::byte* exposed(int rank, std::size_t span) const {
    return team_.resolve(rank, location_in(team_.slot(rank, first_), team_, span));
  }

  Team& team_;
  const Request& request_;
  const Shape shape_;
  const int ranks_;
  const int me_;
  const std::uint64_t sequence_;
  const std::uint32_t first_;
  Lane& mine_;
  const Patience& patience_;
  PeerWatch watch_;
  std::vector<const std::byte*>& inputs_;  // one per rank
  std::vector<std::byte*>& outputs_;
  std::vector<double>& factors_;
  const Reduction reduction_;
  const bool gives_;
  const bool gets_;
  std::size_t chunk_ = kChunkBytes;  // of one stream in one step
};

std::uint32_t Collectives::Exchange::run() {
  watch_.ends_before(first_ + 1);
  claim_slot(first_);
  auto* slot = team_.slot(me_, first_);
  write_header(request_, shape_, team_, sequence_, slot);
  const bool is_exposed = reinterpret_cast<const Header*>(slot)->is_exposed;
  if (!is_exposed) write_chunk(first_, 0);
  // Counters are compared by who is ahead, so one that few calls use must not fall behind by half the range.
  mine_.reduced.value.store(first_, std::memory_order_relaxed);
  post(mine_.ready, first_ + 1);

  wait_for_all(&Lane::ready, first_ + 1);
  std::size_t exposed_ranks = 0;
  std::size_t givers = 0;
  std::size_t largest = 0;
  factors_.clear();
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto& header = *reinterpret_cast<const Header*>(team_.slot(rank, first_));
    if (request_.op == ReduceOp::kPremulSum) factors_.push_back(header.factor);
    if (!is_giver(rank)) continue;
    ++givers;
    exposed_ranks += header.is_exposed ? 1 : 0;
    largest = std::max<std::size_t>(largest, header.largest);
  }
  try {
    check_headers(request_, shape_, team_, first_);
  } catch (...) {
    // Everybody sees it and stops after this step, so the next call finds the ranks in step.
    post(mine_.finished, first_ + 1);
    throw;
  }
  if (givers > 0 && exposed_ranks == givers) {
    run_exposed();
    return first_ + 1;
  }
  const auto chunks = std::max<std::size_t>(1, (largest + chunk_ - 1) / chunk_);
  // If some could not publish in place, nobody does; those who did begin with the next step, and the others with them.
  const bool is_first_written = exposed_ranks == 0;
  const auto first = is_first_written ? first_ : first_ + 1;
  watch_.ends_before(first + static_cast<std::uint32_t>(chunks));
  if (!is_first_written) post(mine_.finished, first_ + 1);
  const bool in_shares =
      request_.kind == Kind::kAllReduce && ranks_ >= kLeastRanksForShares && largest >= kLeastBytesForShares;
  if (in_shares) {
    run_shares(first, chunks, is_first_written);
  } else {
    run_staged(first, chunks, is_first_written);
  }
  return first + static_cast<std::uint32_t>(chunks);
}

void Collectives::Exchange::write_chunk(std::uint32_t step, std::size_t chunk) {
  if (!gives_) return;
  const auto begin = chunk * chunk_;
  const int streams = shape_.gives_per_receiver ? ranks_ : 1;
  for (int to = 0; to < streams; ++to) {
    if (shape_.gives_per_receiver && to == me_) continue;  // I read my own where it is
    auto* at = payload(me_, step) + static_cast<std::size_t>(to) * (shape_.gives_per_receiver ? chunk_ : 0);
    const auto stream = shape_.gives_per_receiver ? given_to(request_, shape_, to, ranks_) : request_.gives;
    for_each_piece(stream, begin, begin + chunk_, [&](const std::byte* from, std::size_t bytes, std::size_t offset) {
      copy_bytes(at + (offset - begin), from, bytes);
    });
  }
}

void Collectives::Exchange::reduce_chunk(std::uint32_t step, std::size_t begin, std::size_t shift) {
  const auto end = begin + chunk_;
  // What I give lies beside what I get: same offsets, maybe the same memory. No need to fetch it from my slot.
  const auto own = given_to(request_, shape_, me_, ranks_);
  std::size_t start = 0;
  for (std::size_t i = 0; i < request_.gets.size() && start < end; ++i) {
    const auto stop = start + request_.gets[i].bytes;
    const auto from = std::max(begin, start);
    const auto to = std::min(end, stop);
    if (from < to) {
      for (int rank = 0; rank < ranks_; ++rank) {
        inputs_[static_cast<std::size_t>(rank)] =
            rank == me_ ? own[i].at + (from - start) : payload(rank, step) + shift + (from - begin);
      }
      std::byte* const output = request_.gets[i].at + (from - start);
      reduce(reduction_, inputs_, factors_, {&output, 1}, (to - from) / request_.element_bytes);
    }
    start = stop;
  }
}

void Collectives::Exchange::read_chunk(std::uint32_t step, std::size_t chunk) {
  if (!gets_) return;
  const auto begin = chunk * chunk_;
  const auto shift = shape_.gives_per_receiver ? static_cast<std::size_t>(me_) * chunk_ : 0;
  if (shape_.reduces) return reduce_chunk(step, begin, shift);
  for (int from = 0; from < ranks_; ++from) {
    if (!is_giver(from) || from == me_) continue;
    const auto* source = payload(from, step) + shift;
    for_each_piece(received_from(request_, shape_, from, ranks_), begin, begin + chunk_,
                   [&](std::byte* to, std::size_t bytes, std::size_t offset) {
                     copy_bytes(to, source + (offset - begin), bytes);
                   });
  }
}

void Collectives::Exchange::run_staged(std::uint32_t first, std::size_t chunks, bool is_first_written) {
  const auto last = first + static_cast<std::uint32_t>(chunks);
  // Who gets nothing reads nothing: nobody shall wait for it before writing.
  if (!gets_) post(mine_.finished, last);
  // Once all have come: until then somebody may read what is written here.
  copy_own_part();
  if (!is_first_written && gives_) publish(first, 0);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const auto step = first + static_cast<std::uint32_t>(chunk);
    if (gives_ && chunk + 1 < chunks) publish(first, chunk + 1);
    if (!gets_) continue;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != me_ && is_giver(rank)) wait(&Lane::ready, rank, step + 1);
    }
    read_chunk(step, chunk);
    post(mine_.finished, step + 1);
  }
  if (!gives_) post(mine_.ready, last);  // keeps step with the others
  if (request_.ends_together) wait_for_all(&Lane::finished, last);
}

/// My own part of a gather or scatter never needs a slot.
void Collectives::Exchange::copy_own_part() {
  if (!gets_ || !gives_ || shape_.reduces || !shape_.has_sizes) return;
  const auto from = given_to(request_, shape_, me_, ranks_);
  const auto to = received_from(request_, shape_, me_, ranks_);
  std::size_t offset = 0;
  for (const auto& span : from) {
    for_each_piece(to, offset, offset + span.bytes, [&](std::byte* at, std::size_t bytes, std::size_t where) {
      copy_bytes(at, span.at + (where - offset), bytes);
    });
    offset += span.bytes;
  }
}

void Collectives::Exchange::run_shares(std::uint32_t first, std::size_t chunks, bool is_first_written) {
  const auto length = length_of(request_.gives);
  if (!is_first_written) publish(first, 0);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const auto step = first + static_cast<std::uint32_t>(chunk);
    if (chunk + 1 < chunks) publish(first, chunk + 1);
    const auto begin = chunk * chunk_;
    const auto bytes = std::min(chunk_, length - begin);
    // Shares are cut at 64 bytes, which every element size divides.
    const auto share = (bytes / static_cast<std::size_t>(ranks_) + 63) / 64 * 64;
    const auto bound = [&](int rank) { return std::min(bytes, static_cast<std::size_t>(rank) * share); };
    wait_for_all(&Lane::ready, step + 1);
    for (int rank = 0; rank < ranks_; ++rank) {
      inputs_[static_cast<std::size_t>(rank)] = payload(rank, step) + bound(me_);
    }
    // In place: nobody else reads my share of my own slot until I say it is reduced.
    const bool is_last = me_ == ranks_ - 1;
    const auto end = is_last ? bytes : bound(me_ + 1);
    std::byte* const output = payload(me_, step) + bound(me_);
    reduce(reduction_, inputs_, factors_, {&output, 1}, (end - bound(me_)) / request_.element_bytes);
    post(mine_.reduced, step + 1);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != me_) wait(&Lane::reduced, rank, step + 1);
      const auto from = bound(rank);
      const auto to = rank == ranks_ - 1 ? bytes : bound(rank + 1);
      for_each_piece(request_.gets, begin + from, begin + to, [&](std::byte* at, std::size_t size, std::size_t offset) {
        copy_bytes(at, payload(rank, step) + (offset - begin), size);
      });
    }
    post(mine_.finished, step + 1);
  }
}

void Collectives::Exchange::run_exposed() {
  if (request_.kind == Kind::kAllReduce) {
    reduce_exposed_share();
  } else if (gets_) {
    read_exposed();
  }
  post(mine_.finished, first_ + 1);
  // Until they have finished, they may read from my tensors, or write to them.
  wait_for_all(&Lane::finished, first_ + 1);
}

void Collectives::Exchange::reduce_exposed_share() {
  const auto ranks = static_cast<std::size_t>(ranks_);
  for (std::size_t i = 0; i < request_.gives.size(); ++i) {
    const auto elements = request_.gives[i].bytes / request_.element_bytes;
    // Pages of my own, so that no cache line is written by two ranks.
    const auto share = (elements / ranks + 1023) / 1024 * 1024;
    const auto begin = std::min(elements, static_cast<std::size_t>(me_) * share);
    const auto end = me_ == ranks_ - 1 ? elements : std::min(elements, begin + share);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      outputs_[rank] = const_cast<std::byte*>(exposed(static_cast<int>(rank), i)) + begin * request_.element_bytes;
      inputs_[rank] = outputs_[rank];
    }
    reduce(reduction_, inputs_, factors_, outputs_, end - begin);
  }
}

void Collectives::Exchange::read_exposed() {
  if (shape_.reduces) {
    // Of what a giver shows, the spans for me.
    const auto skipped = shape_.gives_per_receiver ? static_cast<std::size_t>(me_) * request_.gets.size() : 0;
    for (std::size_t i = 0; i < request_.gets.size(); ++i) {
      for (int rank = 0; rank < ranks_; ++rank) inputs_[static_cast<std::size_t>(rank)] = exposed(rank, skipped + i);
      std::byte* const output = request_.gets[i].at;
      reduce(reduction_, inputs_, factors_, {&output, 1}, request_.gets[i].bytes / request_.element_bytes);
    }
    return;
  }
  // Begin with my neighbour, so that not everybody reads from the same rank at once.
  for (int shift = 0; shift < ranks_; ++shift) {
    const int from = (me_ + shift) % ranks_;
    if (!is_giver(from)) continue;
    const auto into = received_from(request_, shape_, from, ranks_);
    const auto skipped = shape_.gives_per_receiver ? static_cast<std::size_t>(me_) * into.size() : 0;
    for (std::size_t i = 0; i < into.size(); ++i) copy_bytes(into[i].at, exposed(from, skipped + i), into[i].bytes);
  }
}

Collectives::Collectives(std::shared_ptr<Team> team)
    : team_(std::move(team)),
      inputs_(static_cast<std::size_t>(team_->size())),
      outputs_(static_cast<std::size_t>(team_->size())) {}

void Collectives::run(const Request& request, const Patience& patience) {
  if (!team_->is_at_home()) {
    throw PeerError(str(team_->seat().who(), ": ", describe(request, sequence_), " on group '", team_->seat().group,
                        "': this process was forked off the rank's and cannot speak for it. Start ranks by exec."));
  }
  if (const auto reason = team_->failure()) {
    throw PeerError(str(team_->seat().who(), ": ", describe(request, sequence_), ": group '", team_->seat().group,
                        "' cannot be used any more: ", *reason));
  }
  Exchange exchange(*this, request, patience);
  ++sequence_;
  try {
    next_step_ = exchange.run();
  } catch (const MismatchError&) {
    ++next_step_;
    throw;
  } catch (const std::exception& error) {
    // In its own words if it was the first: a report of a report would bury the name.
    if (!team_->failure()) team_->fail(error.what());
    throw;
  }
}

}  // namespace lockstep::shm
