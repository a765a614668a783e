#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace herring {

/// What is safe to show to a person: valid UTF-8, in which nothing steers a terminal. Control characters other than
/// line end and tab, marks that reorder text, and bytes that are no UTF-8 become '?'. Every Status, every line of a log
/// and every text that a peer sent goes through it.
std::string printable(std::string_view text);

/// "1 server", "2 servers"; `many` where it is not `one` with an s: "2 processes".
std::string counted(std::uint64_t count, std::string_view one, std::string_view many = {});

/// "eth0, eth1" -> its parts between commas, without spaces around them. Empty text has none.
std::vector<std::string> split_list(std::string_view text);

}  // namespace herring
