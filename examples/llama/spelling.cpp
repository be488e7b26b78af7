#include "examples/llama/spelling.h"

#include <ATen/ATen.h>

#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "examples/llama/read_json.h"

namespace lockstep::examples {
namespace {

constexpr int kBytes = 256;

/// The characters that stand for bytes in vocabularies over bytes, as GPT-2 had them: printable ones for themselves,
/// the others for those from 256 on.
std::string as_character(int byte) {
  const auto is_printable = [](int b) { return (b > ' ' && b <= '~') || (b >= 0xa1 && b != 0xad); };
  int character = byte;
  if (!is_printable(byte)) {
    character = kBytes;
    for (int other = 0; other < byte; ++other) character += is_printable(other) ? 0 : 1;
  }
  if (character < 0x80) return {static_cast<char>(character)};
  return {static_cast<char>(0xc0 | character >> 6), static_cast<char>(0x80 | (character & 0x3f))};
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (auto at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

/// Of a vocabulary over bytes: each character stands for one.
std::string bytes_behind(const std::string& characters) {
  static const auto byte_of = [] {
    std::map<std::string, char> bytes;
    for (int byte = 0; byte < kBytes; ++byte) bytes[as_character(byte)] = static_cast<char>(byte);
    return bytes;
  }();
  std::string bytes;
  for (std::size_t at = 0; at < characters.size();) {
    const std::size_t length = (characters[at] & 0x80) == 0 ? 1 : 2;
    const auto found = byte_of.find(characters.substr(at, length));
    if (found == byte_of.end()) return characters;  // a name, such as that of the end of the text
    bytes += found->second;
    at += length;
  }
  return bytes;
}

/// Of a vocabulary over characters: "<0x0A>" is a byte, and spaces are shown.
std::string text_behind(const std::string& token) {
  int byte = 0;
  if (token.size() == 6 && token.starts_with("<0x") &&
      std::from_chars(&token[3], &token[5], byte, 16).ptr == &token[5]) {
    return {static_cast<char>(byte)};
  }
  return replaced(token, "\u2581", " ");
}

}  // namespace

Spelling spelling_of_bytes() {
  Spelling spelling;
  for (int byte = 0; byte < kBytes; ++byte) spelling.emplace_back(1, static_cast<char>(byte));
  return spelling;
}

Spelling read_spelling(const std::string& file) {
  const auto json = read_json(file);
  const bool is_over_bytes = json.value("decoder", Json()).dump().find("\"ByteLevel\"") != std::string::npos;
  Spelling spelling;
  const auto put = [&](std::size_t number, const std::string& token) {
    if (number >= spelling.size()) spelling.resize(number + 1);
    spelling[number] = is_over_bytes ? bytes_behind(token) : text_behind(token);
  };
  for (const auto& [token, number] : json.at("model").at("vocab").items()) put(number, token);
  for (const auto& added : json.value("added_tokens", Json::array())) put(added.at("id"), added.at("content"));
  return spelling;
}

std::string spell(const at::Tensor& tokens, const Spelling& spelling) {
  std::string text;
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    const auto token = tokens[i].item<int64_t>();
    const bool is_known = token < static_cast<int64_t>(spelling.size());
    text += is_known ? spelling[static_cast<std::size_t>(token)] : std::to_string(token) + ' ';
  }
  return text;
}

}  // namespace lockstep::examples
