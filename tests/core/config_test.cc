#include "core/config.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <set>

#include "core/status.h"

namespace herring {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

Config read(const Pairs& environment, const Pairs& overrides = {}) {
  return read_config(environment, overrides).config;
}

/// The message of the error that reading these gives; fails the test where there is none.
std::string error_of(const Pairs& environment, const Pairs& overrides = {}) {
  try {
    read_config(environment, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kInvalidArgument);
    return error.status().message();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

ConfigOrigin origin_of(const ConfigResult& result, std::string_view name) {
  const auto found = std::find_if(result.origins.begin(), result.origins.end(),
                                  [&](const ConfigOrigin& origin) { return origin.name == name; });
  if (found != result.origins.end()) return *found;
  ADD_FAILURE() << "no origin for " << name;
  return {};
}

bool has(const std::string& text, std::string_view piece) { return text.find(piece) != std::string::npos; }

TEST(Config, DefaultsAreThoseOfTheStruct) {
  const Config config = read({{"PATH", "/bin"}, {"HERRINGBONE", "x"}, {"herring_lanes", "7"}});
  EXPECT_EQ(config.servers, 0u);
  EXPECT_EQ(config.chunk_bytes, 128u << 10);
  EXPECT_EQ(config.part_bytes, 25u << 20);
  EXPECT_EQ(config.dead_after_s, 5);
  EXPECT_EQ(config.lanes, 1u);
}

TEST(Config, ReadsEveryTypeOfSetting) {
  const Config config = read({{"HERRING_SERVERS", "3"},
                              {"HERRING_LANES", "2"},
                              {"HERRING_PART_BYTES", "1GB"},
                              {"HERRING_CHUNK_BYTES", "64KiB"},
                              {"HERRING_WINDOW", "16"},
                              {"HERRING_EAGER_BYTES", "4k"},
                              {"HERRING_LOCAL_PART_BYTES", "524288"},
                              {"HERRING_ARENA_BYTES", "2TB"},
                              {"HERRING_INTRA_NODE", "OFF"},
                              {"HERRING_TIMEOUT_S", "0.5"},
                              {"HERRING_JOIN_TIMEOUT_S", "1e2"},
                              {"HERRING_HEARTBEAT_S", "0.25"},
                              {"HERRING_DEAD_AFTER_S", "2"},
                              {"HERRING_SPIN_US", "0"},
                              {"HERRING_LIBFABRIC", "/opt/x/libfabric.so"},
                              {"HERRING_PROVIDER", "Tcp"},
                              {"HERRING_INTERFACE", "eth1"},
                              {"HERRING_SIMD", "avx2"},
                              {"HERRING_SECRET", "hunter2"},
                              {"HERRING_HUB", "[fe80::1]:29500"},
                              {"HERRING_LOG", "debug"}});
  EXPECT_EQ(config.servers, 3u);
  EXPECT_EQ(config.lanes, 2u);
  EXPECT_EQ(config.part_bytes, 1u << 30);
  EXPECT_EQ(config.chunk_bytes, 65536u);
  EXPECT_EQ(config.window, 16u);
  EXPECT_EQ(config.eager_bytes, 4096u);
  EXPECT_EQ(config.local_part_bytes, 524288u);
  EXPECT_EQ(config.arena_bytes, std::uint64_t{2} << 40);
  EXPECT_EQ(config.intra_node, Switch::kOff);
  EXPECT_EQ(config.timeout_s, 0.5);
  EXPECT_EQ(config.join_timeout_s, 100);
  EXPECT_EQ(config.heartbeat_s, 0.25);
  EXPECT_EQ(config.dead_after_s, 2);
  EXPECT_EQ(config.spin_us, 0u);
  EXPECT_EQ(config.libfabric, "/opt/x/libfabric.so");
  EXPECT_EQ(config.provider, "tcp");
  EXPECT_EQ(config.interface, "eth1");
  EXPECT_EQ(config.simd, "avx2");
  EXPECT_EQ(config.secret, "hunter2");
  EXPECT_EQ(config.hub, "[fe80::1]:29500");
  EXPECT_EQ(config.log_level, LogLevel::kDebug);
}

TEST(Config, BadValueNamesVariableValueSourceAndWhatIsAccepted) {
  EXPECT_EQ(
      error_of({{"HERRING_CHUNK_BYTES", "100"}}),
      "HERRING_CHUNK_BYTES is '100' (environment); it takes 64 to 64MB, a multiple of 64 (bytes, or with KB, MB or "
      "GB)");
  EXPECT_EQ(error_of({{"HERRING_LANES", "0"}}), "HERRING_LANES is '0' (environment); it takes a whole number, 1 to 64");
  EXPECT_EQ(error_of({}, {{"HERRING_TIMEOUT_S", "soon"}}),
            "HERRING_TIMEOUT_S is 'soon' (argument); it takes 0.001 to 4000000 seconds");
  EXPECT_EQ(error_of({{"HERRING_LOG", "loud"}}),
            "HERRING_LOG is 'loud' (environment); it takes error, warning, info or debug");
  EXPECT_EQ(error_of({{"HERRING_HUB", "localhost"}}),
            "HERRING_HUB is 'localhost' (environment); it takes host:port with a port of 1 to 65535, an IPv6 host in "
            "brackets");
  EXPECT_EQ(
      error_of({{"HERRING_ARENA_BYTES", "1"}}),
      "HERRING_ARENA_BYTES is '1' (environment); it takes 0 (half of the memory that this process may use) or 1MB to "
      "256TB (bytes, or with KB, MB or GB)");
  EXPECT_EQ(error_of({{"HERRING_SPIN_US", "20us"}}),
            "HERRING_SPIN_US is '20us' (environment); it takes 0 to 1000000 microseconds");
}

TEST(Config, ValuesThatLookAlmostRightAreRefused) {
  const Pairs bad = {
      {"HERRING_SERVERS", ""},
      {"HERRING_SERVERS", "-1"},
      {"HERRING_SERVERS", "+1"},
      {"HERRING_SERVERS", " 1"},
      {"HERRING_SERVERS", "1 "},
      {"HERRING_SERVERS", "1.0"},
      {"HERRING_SERVERS", "0x10"},
      {"HERRING_SERVERS", "2KB"},
      {"HERRING_SERVERS", "4097"},
      {"HERRING_SERVERS", "4294967296"},  // 0 in 32 bits
      {"HERRING_SERVERS", "99999999999999999999999"},
      {"HERRING_CHUNK_BYTES", "KB"},
      {"HERRING_CHUNK_BYTES", "64 KB"},
      {"HERRING_CHUNK_BYTES", "64KBs"},
      {"HERRING_CHUNK_BYTES", "64XB"},
      {"HERRING_CHUNK_BYTES", "1.5KB"},
      {"HERRING_CHUNK_BYTES", "0"},
      {"HERRING_CHUNK_BYTES", "65MB"},
      {"HERRING_CHUNK_BYTES", "18446744073709551615GB"},
      {"HERRING_ARENA_BYTES", "16777216TB"},  // 2^64
      {"HERRING_TIMEOUT_S", ""},
      {"HERRING_TIMEOUT_S", "0"},
      {"HERRING_TIMEOUT_S", "-1"},
      {"HERRING_TIMEOUT_S", "inf"},
      {"HERRING_TIMEOUT_S", "nan"},
      {"HERRING_TIMEOUT_S", "5s"},
      {"HERRING_TIMEOUT_S", "1e999"},
      {"HERRING_TIMEOUT_S", "1,5"},
      {"HERRING_INTRA_NODE", ""},
      {"HERRING_INTRA_NODE", "1"},
      {"HERRING_PROVIDER", "tcp,efa"},
      {"HERRING_SIMD", "sse"},
      {"HERRING_HUB", ":29500"},
      {"HERRING_HUB", "node:0"},
      {"HERRING_HUB", "node:65536"},
      {"HERRING_HUB", "node:"},
      {"HERRING_HUB", "fe80::1:29500"},
      {"HERRING_HUB", "a b:1"},
      {"HERRING_HUB", "[]:1"},
      {"HERRING_HUB", "tcp://node:1"},
  };
  for (const auto& [name, value] : bad) {
    const std::string text = error_of({{name, value}});
    EXPECT_TRUE(has(text, name + " is '" + value + "' (environment); it takes "))
        << name << "=" << value << ": " << text;
  }
}

TEST(Config, EverythingThatIsWrongIsSaidAtOnce) {
  const std::string text = error_of({{"HERRING_LANES", "x"}, {"HERRING_WINDOW", "0"}}, {{"HERRING_LOG", "y"}});
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  EXPECT_TRUE(has(text, "HERRING_LANES is 'x'") && has(text, "HERRING_WINDOW is '0'") &&
              has(text, "HERRING_LOG is 'y'"));
}

TEST(Config, UnknownNameSuggestsTheNearest) {
  const auto suggests = [](const std::string& name, std::string_view nearest) {
    const std::string text = error_of({{name, "1"}});
    EXPECT_TRUE(has(text, "'" + name + "' (environment) is not a setting of Herring")) << text;
    EXPECT_TRUE(has(text, "did you mean " + std::string(nearest) + "?")) << text;
  };
  suggests("HERRING_CHUNK_BYTE", "HERRING_CHUNK_BYTES");
  suggests("HERRING_CHUNKBYTES", "HERRING_CHUNK_BYTES");
  suggests("HERRING_CHUNK", "HERRING_CHUNK_BYTES");
  suggests("HERRING_SEVRERS", "HERRING_SERVERS");
  suggests("HERRING_LOG_LEVEL", "HERRING_LOG");
  suggests("HERRING_TIMEOUT", "HERRING_TIMEOUT_S");
  suggests("HERRING_INTRANODE", "HERRING_INTRA_NODE");
  suggests("HERRING_lanes", "HERRING_LANES");
}

TEST(Config, UnknownNameNearNothingListsAll) {
  for (const std::string name : {"HERRING_", "HERRING_X", "HERRING_FROBNICATION", "HERRING_LANES\xff\xfe\xfd\xfc"}) {
    const std::string text = error_of({{name, "1"}});
    EXPECT_TRUE(has(text, "not a setting")) << text;
  }
  const std::string text = error_of({{"HERRING_FROBNICATION", "1"}});
  EXPECT_TRUE(has(text, "with HERRING_ in front: SERVERS, ")) << text;
  for (const ConfigRow& row : config_table()) {
    EXPECT_TRUE(has(text + ",", " " + std::string(row.name.substr(std::string_view("HERRING_").size())) + ","))
        << row.name;
  }
  // An argument with any other name is a mistake too; there is nothing else it could be for.
  EXPECT_TRUE(has(error_of({}, {{"LANES", "2"}}), "did you mean HERRING_LANES?"));
}

TEST(Config, VariablesOfTheTestsAreNotSettings) {
  EXPECT_EQ(read({{"HERRING_TEST_SEED", "1"}, {"HERRING_TEST_LIBFABRIC", "/x"}}).lanes, 1u);
}

TEST(Config, ArgumentsWinOverTheEnvironmentAndOriginsSaySo) {
  const ConfigResult result = read_config(
      Pairs{{"HERRING_LANES", "2"}, {"HERRING_WINDOW", "3"}, {"HERRING_WINDOW", "5"}}, Pairs{{"HERRING_LANES", "4"}});
  EXPECT_EQ(result.config.lanes, 4u);
  EXPECT_EQ(result.config.window, 3u) << "getenv() takes the first of two, so must this";
  EXPECT_EQ(to_string(origin_of(result, "HERRING_LANES")), "HERRING_LANES=4 (argument)");
  EXPECT_EQ(to_string(origin_of(result, "HERRING_WINDOW")), "HERRING_WINDOW=3 (environment)");
  EXPECT_EQ(to_string(origin_of(result, "HERRING_CHUNK_BYTES")), "HERRING_CHUNK_BYTES=128KB (default)");
  EXPECT_EQ(to_string(origin_of(result, "HERRING_INTRA_NODE")), "HERRING_INTRA_NODE=auto (default)");
}

TEST(Config, SecretIsNeverShown) {
  const std::string secret = "correct horse battery";
  const ConfigResult result = read_config(Pairs{{"HERRING_SECRET", secret}});
  EXPECT_EQ(result.config.secret, secret);
  EXPECT_EQ(origin_of(result, "HERRING_SECRET").value, "(set)");
  for (const ConfigOrigin& origin : result.origins) EXPECT_FALSE(has(to_string(origin), secret));
  EXPECT_EQ(origin_of(read_config({}), "HERRING_SECRET").value, "");
  // Neither under a mistyped name, nor beside another error.
  EXPECT_FALSE(has(error_of({{"HERRING_SECERT", secret}}), secret));
  EXPECT_FALSE(has(error_of({{"HERRING_SECRET", secret}, {"HERRING_LANES", "x"}}), secret));
}

TEST(Config, LongValuesAreCutInErrors) {
  EXPECT_LT(error_of({{"HERRING_LANES", std::string(100'000, '9')}}).size(), 300u);
  EXPECT_LT(error_of({{"HERRING_" + std::string(100'000, 'X'), "1"}}).size(), 1000u);
}

TEST(Config, ContradictingValuesAreNamedTogether) {
  EXPECT_EQ(error_of({{"HERRING_CHUNK_BYTES", "1MB"}, {"HERRING_PART_BYTES", "512KB"}}),
            "HERRING_CHUNK_BYTES=1MB (environment); it must be at most HERRING_PART_BYTES=512KB (environment)");
  EXPECT_EQ(error_of({{"HERRING_CHUNK_BYTES", "32MB"}}),
            "HERRING_CHUNK_BYTES=32MB (environment); it must be at most HERRING_PART_BYTES=25MB (default)");
  EXPECT_EQ(error_of({{"HERRING_EAGER_BYTES", "256KB"}}),
            "HERRING_EAGER_BYTES=256KB (environment); it must be at most HERRING_CHUNK_BYTES=128KB (default)");
  EXPECT_EQ(error_of({{"HERRING_HEARTBEAT_S", "2"}, {"HERRING_DEAD_AFTER_S", "2"}}),
            "HERRING_DEAD_AFTER_S=2 (environment); it must be more than HERRING_HEARTBEAT_S=2 (environment)");
  EXPECT_EQ(
      error_of({{"HERRING_ARENA_BYTES", "1MB"}}, {{"HERRING_LOCAL_PART_BYTES", "1MB"}}),
      "HERRING_LOCAL_PART_BYTES=1MB (argument); it must be at most half of HERRING_ARENA_BYTES=1MB (environment)");
}

TEST(Config, WhereServersAreEmbeddedTheEagerSizeIsLargerUnlessItIsSet) {
  EXPECT_EQ(read({}).eager_bytes, 64u << 10);
  EXPECT_EQ(read({}).embedded_eager_bytes, 128u << 10);
  for (const std::string size : {"0", "64KB", "128KB"}) {
    const Config set = read({{"HERRING_EAGER_BYTES", size}});
    EXPECT_EQ(set.embedded_eager_bytes, set.eager_bytes) << size;
  }
}

TEST(Config, SumsOnGpusAreNotChecked) {
  EXPECT_EQ(read({{"HERRING_ON_HOST", "auto"}, {"HERRING_CHECK_FINITE", "on"}}).on_host, "auto");
  EXPECT_EQ(
      error_of({{"HERRING_ON_HOST", "device"}, {"HERRING_CHECK_FINITE", "on"}}),
      "HERRING_ON_HOST=device (environment) does not go together with HERRING_CHECK_FINITE=on (environment): sums "
      "on GPUs are not checked");
}

TEST(Config, BackupWorkersExcludeWhatIsForLostProcesses) {
  EXPECT_EQ(
      error_of({{"HERRING_BACKUP_WORKERS", "1"}, {"HERRING_FAILOVER", "on"}}),
      "HERRING_FAILOVER=on (environment) does not go together with HERRING_BACKUP_WORKERS=1 (environment): backup "
      "workers are for slow workers, not for lost ones");
  EXPECT_NE(error_of({{"HERRING_BACKUP_WORKERS", "1"}, {"HERRING_RENDEZVOUS", "a:1"}, {"HERRING_ELASTIC", "on"}})
                .find("HERRING_ELASTIC=on"),
            std::string::npos);
  EXPECT_EQ(read({{"HERRING_BACKUP_WORKERS", "3"}, {"HERRING_FAILOVER", "auto"}}).backup_workers, 3u);
  EXPECT_EQ(read({{"HERRING_FAILOVER", "on"}}).backup_workers, 0u);
}

TEST(Config, WhatNobodySetFollowsWhatSomebodyDid) {
  // Setting one value must not fail because of the default of another.
  const ConfigResult small = read_config(Pairs{{"HERRING_PART_BYTES", "8KB"}});
  EXPECT_EQ(small.config.chunk_bytes, 8192u);
  EXPECT_EQ(small.config.eager_bytes, 8192u);
  EXPECT_EQ(to_string(origin_of(small, "HERRING_EAGER_BYTES")), "HERRING_EAGER_BYTES=8KB (adjusted)");
  EXPECT_EQ(read({{"HERRING_CHUNK_BYTES", "64"}}).eager_bytes, 64u);
  EXPECT_EQ(read({{"HERRING_CHUNK_BYTES", "64"}}).embedded_eager_bytes, 64u);
  EXPECT_EQ(read({{"HERRING_CHUNK_BYTES", "64KB"}}).embedded_eager_bytes, 64u << 10);
  EXPECT_EQ(read({{"HERRING_HEARTBEAT_S", "10"}}).dead_after_s, 50);
  EXPECT_EQ(read({{"HERRING_DEAD_AFTER_S", "0.5"}}).heartbeat_s, 0.1);
  EXPECT_EQ(read({{"HERRING_ARENA_BYTES", "1MB"}}).local_part_bytes, 512u << 10);
  EXPECT_EQ(origin_of(read_config({}), "HERRING_HEARTBEAT_S").source, "default");
  EXPECT_EQ(read({{"HERRING_PROVIDER", "efa"}}).chunk_bytes, 1u << 20);
  EXPECT_EQ(read({{"HERRING_PROVIDER", "efa"}, {"HERRING_PART_BYTES", "8KB"}}).chunk_bytes, 8192u);
  EXPECT_EQ(read({{"HERRING_PROVIDER", "efa"}, {"HERRING_CHUNK_BYTES", "64KB"}}).chunk_bytes, 64u << 10);
  EXPECT_EQ(read({{"HERRING_PROVIDER", "verbs"}}).chunk_bytes, 128u << 10);
}

TEST(Config, EverySettingIsDocumentedOnceAndItsDefaultIsAccepted) {
  const std::vector<ConfigRow> rows = config_table();
  std::set<std::string_view> names;
  for (const ConfigRow& row : rows) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name << " twice";
    EXPECT_TRUE(row.name.starts_with("HERRING_")) << row.name;
    EXPECT_FALSE(row.help.empty()) << row.name;
    EXPECT_FALSE(row.range.empty()) << row.name;
    const ConfigResult result = read_config(Pairs{{std::string(row.name), row.default_text}});
    EXPECT_EQ(origin_of(result, row.name).value, row.default_text);
    EXPECT_EQ(origin_of(result, row.name).source, "environment");
  }
  for (const std::string_view passed_on : {"HERRING_HUB", "HERRING_SECRET", "HERRING_SERVERS"}) {
    EXPECT_TRUE(names.contains(passed_on)) << "launchers hand " << passed_on << " to their children";
  }
}

TEST(Config, ReadsTheProcessEnvironment) {
  ASSERT_EQ(setenv("HERRING_TEST_PAIR", "a=b", 1), 0);
  const Pairs environment = process_environment();
  ASSERT_EQ(unsetenv("HERRING_TEST_PAIR"), 0);
  EXPECT_EQ(std::count(environment.begin(), environment.end(),
                       std::pair<std::string, std::string>("HERRING_TEST_PAIR", "a=b")),
            1);
}

TEST(Config, ArenaIsHalfOfTheMemoryUnlessSet) {
  Config config;
  EXPECT_GT(resolve_arena_bytes(config), 1u << 20);
  config.arena_bytes = 12345;
  EXPECT_EQ(resolve_arena_bytes(config), 12345u);
}

}  // namespace
}  // namespace herring
