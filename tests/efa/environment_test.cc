#include "efa/environment.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>

namespace herring::efa {
namespace {

TEST(TemporaryVariable, IsThereAsLongAsItLives) {
  ASSERT_EQ(std::getenv("HERRING_TEST_TEMPORARY"), nullptr);
  {
    const TemporaryVariable variable("HERRING_TEST_TEMPORARY", "+/a/b:+/c");
    ASSERT_NE(std::getenv("HERRING_TEST_TEMPORARY"), nullptr);
    EXPECT_STREQ(std::getenv("HERRING_TEST_TEMPORARY"), "+/a/b:+/c");
    EXPECT_NE(std::getenv("PATH"), nullptr);
  }
  EXPECT_EQ(std::getenv("HERRING_TEST_TEMPORARY"), nullptr);
}

TEST(TemporaryVariable, WhatIsSetMeanwhileStays) {
  {
    const TemporaryVariable variable("HERRING_TEST_TEMPORARY", "1");
    ASSERT_EQ(setenv("HERRING_TEST_OTHER", "2", 1), 0);
  }
  ASSERT_NE(std::getenv("HERRING_TEST_OTHER"), nullptr);
  EXPECT_STREQ(std::getenv("HERRING_TEST_OTHER"), "2");
  unsetenv("HERRING_TEST_OTHER");
  unsetenv("HERRING_TEST_TEMPORARY");
}

// With setenv() a thread that looks for HOME at the wrong moment reads freed memory.
TEST(TemporaryVariable, OtherThreadsFindTheirVariablesAllTheTime) {
  ASSERT_EQ(setenv("HERRING_TEST_LAST", "here", 1), 0);
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> missing = 0, looked = 0;
  std::thread reader([&] {
    while (!stop) {
      const char* value = std::getenv("HERRING_TEST_LAST");
      if (value == nullptr || std::string_view(value) != "here") ++missing;
      ++looked;
    }
  });
  while (looked == 0) std::this_thread::yield();
  for (int i = 0; i < 2'000; ++i) {
    const TemporaryVariable variable("HERRING_TEST_TEMPORARY", std::to_string(i));
  }
  stop = true;
  reader.join();
  EXPECT_EQ(missing, 0u) << "of " << looked;
  unsetenv("HERRING_TEST_LAST");
}

}  // namespace
}  // namespace herring::efa
