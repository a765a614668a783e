#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/status.h"
#include "require.h"

/// Any environment: settings are accepted or refused by a clear error, and what is accepted fits together.
namespace herring {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

/// Lines of NAME=VALUE. A first byte below 0x20 stands for the name of a setting, so that the fuzzer need not spell it.
Pairs pairs_of(std::string_view text) {
  static const std::vector<ConfigRow> kTable = config_table();
  Pairs pairs;
  while (!text.empty() && pairs.size() < 32) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty()) continue;
    const auto first = static_cast<unsigned char>(line.front());
    if (first < 0x20) {
      pairs.emplace_back(kTable[first % kTable.size()].name, line.substr(1));
    } else {
      const std::size_t equals = std::min(line.find('='), line.size() - 1);
      pairs.emplace_back(line.substr(0, equals), line.substr(equals + 1));
    }
  }
  return pairs;
}

void check_accepted(const ConfigResult& result) {
  const Config& c = result.config;
  HERRING_REQUIRE(c.chunk_bytes > 0 && c.chunk_bytes % 64 == 0 && c.part_bytes % 64 == 0);
  HERRING_REQUIRE(c.chunk_bytes <= c.part_bytes && c.eager_bytes <= c.chunk_bytes);
  HERRING_REQUIRE(c.heartbeat_s > 0 && c.dead_after_s > c.heartbeat_s);
  HERRING_REQUIRE(c.timeout_s > 0 && c.timeout_s * 1000 < 4294967295.0 && c.join_timeout_s > 0);
  HERRING_REQUIRE(c.window > 0 && c.lanes > 0 && c.local_part_bytes > 0);
  HERRING_REQUIRE(c.arena_bytes == 0 || c.local_part_bytes * 2 <= c.arena_bytes);

  // What is shown can be said again, and means the same.
  Pairs shown;
  for (const ConfigOrigin& origin : result.origins) {
    if (origin.name != "HERRING_SECRET") shown.emplace_back(origin.name, origin.value);
  }
  const ConfigResult again = read_config(shown);
  for (std::size_t i = 0; i < result.origins.size(); ++i) {
    if (result.origins[i].name == "HERRING_SECRET") continue;
    HERRING_REQUIRE(result.origins[i].value == again.origins[i].value);
  }
}

void run(std::string_view text) {
  // Before an empty line: the environment. After it: arguments.
  const std::size_t border = text.find("\n\n");
  const Pairs environment = pairs_of(text.substr(0, border));
  const Pairs overrides = border == std::string_view::npos ? Pairs{} : pairs_of(text.substr(border + 2));
  ConfigResult result;
  try {
    result = read_config(environment, overrides);
  } catch (const Error& error) {
    HERRING_REQUIRE(error.status().code() == Code::kInvalidArgument);
    HERRING_REQUIRE(!error.status().message().empty());
    HERRING_REQUIRE(error.status().message().size() < 1000 * (1 + environment.size() + overrides.size()));
    return;
  }
  check_accepted(result);
}

}  // namespace
}  // namespace herring

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  herring::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
