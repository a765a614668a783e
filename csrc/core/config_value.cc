#include "core/config_value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <vector>

namespace herring {
namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool same(char a, char b) { return lower(a) == lower(b); }

bool equal_in_either_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

constexpr std::string_view kUnits = "kmgt";  // Each 1024 times the one before.

/// Bits to shift by for "", "b", "k", "kb", "kib", ...; nothing for other suffixes.
std::optional<unsigned> suffix_shift(std::string_view suffix) {
  if (suffix.empty() || equal_in_either_case(suffix, "b")) return 0;
  const std::size_t unit = kUnits.find(lower(suffix.front()));
  suffix.remove_prefix(1);
  if (unit == std::string_view::npos) return std::nullopt;
  if (!suffix.empty() && !equal_in_either_case(suffix, "b") && !equal_in_either_case(suffix, "ib")) return std::nullopt;
  return static_cast<unsigned>(10 * (unit + 1));
}

}  // namespace

std::optional<std::uint64_t> parse_count(std::string_view text) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const auto number = parse_count(text.substr(0, digits));
  const auto shift = suffix_shift(text.substr(digits));
  if (!number || !shift || *number > std::numeric_limits<std::uint64_t>::max() >> *shift) return std::nullopt;
  return *number << *shift;
}

std::optional<double> parse_seconds(std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<std::size_t> parse_choice(std::string_view text, std::span<const std::string_view> choices) {
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (equal_in_either_case(text, choices[i])) return i;
  }
  return std::nullopt;
}

std::string bytes_text(std::uint64_t bytes) {
  std::size_t unit = 0;
  while (unit < kUnits.size() && bytes != 0 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  std::string text = std::to_string(bytes);
  if (unit > 0) {
    text += static_cast<char>(kUnits[unit - 1] - 'a' + 'A');
    text += 'B';
  }
  return text;
}

std::string seconds_text(double seconds) {
  std::array<char, 400> buffer;  // The largest double in full.
  const auto [end, error] =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), seconds, std::chars_format::fixed);
  return error == std::errc{} ? std::string(buffer.data(), end) : std::to_string(seconds);
}

std::string choices_text(std::span<const std::string_view> choices) {
  std::string text;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) text += i + 1 == choices.size() ? " or " : ", ";
    text += choices[i];
  }
  return text;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the usual table: a swap of neighbours looks two rows back.
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string_view nearest_name(std::string_view name, std::span<const std::string_view> known) {
  constexpr std::size_t kLongest = 64;  // Nobody's typing error; comparing would cost the square of it.
  if (name.size() > kLongest) return {};
  std::string_view best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 4) + 1;
  for (const std::string_view candidate : known) {
    const bool is_cut = name.size() >= 3 && (candidate.starts_with(name) || name.starts_with(candidate));
    const std::size_t distance = is_cut ? 1 : edit_distance(name, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace herring
