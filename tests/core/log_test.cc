#include "core/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <vector>

namespace herring {
namespace {

/// A file in memory for a logger to write to.
class LogTest : public testing::Test {
 protected:
  LogTest() : descriptor_(memfd_create("log", MFD_CLOEXEC)) {}
  ~LogTest() override { close(descriptor_); }

  LoggerOptions options(LogLevel level = LogLevel::kInfo) {
    LoggerOptions options;
    options.level = level;
    options.who = "rank 3";
    options.descriptor = descriptor_;
    options.burst = 2;
    options.now = [this] { return now_; };
    return options;
  }

  std::string written() const {
    std::string text(static_cast<std::size_t>(lseek(descriptor_, 0, SEEK_END)), '\0');
    const ssize_t got = pread(descriptor_, text.data(), text.size(), 0);
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    return text;
  }

  int descriptor_;
  Instant now_{};
};

TEST_F(LogTest, LinesSayWhoAndHowBad) {
  Logger logger(options());
  logger.log(LogLevel::kError, "server 1 is lost");
  logger.log(LogLevel::kInfo, "two lines\nof text\n");
  logger.log(LogLevel::kWarning, "");
  EXPECT_EQ(written(),
            "herring[rank 3] error: server 1 is lost\nherring[rank 3] info: two lines\nherring[rank 3] info: of text\n"
            "herring[rank 3] warning: \n");
}

TEST_F(LogTest, BelowTheLevelNothingIsWritten) {
  Logger logger(options(LogLevel::kWarning));
  logger.log(LogLevel::kInfo, "x");
  logger.log_limited(LogLevel::kDebug, "key", "x");
  EXPECT_EQ(written(), "");
  EXPECT_TRUE(logger.is_on(LogLevel::kError) && logger.is_on(LogLevel::kWarning));
  EXPECT_FALSE(logger.is_on(LogLevel::kInfo) || logger.is_on(LogLevel::kDebug));
}

TEST_F(LogTest, TextOfAPeerCannotSteerTheTerminal) {
  LoggerOptions nameless = options();
  nameless.who.clear();
  Logger logger(nameless);
  logger.log(LogLevel::kInfo, "a\x1b[31mb\rc\x7f\td");
  EXPECT_EQ(written(), "herring info: a?[31mb?c?\td\n");
}

TEST_F(LogTest, RepeatsAreHeldBackAndCounted) {
  Logger logger(options());
  for (int i = 0; i < 100; ++i) logger.log_limited(LogLevel::kWarning, "stray", "stray packet");
  logger.log_limited(LogLevel::kWarning, "other", "something else");
  EXPECT_EQ(logger.suppressed(), 98u);
  now_ += std::chrono::seconds(10);
  logger.log_limited(LogLevel::kWarning, "stray", "stray packet");
  logger.log_limited(LogLevel::kWarning, "stray", "stray packet");
  EXPECT_EQ(written(),
            "herring[rank 3] warning: stray packet\nherring[rank 3] warning: stray packet\n"
            "herring[rank 3] warning: something else\n"
            "herring[rank 3] warning: stray packet (and 98 more like this)\nherring[rank 3] warning: stray packet\n");
}

TEST_F(LogTest, KeysMadeFromDataDoNotGrowWithoutBound) {
  Logger logger(options(LogLevel::kError));
  for (int i = 0; i < 10'000; ++i) {
    now_ += std::chrono::microseconds(1);
    logger.log_limited(LogLevel::kError, std::string("key").append(std::to_string(i)), "x");
  }
  const std::string text = written();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 10'000);
}

TEST_F(LogTest, ThreadsDoNotMixLines) {
  Logger logger(options());
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&logger] {
        for (int i = 0; i < kLines; ++i) {
          logger.log(LogLevel::kInfo, std::string(100, 'x'));
          logger.log_limited(LogLevel::kInfo, "same", std::string(100, 'y'));
        }
      });
    }
  }
  std::istringstream lines(written());
  int whole = 0;
  for (std::string line; std::getline(lines, line); ++whole) {
    const bool is_whole = line == "herring[rank 3] info: " + std::string(100, 'x') ||
                          line == "herring[rank 3] info: " + std::string(100, 'y');
    ASSERT_TRUE(is_whole) << line;
  }
  EXPECT_EQ(whole, kThreads * kLines + 2);
  EXPECT_EQ(logger.suppressed(), static_cast<std::uint64_t>(kThreads * kLines - 2));
}

TEST_F(LogTest, AFullPipeDoesNotHoldTheJobUp) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  LoggerOptions to_pipe = options();
  to_pipe.descriptor = ends[1];
  Logger logger(to_pipe);
  const auto start = std::chrono::steady_clock::now();
  logger.log(LogLevel::kError, std::string(1 << 20, 'x'));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace herring
