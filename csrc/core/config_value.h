#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

/// Text to value and back, for config.cc. Everything here takes the whole text or nothing.
namespace herring {

/// A decimal number without sign, space or suffix.
std::optional<std::uint64_t> parse_count(std::string_view text);
/// A decimal number with one of the suffixes B, K, KB, KiB, M, MB, MiB, G, GB, GiB, T, TB, TiB, in either case; all are
/// powers of 1024. Nothing where the product does not fit.
std::optional<std::uint64_t> parse_bytes(std::string_view text);
/// A finite decimal number: "2", "0.5", "1e3".
std::optional<double> parse_seconds(std::string_view text);
/// Index of `text` in `choices`, in either case.
std::optional<std::size_t> parse_choice(std::string_view text, std::span<const std::string_view> choices);

/// The shortest exact form that parse_bytes() takes: "128KB", "25MB", "100".
std::string bytes_text(std::uint64_t bytes);
/// "0.5", "600"
std::string seconds_text(double seconds);
/// "auto, on or off"
std::string choices_text(std::span<const std::string_view> choices);

/// Number of insertions, deletions, replacements and swaps of neighbours that turn one text into the other;
/// upper and lower case count as equal.
std::size_t edit_distance(std::string_view a, std::string_view b);
/// What was most likely meant, or empty where nothing is near.
std::string_view nearest_name(std::string_view name, std::span<const std::string_view> known);

}  // namespace herring
