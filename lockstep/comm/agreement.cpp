#include "lockstep/comm/agreement.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/objects.h"

namespace lockstep {
namespace {

// One fact per entry: lengths first, so that values may hold anything.
std::string encode(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) text += str(name.size(), " ", value.size(), " ", name, value);
  return text;
}

Facts decode(const std::string& text) {
  Facts facts;
  std::size_t at = 0;
  const auto number = [&] {
    const auto end = text.find(' ', at);
    const auto value = std::stoul(text.substr(at, end - at));
    at = end + 1;
    return value;
  };
  while (at < text.size()) {
    const auto name_size = number();
    const auto value_size = number();
    facts.emplace_back(text.substr(at, name_size), text.substr(at + name_size, value_size));
    at += name_size + value_size;
  }
  return facts;
}

/// 16 bytes that are the same on all machines for the same text, and others for another one.
std::string hash_of(const std::string& text) {
  std::array<std::uint64_t, 2> hashes = {0xcbf29ce484222325, 0x9e3779b97f4a7c15};  // FNV-1a, begun in two places
  for (const char character : text) {
    for (auto& hash : hashes) hash = (hash ^ static_cast<unsigned char>(character)) * 0x100000001b3;
  }
  std::string bytes;
  for (const auto hash : hashes) {
    for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(hash >> shift));
  }
  return bytes;
}

bool are_equal(const std::vector<std::string>& texts) {
  return std::all_of(texts.begin(), texts.end(), [&](const auto& text) { return text == texts[0]; });
}

std::string shorten(const std::string& value) {
  constexpr std::size_t kLongest = 200;
  if (value.size() <= kLongest) return "'" + value + "'";
  return str("'", value.substr(0, kLongest), "…' (", value.size(), " characters)");
}

/// "ranks 0, 2: 'a'; rank 1: 'b'".
std::string by_rank(const std::vector<std::string>& values, const std::vector<int>& names) {
  std::vector<std::pair<std::string, std::vector<int>>> holders;
  for (std::size_t i = 0; i < values.size(); ++i) {
    auto found =
        std::find_if(holders.begin(), holders.end(), [&](const auto& item) { return item.first == values[i]; });
    if (found == holders.end()) found = holders.insert(holders.end(), {values[i], {}});
    found->second.push_back(names[i]);
  }
  std::vector<std::string> parts;
  for (const auto& [value, ranks] : holders) {
    parts.push_back(str(ranks.size() == 1 ? "rank " : "ranks ", join(ranks, ", "), ": ", value));
  }
  return join(parts, "; ");
}

}  // namespace

void check_same_on_all_ranks(const std::string& what, const Facts& facts, const GroupPtr& group) {
  const auto mine = encode(facts);
  // Facts about every parameter of a large model are long; mostly they are the same.
  if (are_equal(all_gather_object(hash_of(mine), group))) return;
  const auto texts = all_gather_object(mine, group);

  std::vector<Facts> all;
  for (const auto& text : texts) all.push_back(decode(text));
  const auto names = global_ranks(group);
  std::size_t shortest = all[0].size();
  for (const auto& each : all) shortest = std::min(shortest, each.size());
  for (std::size_t i = 0; i < shortest; ++i) {
    std::vector<std::string> values;
    bool has_one_name = true;
    for (const auto& each : all) {
      has_one_name = has_one_name && each[i].first == all[0][i].first;
      values.push_back(shorten(each[i].second));
    }
    if (!has_one_name) {
      for (std::size_t rank = 0; rank < all.size(); ++rank) values[rank] = all[rank][i].first + " = " + values[rank];
    }
    const bool differs =
        std::any_of(values.begin(), values.end(), [&](const auto& value) { return value != values[0]; });
    // shorten() may hide a difference far inside a long value; it is a difference all the same.
    const bool differs_inside =
        std::any_of(all.begin(), all.end(), [&](const auto& each) { return each[i] != all[0][i]; });
    TORCH_CHECK(!differs && !differs_inside, "[lockstep/comm] the ranks of group '", group_name(group),
                "' disagree on ", what, has_one_name && all[0][i].first != what ? ": " + all[0][i].first : "", ". ",
                by_rank(values, names), ". Give every rank the same.");
  }
  std::vector<std::string> counts;
  for (const auto& each : all) counts.push_back(str(each.size(), " entries"));
  TORCH_CHECK(false, "[lockstep/comm] the ranks of group '", group_name(group), "' disagree on ", what, ". ",
              by_rank(counts, names), ". Give every rank the same.");
}

void check_same_on_all_ranks(const std::string& what, const std::string& value, const GroupPtr& group) {
  check_same_on_all_ranks(what, Facts{{what, value}}, group);
}

bool compares_calls(const GroupPtr& group) {
  const auto& backends = detail::state_of(group).backends;
  return std::all_of(backends.begin(), backends.end(),
                     [](const auto& each) { return each.second.traits.compares_calls; });
}

std::string meet(const std::string& what, const GroupPtr& group) {
  constexpr auto kPoll = std::chrono::milliseconds(10);
  auto& state = detail::state_of(group);
  const auto& [store, rank, size] = std::tie(state.description.store, state.description.rank, state.description.size);
  if (size == 1 || !store || compares_calls(group)) return "";
  detail::check_usable(state);
  const auto launched = state.next_sequence.load();
  const auto key_of = [&](int each) { return str("meeting/", launched, "/", each); };
  store->set(key_of(rank), std::vector<uint8_t>{1});
  auto absent = detail::first_ranks(size);
  const auto deadline = deadline_after(state.description.timeout);
  while (true) {
    std::erase_if(absent, [&](int each) { return store->check({key_of(each)}); });
    if (absent.empty()) return "";
    for (const int each : absent) {
      const auto wait = detail::shown_wait_of(state, each);
      // It has launched something in this place, and will not come.
      if (wait && wait->launched > launched) {
        return str("rank ", state.description.global_ranks[each], " waits for ", wait->operation);
      }
    }
    if (detail::has_failure(state)) detail::report_failure(state, what, "");
    if (std::chrono::steady_clock::now() > deadline) detail::report_failure(state, what, "the time is over");
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace lockstep
