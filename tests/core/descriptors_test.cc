#include "core/descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <string>

#include "core/status.h"

namespace herring {
namespace {

/// What a process with these limits says; in one of its own, because a hard limit cannot be raised again.
bool holds_with(rlim_t soft, rlim_t hard, const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{soft, hard};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::_exit(10);
    ::_exit(check() ? 0 : 1);
  }
  int status = 0;
  return ::waitpid(child, &status, 0) == child && status == 0;
}

rlim_t soft_limit() {
  rlimit limit{};
  EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  return limit.rlim_cur;
}

// A hub and the connections of worker 0 are in one process: raised for each alone, the limit was too low for both.
TEST(DescriptorClaim, TheLimitIsRaisedForAllThatAreThereTogether) {
  EXPECT_TRUE(holds_with(256, 8192, [] {
    std::optional<DescriptorClaim> hub(std::in_place, "the hub", 10, 2000);
    if (soft_limit() != 2000 + kOtherDescriptors) return false;
    DescriptorClaim worker("worker 0", 10, 3000);
    if (soft_limit() != 5000 + kOtherDescriptors) return false;
    DescriptorClaim moved;
    moved = std::move(worker);
    hub.reset();
    const DescriptorClaim next("the next hub", 10, 2000);
    return soft_limit() == 5000 + kOtherDescriptors;
  }));
}

TEST(DescriptorClaim, ALimitThatIsHighEnoughStays) {
  EXPECT_TRUE(holds_with(4000, 8192, [] {
    const DescriptorClaim claim("the hub", 10, 100);
    return soft_limit() == 4000;
  }));
}

TEST(DescriptorClaim, TheHardLimitIsTakenWhereMoreMayBeNeeded) {
  EXPECT_TRUE(holds_with(256, 600, [] {
    const DescriptorClaim claim("the hub", 500, 5000);
    return soft_limit() == 600;
  }));
}

TEST(DescriptorClaim, WhatIsNeededForCertainAndCannotBeIsRefused) {
  EXPECT_TRUE(holds_with(256, 600, [] {
    try {
      const DescriptorClaim claim("server 3", 600, 700);
    } catch (const Error& error) {
      const std::string text = error.status().message();
      return error.status().code() == Code::kUnavailable && text.starts_with("server 3 needs 600") &&
             text.find("may have 600 in all") != std::string::npos && soft_limit() == 256;
    }
    return false;
  }));
}

TEST(DescriptorHint, SaysWhatToDoWhereNoneIsLeft) {
  EXPECT_EQ(descriptor_hint(), "");
  EXPECT_TRUE(holds_with(40, 40, [] {
    while (::open("/dev/null", O_RDONLY | O_CLOEXEC) >= 0) continue;
    const std::string none = descriptor_hint();
    ::close(39);
    ::close(38);
    const std::string two = descriptor_hint();
    return none.find("of 40 file descriptors") != std::string::npos &&
           two.find("of 40 file descriptors") != std::string::npos && two.find("ulimit -n") != std::string::npos;
  }));
}

}  // namespace
}  // namespace herring
