#include "examples/common/tales.h"

#include <map>
#include <random>
#include <stdexcept>
#include <vector>

namespace lockstep::examples {
namespace {

using Rules = std::map<std::string, std::vector<std::string>>;

// "{word}" stands for one of the word's alternatives. A tale chooses its cast once and keeps it: what a model must look
// back for.
const Rules& rules() {
  static const Rules rules = {
      {"tale",
       {"{opening} {wish} {journey} {meeting} {event} {ending}\n\n", "{opening} {journey} {event} {event} {ending}\n\n",
        "{opening} {wish} {meeting} {journey} {meeting} {ending}\n\n", "{opening} {meeting} {journey} {ending}\n\n"}},
      {"opening",
       {"Once there was a {looks} {hero} named {name}.", "In a {size} {home} there lived a {hero} named {name}.",
        "Long ago a {looks} {hero} came to live in the {home}. Her friends called her {name}.",
        "{name} was a {looks} {hero} who lived near the {place}.",
        "Of all the animals in the {home}, {name} the {hero} was the most {virtue}."}},
      {"wish",
       {"Every {time} she dreamed of {treasure}.", "She wanted to find {treasure} before the {season} came.",
        "\"I wish I had {treasure},\" said {name}.", "More than anything {name} loved {treasure}.",
        "All through the {season} {name} thought about {treasure}."}},
      {"journey",
       {"One {time} {name} walked to the {place} and looked for {treasure}.",
        "So the {hero} left the {home} and went to the {place}.", "{name} ran past the {place} until she was {mood}.",
        "The way to the {place} was long, but the {hero} was not {mood}.",
        "When the {season} was over, {name} went down to the {place}."}},
      {"meeting",
       {"There she met a {looks} {other}. \"{question}\" asked the {other}. \"{answer},\" said {name}.",
        "A {looks} {other} sat by the {place}. \"{question}\" asked {name}. \"{answer},\" said the {other}.",
        "\"{question}\" said a {looks} {other} to the {hero}. {name} was {mood} and said, \"{answer}.\"",
        "Behind the {place} she heard the {other} sing. \"{question}\" asked {name}, but the {other} only laughed."}},
      {"question",
       {"Where are you going?", "Have you seen {treasure}?", "Why are you so {mood}?",
        "Will you come with me to the {place}?", "Who lives in the {home}?", "What is behind the {place}?"}},
      {"answer",
       {"I am looking for {treasure}", "Come with me, and we will see",
        "Nobody knows, not even the fish in the {place}", "I am {mood}, because the {season} is here",
        "Ask me again in the {time}", "We will find it near the {place}"}},
      {"event",
       {"Then the wind took {treasure} and carried it over the {place}.",
        "But a {looks} {other} had hidden {treasure} under a stone.",
        "Together they built a {size} house beside the {place}.",
        "It rained all day, and the {home} was full of water.",
        "The {hero} and the {other} shared {treasure} and were {mood}.",
        "That {time} they found {treasure} in the grass."}},
      {"ending",
       {"And {name} went home {mood} and slept until the {time}.",
        "From that day on the {hero} and the {other} were friends.", "\"Now I know,\" said {name}, \"that {lesson}.\"",
        "So {name} learned that {lesson}.",
        "And if they are not gone, they still sit by the {place} and talk about {treasure}."}},
      {"lesson",
       {"a friend is worth more than {treasure}", "the longest way is often the best", "nobody is too small to help",
        "who shares {treasure} will never be alone", "a kind word opens every door"}},
      {"looks", {"little", "red", "clever", "grey", "white", "hungry", "quiet", "brave", "lazy", "young"}},
      {"virtue", {"curious", "gentle", "patient", "careful", "cheerful"}},
      {"size", {"small", "great", "dark", "green", "narrow", "warm"}},
      {"mood", {"happy", "tired", "sad", "proud", "afraid", "glad", "lonely"}},
      {"time", {"morning", "evening", "night", "winter night", "summer morning"}},
      {"season", {"spring", "summer", "autumn", "winter"}},
      {"place", {"river", "hill", "old bridge", "mill", "lake", "oak tree", "garden wall", "well", "village", "sea"}},
      {"treasure",
       {"a golden key", "the moon", "bread and honey", "a silver bell", "an apple pie", "a warm coat", "the blue stone",
        "a paper boat", "fresh milk"}},
      {"hero", {"fox", "mouse", "hen", "rabbit", "goose", "cat", "hedgehog", "frog"}},
      {"other", {"wolf", "bear", "owl", "donkey", "crow", "goat", "turtle"}},
      {"name", {"Anna", "Bella", "Clara", "Emma", "Flora", "Greta", "Julia", "Lily", "Nora", "Rosa"}},
      {"home", {"forest", "meadow", "valley", "garden", "barn", "mountain"}},
  };
  return rules;
}

class Teller {
 public:
  explicit Teller(std::uint64_t seed) : random_(seed) {}

  std::string tell() {
    cast_.clear();
    for (const char* role : {"hero", "other", "name", "home", "treasure"}) cast_[role] = choose(role);
    return expand(choose("tale"));
  }

 private:
  // Not a standard distribution: those differ between libraries.
  const std::string& choose(const std::string& word) {
    const auto& alternatives = rules().at(word);
    return alternatives[random_() % alternatives.size()];
  }

  std::string expand(const std::string& text) {
    std::string result;
    std::size_t at = 0;
    while (at < text.size()) {
      const auto open = text.find('{', at);
      result.append(text, at, open - at);
      if (open == std::string::npos) break;
      const auto close = text.find('}', open);
      const auto word = text.substr(open + 1, close - open - 1);
      const auto role = cast_.find(word);
      result += role != cast_.end() ? role->second : expand(choose(word));
      at = close + 1;
    }
    return result;
  }

  std::mt19937_64 random_;
  std::map<std::string, std::string> cast_;
};

}  // namespace

std::string tell_tales(std::size_t length, std::uint64_t seed) {
  Teller teller(seed);
  std::string text;
  while (text.size() < length) text += teller.tell();
  return text;
}

}  // namespace lockstep::examples
