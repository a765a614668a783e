#include "core/memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <string>

#include "core/status.h"

namespace herring {
namespace {

namespace fs = std::filesystem;

/// A made-up /proc and /sys, removed at the end of the test.
class MemoryTest : public testing::Test {
 protected:
  MemoryTest() {
    std::string pattern = (fs::temp_directory_path() / "herring_memory_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = pattern;
    write("proc/meminfo", "MemFree:  1 kB\nMemTotal:       16384 kB\n");
  }
  ~MemoryTest() override {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }

  void write(const fs::path& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::uint64_t usable() const { return usable_memory_bytes(root_); }

  static constexpr std::uint64_t kMachine = 16384 * 1024;
  fs::path root_;
};

TEST_F(MemoryTest, IsThatOfTheMachineWithoutCgroups) { EXPECT_EQ(usable(), kMachine); }

TEST_F(MemoryTest, CgroupTwoLimitsIt) {
  write("proc/self/cgroup", "0::/pods/job\n");
  write("sys/fs/cgroup/pods/job/memory.max", "1000000\n");
  EXPECT_EQ(usable(), 1'000'000u);
  write("sys/fs/cgroup/pods/job/memory.max", "max\n");
  EXPECT_EQ(usable(), kMachine);
}

TEST_F(MemoryTest, ALimitFurtherOutCounts) {
  write("proc/self/cgroup", "0::/pods/job\n");
  write("sys/fs/cgroup/pods/job/memory.max", "3000000\n");
  write("sys/fs/cgroup/pods/memory.max", "2000000\n");
  EXPECT_EQ(usable(), 2'000'000u);
}

TEST_F(MemoryTest, AContainerSeesItsLimitAtTheMount) {
  // Inside a container the path is the host's, but only the container's own directory is mounted.
  write("proc/self/cgroup", "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
  EXPECT_EQ(usable(), 4'000'000u);
}

TEST_F(MemoryTest, CgroupOneLimitsItAndNoLimitIsAHugeNumber) {
  write("proc/self/cgroup", "4:cpuset,memory:/jobs/7\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(usable(), kMachine);
  write("sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", "5000000\n");
  EXPECT_EQ(usable(), 5'000'000u);
}

TEST_F(MemoryTest, BrokenFilesAreIgnoredAndAMissingMachineIsAnError) {
  write("proc/self/cgroup", "nonsense\n:\n0:\n0::\n::::\n");
  write("sys/fs/cgroup/memory.max", "-5\n");
  EXPECT_EQ(usable(), kMachine);
  fs::remove(root_ / "proc/meminfo");
  try {
    usable();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    EXPECT_NE(error.status().message().find("HERRING_ARENA_BYTES"), std::string::npos);
  }
}

TEST(Memory, OfThisMachineIsPlausible) {
  EXPECT_GT(usable_memory_bytes(), 16u << 20);
  EXPECT_LT(usable_memory_bytes(), std::uint64_t{1} << 50);
}

}  // namespace
}  // namespace herring
